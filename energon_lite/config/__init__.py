"""Configuration: from YAML to checked, frozen descriptions of data sets, their splits, and blends."""

from energon_lite.config.dataset import DatasetConfig, load_dataset_config
from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.config.metadataset import is_metadataset, load_metadataset
from energon_lite.config.split import SplitConfig, load_split_config

__all__ = [
    "DatasetConfig",
    "LeafSpec",
    "SplitConfig",
    "is_metadataset",
    "load_dataset_config",
    "load_metadataset",
    "load_split_config",
]
