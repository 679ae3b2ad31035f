"""Tar files: the samples of a shard, and the places of their parts."""
