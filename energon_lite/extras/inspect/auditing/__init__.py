"""Audit of the samples that a run was trained on: the plan compared with records, and the history of a sample."""
