"""Start and call the processes of a job, on Ray or as plain processes. Only this package imports Ray."""
