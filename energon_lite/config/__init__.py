"""Configuration: from YAML to checked, frozen descriptions of data sets, their splits, and blends."""
