"""Flat keywords as Energon's functions take them: those that fill a group of options, those without effect, and the
replacements of others."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from energon_lite.errors import UsageError, did_you_mean
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.loader import DataLoader
from energon_lite.loading.options import ByTokens, Chunks, Reading
from energon_lite.loading.recipes import DatasetOptions, argument_names
from energon_lite.storage.samples.decoding import SampleDecoder

_log = logging.getLogger(__name__)

#: Keywords that tune machinery that does not exist here.
_WITHOUT_EFFECT = frozenset(
    {
        "checkpoint_every_min_n_samples",
        "checkpoint_every_sec",
        "gc_collect_every_n_steps",
        "gc_freeze_at_start",
        "n_checkpoints",
        "parallel_shard_iters",
        "pin_memory",
        "watchdog_initial_timeout_seconds",
    }
)
#: Keyword that Energon has deprecated, and ignores with a warning.
_HANDLER = "handler"
#: Keywords that Energon has deprecated, and passes on to the decoder.
_OF_THE_DECODER = ("auto_decode", "image_decode", "av_decode", "video_decode_audio", "guess_content")
#: Keywords that are only checked, or have another name here: ``fail_on_timeout=True`` is ``on_timeout="raise"``.
_OF_A_LOADER = ("worker_config", "fail_on_timeout")
#: Energon 8's names of ``start_method``.
_START_METHOD = ("worker_type", "multiprocessing_context")

#: Types of the groups, by argument.
_GROUPS = {"batching": ByTokens, "chunks": Chunks, "reading": Reading}
#: For each keyword, the argument of its group, and the group's field.
_FILLS = {
    "chunk_size": ("chunks", "size"),
    "chunk_remainder": ("chunks", "remainder"),
    "lanes": ("chunks", "lanes"),
    **{option.name: ("batching", option.name) for option in fields(ByTokens) if option.name != "strategy"},
    **{option.name: ("reading", option.name) for option in fields(Reading)},
}


def _completed(function: Callable[..., Any], kwargs: Mapping[str, Any], options: DatasetOptions) -> DatasetOptions:
    """Return the options, completed by the keywords for fields of groups.

    Example:
        >>> _completed(get_train_dataset, {"lanes": 48}, DatasetOptions(encoder, None, Chunks(), Reading())).chunks
        Chunks(size=None, remainder=None, lanes=48)
    """
    for name in filter(_FILLS.__contains__, kwargs):
        place, field = _FILLS[name]
        value = kwargs[name]
        group = getattr(options, place)
        default = getattr(_GROUPS[place], field)
        if group is None and value not in (None, default):
            raise UsageError(f"{name}={value!r} has no effect without batching", fix="leave it out")
        if group is None or (value is None and default is None):
            continue
        if getattr(group, field) != default:
            raise UsageError(
                f"{name}={value!r} and {place}={type(group).__name__}({field}={getattr(group, field)!r}): "
                "the setting is given twice",
                fix=f"leave out {name}",
            )
        options = options._replace(**{place: replace(group, **{field: value})})
    _check_others(kwargs, function, [*argument_names(function), *_FILLS, *_OF_THE_DECODER])
    return options


def _with_decoder(encoder: TaskEncoder, kwargs: Mapping[str, Any], function: Callable[..., Any]) -> TaskEncoder:
    """Return the task encoder, or, if there are keywords for decoding, a copy of it with that decoder.

    Args:
        function: the function that was given them, for messages.

    Raises:
        UsageError: an unknown form of decoding.
    """
    given = {name: kwargs[name] for name in _OF_THE_DECODER if kwargs.get(name) is not None}
    if not given:
        return encoder
    _log.warning(
        "%s(%s=...) is deprecated: set the task encoder's attribute, decoder = SampleDecoder(...), or None for bytes",
        function.__name__,
        next(iter(given)),
    )
    own = copy.copy(encoder)
    if not given.pop("auto_decode", True):
        own.decoder = None
    elif given:
        own.decoder = replace(getattr(encoder, "decoder", None) or SampleDecoder(), **given)
    return own


def _check_others(given: Iterable[str], function: Callable[..., Any], known: list[str]) -> None:
    """Refuse keywords that are neither known nor accepted for compatibility with Energon; log the latter."""
    for name in given:
        if name in known:
            continue
        if name in _WITHOUT_EFFECT:
            _log.debug("%s=... is accepted for Energon's sake and has no effect", name)
        elif name == _HANDLER:
            what = "%s(handler=...) has no effect: give WorkerConfig(global_error_handler=...)"
            _log.warning(what, function.__name__)
        else:
            fix = did_you_mean(name, known, "the arguments are: " + ", ".join(known))
            raise UsageError(f"{function.__name__} has no argument {name!r}", fix=fix)


class Keywords:
    """Guest of keywords; see :class:`~energon_lite.loading.recipes.KeywordGuest`."""

    def of_dataset(
        self, function: Callable[..., Any], kwargs: Mapping[str, Any], options: DatasetOptions
    ) -> DatasetOptions:
        options = _completed(function, kwargs, options)
        return options._replace(encoder=_with_decoder(options.encoder, kwargs, function))

    def of_loader(
        self, function: Callable[..., Any], kwargs: Mapping[str, Any], dataset: SavableDataset
    ) -> dict[str, Any]:
        names = argument_names(DataLoader)
        config = kwargs.get("worker_config")
        if config is not None and config != getattr(dataset, "worker_config", config):
            raise UsageError(
                "worker_config belongs to the data set, which was given another one",
                fix="give it to get_train_dataset or get_val_dataset",
            )
        _check_others(kwargs, function, [*names, *_OF_A_LOADER, *_START_METHOD])
        arguments = {name: value for name, value in kwargs.items() if name in names}
        if kwargs.get("fail_on_timeout"):
            arguments = {"on_timeout": "raise"} | arguments
            if arguments["on_timeout"] != "raise":
                what = f"fail_on_timeout with on_timeout={arguments['on_timeout']!r}"
                raise UsageError(what, fix="give one of the two")
        for name in _START_METHOD:
            kind = kwargs.get(name)
            if kind is not None and arguments.setdefault("start_method", kind) != kind:
                what = f"{name}={kind!r} with start_method={arguments['start_method']!r}"
                raise UsageError(what, fix="give one of them")
        return arguments


KEYWORDS = Keywords()
