"""Blends of very many data sets, with a cache of their properties, and weights that are shares of tokens."""
