"""The doctor: examine machines, ranks and links before a training."""
