"""Comparison of strategies on the lengths of a data set."""
