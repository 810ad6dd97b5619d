"""FSDP2-native GRPO and PPO post-training that survives being killed."""

__version__ = "0.1.0"
