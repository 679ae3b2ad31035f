"""Samples made of bytes: which part is which field, and what is decoded."""
