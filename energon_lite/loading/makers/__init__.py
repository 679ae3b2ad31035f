"""Jobs: from the addresses of samples to batches, and what happened to samples on the way.

Pure: which process does it, and when, changes nothing. ``pipeline`` makes a planned batch, ``chunk_pipeline`` all
the batches of a chunk whose content decides how many there are.
"""
