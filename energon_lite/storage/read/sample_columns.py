"""The columns of samples that were read together."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Columns"]


class Columns(NamedTuple):
    """Samples by columns: one list for each part, with one value for each sample.

    Attributes:
        keys: the key of each sample.
        shards: the name of each sample's shard.
        names: the parts that were read, in the order of the tar.
        parts: by name, each sample's part: bytes from tar shards, values of any kind from other sources.
    """

    keys: list[str]
    shards: list[str]
    names: tuple[str, ...]
    parts: dict[str, list[Any]]
