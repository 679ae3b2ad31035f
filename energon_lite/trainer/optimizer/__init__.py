"""The optimizer of the trainer: sharded, in buckets, with communication that overlaps computation."""
