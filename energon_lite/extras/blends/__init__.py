"""Blends of very many data sets, cached; weights that change during the run, or are shares of tokens."""
