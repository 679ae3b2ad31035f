"""Search for the fastest worker settings of a loader on this machine, within a memory limit."""
