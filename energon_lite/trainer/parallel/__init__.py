"""Parallel layout: the ranks of a run, their groups, and the sharding of tensors over them."""
