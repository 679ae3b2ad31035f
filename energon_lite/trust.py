"""Default for running code that comes with data or its documents, if ``trust_code`` is not given.

By default, reading never runs code that came with the data. A program that uses only its own data can allow it
everywhere, as Megatron-Energon does: with ``ENERGON_LITE_TRUST_CODE=1`` in its environment, or
:func:`trust_by_default`.
"""

from __future__ import annotations

import os

__all__ = ["trust_by_default", "trusts"]

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
