"""Paths of batches: copies to a device ahead of the step, and broadcasts within a replica."""
