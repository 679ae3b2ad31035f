"""The entries of a metadataset as objects, for programs that build one: each is the dict that stands in the YAML."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["MetadatasetNode"]


class MetadatasetNode(dict[str, Any]):
    """An entry of a metadataset: a reference to a data set, a blend, a join, or what belongs to one.

    Args:
        fields: its keys, as in YAML; those that are None are left out.

    Example:
        >>> MetadatasetV2(path="blend.yaml", splits={"train": MetadatasetNode(path="coco", subset={"range": [0, 100]})})
    """

    def __init__(self, **fields: Any):
        given = {name: value for name, value in fields.items() if value is not None}
        super().__init__({name: os.fspath(one) if isinstance(one, os.PathLike) else one for name, one in given.items()})
