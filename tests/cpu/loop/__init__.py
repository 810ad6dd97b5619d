"""Whole runs in the process of the test, with an engine that computes nothing."""
