"""The whole way on real data: shards, prepare, blend, train, kill, resume, another layout, read. See ``__main__``."""
