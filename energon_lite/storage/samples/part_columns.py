"""``columns`` of a ``dataset.yaml``: the columns of a table that become parts, such as ``{jpg: "image[bytes]"}``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from energon_lite.errors import ConfigError
from energon_lite.storage.read.opened_source import Renaming
from energon_lite.storage.samples.field_map import Access, compile_field_map

__all__ = ["compile_columns"]

#: Extensions whose decoder turns text into another type.
_OF_TEXT = frozenset(["json", "jsn", "cls", "cls2", "index", "inx", "id"])


def compile_columns(columns: Mapping[str, str]) -> Renaming:
    """Compile the rules by which columns of a source become parts.

    Args:
        columns: for each part its column, with an access into it if it is a struct or a list.

    Raises:
        ConfigError: an access cannot be read, or names alternatives.

    Example:
        >>> renaming = compile_columns({"jpg": "image[bytes]"})
        >>> column, make = renaming["jpg"]
        >>> column, make({"bytes": b"...", "path": "a.jpg"})
        ('image', b'...')
    """
    made = {}
    for name, accesses in compile_field_map(columns).fields:
        if len(accesses) != 1:
            raise ConfigError("a part is made of one column", at=f"columns.{name}", fix="write one, without a comma")
        is_text = name.rpartition(".")[2] in _OF_TEXT
        made[name] = accesses[0].part, partial(_made, accesses[0], is_text)
    return made


def _made(access: Access, is_text: bool, value: Any) -> Any:
    if access.steps:
        value = access.follow({access.part: value})
    return value.encode() if is_text and isinstance(value, str) else value
