"""A data set of one format made from one of another: tar, MDS, Parquet, JSONL; what ``energon-lite convert`` does."""
