"""From data sets to batches in the training loop: ``loader`` hands them out, ``savable_loader`` saves where it is.

Its rooms, each of which may use those after it: ``states`` and ``measuring``; ``walks``, which micro-batch is next;
``workers``, who does the jobs; ``jobs``, from addresses to batches.
"""
