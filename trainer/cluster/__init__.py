"""Start and call the processes of a job, on Ray or without it (`local`). Only this room imports Ray."""
