"""Checkpoints that any layout can read."""
