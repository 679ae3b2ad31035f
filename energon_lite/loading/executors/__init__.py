"""Who does the jobs: this process, other processes, or threads. They own nothing, and may die at any time."""
