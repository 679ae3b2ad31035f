"""The optimizer of the trainer: sharded, in buckets, its communication behind the computation."""
