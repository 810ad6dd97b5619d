"""Processes that run user code, each with a guard that ends whatever the code has started.

driver (`process.GuardedProcess`) -> guard (`guard.main`) -> worker (a function that serves) -> processes of user code
"""
