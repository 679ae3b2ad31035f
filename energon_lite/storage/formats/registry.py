"""The built-in formats, and the schemes, extensions and folders by which paths select them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from energon_lite.storage.read.source import Source, register_source

__all__ = ["FORMATS"]


@dataclass(frozen=True)
class _Lazily:
    """Opener of data sets by a function in a module that is imported at the first call."""

    module: str
    function: str = "open_source"

    def __call__(self, path: str, split_part: str) -> Source:
        functions: Any = import_module(f"energon_lite.storage.formats.{self.module}")
        source: Source = getattr(functions, self.function)(path, split_part)
        return source


#: By scheme: the module, extensions of files, and the file that marks a folder of the format.
FORMATS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "parquet": ("tables", (".parquet",), ""),
    "arrow": ("tables", (".arrow", ".feather"), ""),
    "lance": ("lance", (".lance",), ""),
    "megatron": ("megatron", (".idx", ".bin"), ""),
    "mds": ("mds", (), "index.json"),
}

for _scheme, (_module, _extensions, _marker) in FORMATS.items():
    register_source(_scheme, _Lazily(_module), extensions=_extensions, marker=_marker)
register_source("megatron_sequences", _Lazily("megatron", "open_sequences"))
