"""`trainer view`: one HTML file with the curves, episodes and tokens of runs."""
