"""Deferred import of pyarrow, an optional package."""

from __future__ import annotations

from typing import Any

from energon_lite.errors import UsageError

__all__ = ["import_arrow"]


def import_arrow(where: str) -> Any:
    """Import the package ``pyarrow``, with ``pyarrow.parquet`` and ``pyarrow.ipc``.

    Raises:
        UsageError: the package is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"Parquet and Arrow files need the package pyarrow: {error}",
            where=where,
            fix="pip install 'energon-lite[parquet]'",
        ) from error
    return pyarrow
