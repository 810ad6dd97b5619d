"""The pool of processes that run user code, each with a reaper that ends whatever the code has started.

driver (`pool.WorkerPool`) -> reaper (`reaper.main`) -> worker (`worker.serve`) -> processes that user code starts

Programs that the policy writes are not trusted: each runs in a process of its own, closed in (`programs`).
"""
