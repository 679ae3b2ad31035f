"""Options and arguments for a data set: ``PATH --split-parts train --split-config split.yaml``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from energon_lite.documents import parse_yaml

if TYPE_CHECKING:
    from energon_lite.config.leaf_spec import LeafSpec
    from energon_lite.storage.read.opened_source import AnySource

__all__ = ["batching_argument", "open_dataset", "split_config_option", "split_part_option", "strategy_document"]

split_part_option = click.option(
    "--split-parts", "split_part", metavar="NAME", default="train", help="The split of the data set."
)
split_config_option = click.option("--split-config", default="split.yaml", help="For a folder: the file of its splits.")


def strategy_document(text: str, option: str) -> dict[str, Any]:
    """Convert ``name:key=value,key=value`` to a document.

    Raises:
        ConfigError: a value is not valid YAML.
    """
    name, _, rest = text.partition(":")
    document: dict[str, Any] = {"strategy": name}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        document[key.strip()] = parse_yaml(value.strip() or "null", f"{option} {text}").plain()
    return document


def batching_argument(text: str) -> dict[str, Any] | str:
    """Convert the value of ``--batching``: the path of a YAML file is kept, a strategy becomes a document."""
    return text if text.endswith((".yaml", ".yml")) else strategy_document(text, "--batching")


def open_dataset(path: str, split_part: str, split_config: str) -> list[tuple[LeafSpec, AnySource]]:
    """Open each data set of a folder or a blend, and return it with its description.

    Raises:
        ConfigError, DatasetError: a document or a file has a mistake.
    """
    from energon_lite.loading.leaves import find_leaves, open_source

    specs = find_leaves(path, split_part, "dataset.yaml", split_config, None)
    return [(spec, open_source(spec)) for spec in specs]
