"""Wrong documents in tables: a row is (document, line, column, path in the document, what is said, the cure)."""

from __future__ import annotations

from pathlib import Path

from energon_lite.errors import ConfigError

__all__ = ["Row", "check"]

Row = tuple[str, int, int, "str | None", str, str]


def check(error: ConfigError, path: Path, row: Row) -> None:
    _, line, column, at, said, cure = row
    assert (error.file, error.line, error.column, error.at) == (str(path), line, column, at)
    message = str(error)
    assert f"{path}:{line}:{column}" in message, "the place must be one that an editor can jump to"
    assert said in message
    if cure:
        assert cure in (error.fix or "")
