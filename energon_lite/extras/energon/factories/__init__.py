"""Data sets as objects, by Energon's names: factories that a dataset.yaml may name, and metadatasets."""
