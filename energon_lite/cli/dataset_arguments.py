"""A data set on the command line: ``PATH --split-parts train --split-config split.yaml``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from energon_lite.documents import parse_yaml

if TYPE_CHECKING:
    from energon_lite.config.leaf_spec import LeafSpec
    from energon_lite.storage.read.opened_source import AnySource

__all__ = ["batching_argument", "open_dataset", "split_config_option", "split_part_option", "strategy_document"]

split_part_option = click.option(
    "--split-parts", "split_part", metavar="NAME", default="train", help="Of a data set: the split."
)
split_config_option = click.option("--split-config", default="split.yaml", help="Of a folder: the file of its splits.")


def strategy_document(text: str, option: str) -> dict[str, Any]:
    """``name:key=value,key=value`` as a document.

    Raises:
        ConfigError: a value is no YAML.
    """
    name, _, rest = text.partition(":")
    document: dict[str, Any] = {"strategy": name}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        document[key.strip()] = parse_yaml(value.strip() or "null", f"{option} {text}").plain()
    return document


def batching_argument(text: str) -> dict[str, Any] | str:
    """What ``--batching`` means: the path of a YAML file, or a strategy as above."""
    return text if text.endswith((".yaml", ".yml")) else strategy_document(text, "--batching")


def open_dataset(path: str, split_part: str, split_config: str) -> list[tuple[LeafSpec, AnySource]]:
    """What the documents say of each data set of a folder or a blend, and its samples.

    Raises:
        ConfigError, DatasetError: something is wrong with the documents or the files.
    """
    from energon_lite.loading.leaves import find_leaves, open_source

    specs = find_leaves(path, split_part, "dataset.yaml", split_config, None)
    return [(spec, open_source(spec)) for spec in specs]
