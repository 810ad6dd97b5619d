"""The life of a process: signals, its log, its start-up, what ended it, and whether it starts again."""
