"""A demonstration on real data: prepare, blend, train, kill, resume, change the layout, read. See ``__main__``."""
