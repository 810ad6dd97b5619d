"""Views of a run that only read it: its picture, a comparison of several runs, and what happened to it."""
