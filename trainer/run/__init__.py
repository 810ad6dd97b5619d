"""The directory of a run, its resume, its save schedule, and its stop."""
