"""A data set on the command line: ``PATH --split-part train --split-config split.yaml``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from energon_lite.config.metadataset import LeafSpec
    from energon_lite.storage.read.opened_source import AnySource

__all__ = ["open_dataset", "split_config_option", "split_part_option"]

split_part_option = click.option("--split-part", default="train", help="Of a data set: the split.")
split_config_option = click.option("--split-config", default="split.yaml", help="Of a folder: the file of its splits.")


def open_dataset(path: str, split_part: str, split_config: str) -> list[tuple[LeafSpec, AnySource]]:
    """What the documents say of each data set of a folder or a blend, and its samples.

    Raises:
        ConfigError, DatasetError: something is wrong with the documents or the files.
    """
    from energon_lite.loading.leaves import find_leaves, open_source

    specs = find_leaves(path, split_part, "dataset.yaml", split_config, None)
    return [(spec, open_source(spec)) for spec in specs]
