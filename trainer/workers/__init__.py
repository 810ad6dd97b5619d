"""Policy, critic and reference over a device mesh. This room does not import Ray."""
