"""What is wrong with a sample, a shard or a data set."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["Problem"]


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, and where.

    Args:
        dataset: the folder, file or URL.
        shard: the shard's name; empty: it is not about one shard.
        key: the sample's key; empty: it is not about one sample.
        part: of the sample, such as ``jpg``; empty: the sample as a whole.
        kind: ``decode``, ``missing part``, ``empty part``, ``double part``, ``duplicate key``, ``shard``, ``index``,
            ``field_map``, ``sample``, or the name of a hook.
        what: in words.
        note: worth knowing, but nothing is broken.
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
        """Shard, key and part, as one reads them.

        Example:
            >>> Problem("/data/coco", "s000.tar", "000007", "jpg", "decode", "...").where
            's000.tar: 000007.jpg'
        """
        sample = f"{self.key}.{self.part}" if self.part and self.key else self.key or self.part
        return ": ".join(word for word in (self.shard, sample) if word) or self.dataset

    def plain(self) -> dict[str, Any]:
        """As a dict of plain values."""
        return dataclasses.asdict(self)
