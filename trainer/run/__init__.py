"""A run on disk and over time: its directory, what it resumes from, when it saves and stops."""
