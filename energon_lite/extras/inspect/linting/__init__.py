"""Examining all samples of a data set: what is broken, and in which sample."""
