"""Whether data and its documents may bring code that is run, where nobody says so for a single data set or decoder.

They may not: reading never runs what came with the data. A program whose data is all its own can say otherwise for all
of it, as Megatron-Energon's rule is: ``ENERGON_LITE_TRUST_CODE=1`` in its environment, or :func:`trust_by_default`.
"""

from __future__ import annotations

import os

__all__ = ["trust_by_default", "trusts"]

_VARIABLE = "ENERGON_LITE_TRUST_CODE"
_default = os.environ.get(_VARIABLE) == "1"


def trusts(said: bool | None) -> bool:
    """Whether code is trusted: what was said, or where nothing was said (None) the process's rule."""
    return _default if said is None else said


def trust_by_default(trusted: bool = True) -> None:
    """Have everything trusted in this process and in those it starts, where ``trust_code`` is not given.

    Example:
        >>> trust_by_default()
        >>> get_train_dataset("mine", batch_size=4, worker_config=config)  # may name a sample_loader
    """
    global _default
    _default = trusted
    os.environ[_VARIABLE] = str(int(trusted))
