"""Data sets as objects with Energon's names: factories for dataset.yaml, and metadatasets."""
