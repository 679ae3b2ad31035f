"""References under ``aux``: data sets and folders from which a cooker reads files by name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from energon_lite.config.reference_path import beside
from energon_lite.documents import Node
from energon_lite.documents.paths import is_url, local_path, missing_file_fix

__all__ = ["AuxReference", "read_aux"]

_SCHEME = re.compile(r"(?P<kind>filesystem|byterange)(?:\+(?P<scheme>[A-Za-z0-9.-]+))?://(?P<path>.*)", re.DOTALL)
_EXPECTED = "a data set's folder or URL, or filesystem://folder"


@dataclass(frozen=True)
class AuxReference:
    """One entry of ``aux``.

    Args:
        kind: ``dataset``: a prepared one; ``filesystem``: the files of a folder; ``byterange``: byte ranges of these.
        path: absolute, or a URL.
        origin: ``file:line``, for messages.
    """

    kind: str
    path: str
    origin: str = ""


def read_aux(node: Node, missing_ok: bool = False) -> dict[str, AuxReference]:
    """Read the entries of ``aux`` by name, in their order.

    Raises:
        ConfigError: an entry is no path, or does not exist and ``missing_ok`` is False.
    """
    return {name: _read(entry, missing_ok) for name, entry in node.entries().items()}


def _read(node: Node, missing_ok: bool) -> AuxReference:
    text = node.string(_EXPECTED)
    match = _SCHEME.fullmatch(text)
    kind = "dataset" if match is None else match["kind"]
    if match is not None:
        text = match["path"] if match["scheme"] is None else f"{match['scheme']}://{match['path']}"
    text, given = local_path(text), text
    if "\0" in text or "::" in text:
        what = "chained URLs are not read: they can make fsspec do more than reading"
        raise node.error(what, "write the URL of one store", expected=_EXPECTED)
    folder = os.path.dirname(local_path(node.file))
    if text == given and not is_url(text) and is_url(node.file):
        text = beside(node, text)
    if is_url(text):
        return AuxReference(kind, text, node.origin)
    path = os.path.abspath(os.path.join(folder, text))
    if not (
        missing_ok or os.path.isdir(path) or (kind == "dataset" and path.endswith(".jsonl") and os.path.isfile(path))
    ):
        fix = missing_file_fix(path, "correct the path (a relative one counts from this document's folder)")
        raise node.error("the path does not exist", fix, expected=_EXPECTED, found=f"no such folder: {path}")
    return AuxReference(kind, path, node.origin)
