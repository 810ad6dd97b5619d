"""Policy, critic and reference over a device mesh. This package does not import Ray."""
