"""Functions that a data set contains. They run only if the caller gives ``trust_code=True``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from energon_lite.errors import ConfigError

__all__ = ["load_function"]


def load_function(folder: str, name: str, default: str) -> Callable[..., Any]:
    """Load the function that ``name`` refers to from the data set's folder.

    Args:
        folder: the ``.nv-meta`` folder.
        name: ``file.py`` or ``file.py:function``.
        default: name of the function if ``name`` has none.

    Raises:
        ConfigError: the file does not exist, or has no such function.
    """
    file, _, function = name.partition(":")
    path = os.path.join(folder, file)
    spec = importlib.util.spec_from_file_location("energon_lite_trusted_code", path) if os.path.isfile(path) else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"there is no {file!r} to load a function from", file=path, fix="put the file there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loaded = getattr(module, function or default, None)
    if not callable(loaded):
        raise ConfigError(f"there is no function {function or default!r}", file=path, fix="define it, or name another")
    return loaded
