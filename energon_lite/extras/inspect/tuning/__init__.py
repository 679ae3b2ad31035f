"""How many workers, and which, a loader is fastest with on this machine: measured, within a memory limit."""
