"""Resolution of the path of a reference: a data set or another document, local or at a URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from energon_lite.config.metadataset_document import Reference
from energon_lite.documents import Node
from energon_lite.documents.paths import is_data_path, is_url, join_url, local_path, missing_file_fix

__all__ = ["beside", "is_metadataset", "locate"]


def is_metadataset(path: str | os.PathLike[str] | Mapping[str, Any]) -> bool:
    """True for a dict and for the path of a ``.yaml`` or ``.yml`` file, False for a data set's folder.

    Example:
        >>> is_metadataset("blend.yaml"), is_metadataset("datasets/digits")
        (True, False)
    """
    if isinstance(path, Mapping):
        return True
    name = os.fspath(path)
    return name.endswith((".yaml", ".yml")) and not os.path.isdir(name)


def locate(reference: Reference, missing_ok: bool = False) -> str:
    """Resolve the path of a reference to an absolute path; a URL is returned unchanged.

    Relative paths are relative to the document's folder, which may be at a URL, or, in a dict, to the current one.
    With ``missing_ok`` the path need not exist.
    """
    node = reference.path
    text = local_path(node.value)
    if "::" in text:
        fix = f"write {text.rpartition('::')[2]!r}; ReadAhead(folder=...) keeps what was read on a local disk"
        what = "chained URLs are not read: they can make fsspec do more than reading"
        raise node.error(what, fix, expected="the URL of a store")
    if is_url(text):
        return text
    if is_url(node.file) and text == node.value:
        return beside(node, text)
    path = os.path.abspath(os.path.join(os.path.dirname(node.file), text))
    if os.path.isdir(path) or (os.path.isfile(path) and is_metadataset(path)) or is_data_path(path):
        return path
    expected = "the folder of a prepared data set, a JSONL file (.jsonl), or a metadataset (.yaml)"
    if os.path.isfile(path):
        what = "this file is neither a data set nor a metadataset"
        fix = f"name the folder that holds the shards: {os.path.dirname(text) or '.'}"
        raise node.error(what, fix, expected=expected, found=f"the file {path}")
    if missing_ok:
        return path
    fix = missing_file_fix(path, "correct the path (a relative one counts from this document's folder)")
    found = f"no such file or folder: {path}"
    raise node.error("the path does not exist", fix, expected=expected, found=found)


def beside(node: Node, path: str) -> str:
    """Resolve a path in a document at a URL to a URL.

    Args:
        node: the node of the path, which knows its document.
        path: the path, without a scheme.

    Raises:
        ConfigError: the path is absolute, or leads out of the store.
    """
    expected = "a path relative to the document, or a URL"
    if os.path.isabs(path):
        fix = f"write 'file://{path}' if it is on local disks; else a relative path, or the URL"
        raise node.error("an absolute path in a document behind a URL", fix, expected=expected)
    try:
        return join_url(node.file, path)
    except ValueError:
        raise node.error("the path leads out of the store", "remove the '..' in front", expected=expected) from None
