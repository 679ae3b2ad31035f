"""Measuring: a pass over all samples of a data set that stores a length, and other values, for each."""
