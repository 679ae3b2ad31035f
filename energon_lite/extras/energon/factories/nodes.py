"""Entries of a metadataset as objects, for programs that build one: each is the dict of the YAML."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["MetadatasetNode"]


class MetadatasetNode(dict[str, Any]):
    """An entry of a metadataset: a reference to a data set, a blend, a join, or a part of one.

    Args:
        fields: its keys, as in YAML; None values are left out.

    Example:
        >>> MetadatasetV2(path="blend.yaml", splits={"train": MetadatasetNode(path="coco", subset={"range": [0, 100]})})
    """

    def __init__(self, **fields: Any):
        given = {name: value for name, value in fields.items() if value is not None}
        plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in given.items()}
        super().__init__(plain)
