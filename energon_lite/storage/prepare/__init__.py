"""Finding the samples of all shards once, and writing down where they are."""
