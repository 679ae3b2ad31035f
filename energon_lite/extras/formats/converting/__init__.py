"""Conversion of data sets between tar, MDS, Parquet, JSONL and other formats, as by ``energon-lite convert``."""
