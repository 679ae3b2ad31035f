"""Problems of a sample, a shard or a data set."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["Problem"]


@dataclass(frozen=True)
class Problem:
    """A problem, and its place.

    Args:
        dataset: the folder, file or URL.
        shard: name of the shard; empty: the problem is not about one shard.
        key: key of the sample; empty: the problem is not about one sample.
        part: part of the sample, such as ``jpg``; empty: the sample as a whole.
        kind: ``decode``, ``missing part``, ``empty part``, ``double part``, ``duplicate key``, ``shard``, ``index``,
            ``field_map``, ``sample``, or the name of a hook.
        what: description.
        note: it is a remark, and nothing is broken.
    """

    dataset: str
    shard: str
    key: str
    part: str
    kind: str
    what: str
    note: bool = False

    @property
    def where(self) -> str:
        """Shard, key and part, as text.

        Example:
            >>> Problem("/data/coco", "s000.tar", "000007", "jpg", "decode", "...").where
            's000.tar: 000007.jpg'
        """
        sample = f"{self.key}.{self.part}" if self.part and self.key else self.key or self.part
        return ": ".join(word for word in (self.shard, sample) if word) or self.dataset

    def plain(self) -> dict[str, Any]:
        """Return the problem as a dict of plain values."""
        return dataclasses.asdict(self)
