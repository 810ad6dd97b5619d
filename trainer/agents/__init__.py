"""Agents: programs of the user that ask the policy through an OpenAI-compatible endpoint."""
