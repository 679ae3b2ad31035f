"""Samples from bytes: decoding of parts, and their mapping to fields."""
