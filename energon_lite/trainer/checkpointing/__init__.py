"""Checkpoints that any layout of ranks can read."""
