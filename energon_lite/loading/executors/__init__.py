"""Executors: they run jobs in this process, in other processes, or in threads. Workers keep no state and may die."""
