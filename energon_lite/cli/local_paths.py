"""Path arguments of the command line that must exist, or must be local."""

from __future__ import annotations

import os
from typing import Any

import click

from energon_lite.documents.paths import is_url, local_path, missing_file_fix
from energon_lite.errors import UsageError

__all__ = ["ExistingPath", "local_dataset"]


class ExistingPath(click.Path):
    """Type of a path argument that must exist; the error for a missing path proposes a similar one."""

    def __init__(self, *, dir_okay: bool = True):
        super().__init__(exists=True, dir_okay=dir_okay, path_type=str)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        value = local_path(value)
        if not os.path.exists(value):
            self.fail(f"{value!r} does not exist: {missing_file_fix(value, 'correct the path')}", param, ctx)
        return super().convert(value, param, ctx)


def local_dataset(path: str, command: str) -> str:
    """Return the absolute path of a data set that a command writes into.

    Raises:
        UsageError: it is a URL.
    """
    text = local_path(path)
    if is_url(text):
        raise UsageError(
            f"{command} works on local folders",
            where=text,
            fix=f"{command} a local copy, and upload its .nv-meta with the shards, then load from the URL",
        )
    return os.path.abspath(os.path.expanduser(text))
