"""Where bytes are: tar shards, their indexes, decoding, and preparing a folder of shards."""
