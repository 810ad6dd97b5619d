"""The driver's side of learning: episodes become experience, and experience becomes updates."""
