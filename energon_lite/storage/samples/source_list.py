"""The origins of a batch's samples, stored by columns and built on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any

from energon_lite.samples import SourceInfo

__all__ = ["SourceList"]


class SourceList(Sequence[SourceInfo]):
    """A sequence that equals the tuple of its :class:`SourceInfo`; as columns it is cheap to make and to send.

    Args:
        paths: path of the data set for each sample, or one path for all.
        indices: index of each sample in its data set.
        shards: name of each sample's shard.
        keys: key of each sample.
        names: names of the parts for each sample, or one tuple for all.

    Example:
        >>> sources = SourceList("/data", [7], ["s0.tar"], ["key"], ("jpg", "txt"))
        >>> sources[0].file_names
        ('key.jpg', 'key.txt')
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        indices: Sequence[int],
        shards: Sequence[str],
        keys: Sequence[str],
        names: tuple[str, ...] | list[tuple[str, ...]],
    ):
        self._columns = (paths, indices, shards, keys, names)

    @cached_property
    def _made(self) -> tuple[SourceInfo, ...]:
        paths, indices, shards, keys, names = self._columns
        path_of = repeat(paths, len(keys)) if isinstance(paths, str) else paths
        names_of = names if isinstance(names, list) else repeat(names, len(keys))
        return tuple(
            SourceInfo(
                dataset_path=path, index=index, shard_name=shard, file_names=tuple([f"{key}.{name}" for name in parts])
            )
            for path, index, shard, key, parts in zip(path_of, indices, shards, keys, names_of, strict=True)
        )

    def __len__(self) -> int:
        return len(self._columns[3])

    def __getitem__(self, place: Any) -> Any:
        return self._made[place]

    def __iter__(self) -> Iterator[SourceInfo]:
        return iter(self._made)

    def __add__(self, other: Sequence[SourceInfo]) -> tuple[SourceInfo, ...]:
        return self._made + tuple(other)

    def __radd__(self, other: Sequence[SourceInfo]) -> tuple[SourceInfo, ...]:
        return tuple(other) + self._made

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (tuple, SourceList)):
            return self._made == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._made)

    def __repr__(self) -> str:
        return repr(self._made)

    def __reduce__(self) -> tuple[Any, ...]:
        return SourceList, self._columns
