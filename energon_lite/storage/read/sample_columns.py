"""Samples that were read together."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Columns"]


class Columns(NamedTuple):
    """Samples by columns.

    Attributes:
        keys: of each sample.
        shards: the name of each sample's shard.
        names: the parts that were read, in the order of the tar.
        parts: by name, each sample's part: bytes; of other sources than tars any values.
    """

    keys: list[str]
    shards: list[str]
    names: tuple[str, ...]
    parts: dict[str, list[Any]]
