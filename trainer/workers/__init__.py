"""Policy, critic and reference over a device mesh. No Ray in here."""
