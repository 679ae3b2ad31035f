"""Jobs: from the addresses of samples to batches, with the outcomes of the samples.

Jobs are pure: the result does not depend on the process, or the time, in which a job runs. ``runner`` makes a planned
batch, ``chunk_pipeline`` all the batches of a chunk with content-decided batches.
"""
