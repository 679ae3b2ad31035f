"""Columns that are computed from stored parts: sizes of images, bytes, values in JSON."""
