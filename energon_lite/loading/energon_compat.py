"""Keywords of Energon's functions: which are the same here, which do nothing, and what to write in place of others."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from energon_lite.errors import UsageError, nearest
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.loader import DataLoader

__all__ = ["check_keywords", "loader_arguments"]

_log = logging.getLogger(__name__)

#: They tune machinery which does not exist here.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_pool",
        "checkpoint_every_min_n_samples",
        "checkpoint_every_sec",
        "gc_collect_every_n_steps",
        "gc_freeze_at_start",
        "n_checkpoints",
        "parallel_shard_iters",
        "watchdog_initial_timeout_seconds",
    }
)
#: Energon has given them up, too: it ignores the first one with a warning, and takes the others for the decoder's.
_HANDLER = "handler"
_OF_THE_DECODER = ("auto_decode", "image_decode", "av_decode", "video_decode_audio", "guess_content")


def check_keywords(
    kwargs: Mapping[str, Any], function: Callable[..., Any], known: Callable[..., Any] | None = None
) -> None:
    """See that keywords which ``function`` takes for Energon's sake may be ignored.

    Args:
        kwargs: those that are none of its parameters.
        function: the one that was called.
        known: the one that has the parameters, if that is another one.

    Raises:
        UsageError: one may not.
    """
    for name in kwargs:
        if name in _WITHOUT_EFFECT:
            _log.debug("%s=... is accepted for Energon's sake and has no effect", name)
            continue
        if name == _HANDLER:
            _log.warning(
                "%s(handler=...) has no effect: give WorkerConfig(global_error_handler=...)", function.__name__
            )
            continue
        fix = "set the attribute of your task encoder: decoder = SampleDecoder(image_decode=...), or None for bytes"
        if name not in _OF_THE_DECODER:
            names = _names_of(known or function)
            guess = nearest(name, names)
            fix = f"did you mean {guess!r}?" if guess else "the arguments are: " + ", ".join(names)
        raise UsageError(f"{function.__name__} has no argument {name!r}", fix=fix)


def loader_arguments(
    dataset: SavableDataset, kwargs: Mapping[str, Any], function: Callable[..., Any]
) -> dict[str, Any]:
    """Those of ``kwargs`` that a loader takes.

    Raises:
        UsageError: there are unknown ones, or a ``worker_config`` that is not the data set's.
    """
    names = _names_of(DataLoader)
    config = kwargs.get("worker_config")
    if config is not None and config != getattr(dataset, "worker_config", config):
        raise UsageError(
            "worker_config belongs to the data set, which was given another one",
            fix="give it to get_train_dataset or get_val_dataset",
        )
    others = {name: value for name, value in kwargs.items() if name not in (*names, "worker_config")}
    check_keywords(others, function, DataLoader)
    return {name: value for name, value in kwargs.items() if name in names}


def _names_of(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("kwargs", "dataset")]
