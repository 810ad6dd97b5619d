"""The pool of processes that run user code, each with a guard that ends whatever the code has started.

driver (`process.GuardedProcess`) -> guard (`reaper.main`) -> worker (a function that serves) -> processes of user code
"""
