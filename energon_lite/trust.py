"""Default for running code that comes with data or its documents, if ``trust_code`` is not given.

By default, reading never runs code that came with the data. A program that uses only its own data can allow it
everywhere, as Megatron-Energon does: with ``ENERGON_LITE_TRUST_CODE=1`` in its environment, or
:func:`trust_by_default`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from energon_lite.errors import ConfigError

_VARIABLE = "ENERGON_LITE_TRUST_CODE"
_default = os.environ.get(_VARIABLE) == "1"


def trusts(said: bool | None) -> bool:
    """True if code is trusted: the given value, or for None the default of the process."""
    return _default if said is None else said


def trust_by_default(trusted: bool = True) -> None:
    """Set the default of ``trust_code`` for this process and the processes that it starts.

    Example:
        >>> trust_by_default()
        >>> get_train_dataset("mine", batch_size=4, worker_config=config)  # may name a sample_loader
    """
    global _default
    _default = trusted
    os.environ[_VARIABLE] = str(int(trusted))


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
