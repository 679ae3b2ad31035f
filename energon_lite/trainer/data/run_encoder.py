"""Task encoder of a run: the trainer's, or the one that the run's configuration names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from energon_lite import ConcatSplit, TaskEncoder
from energon_lite.batching import strategy_from_dict
from energon_lite.errors import ConfigError, UsageError
from energon_lite.named_object import find_named
from energon_lite.trainer.data.config import DataConfig
from energon_lite.trainer.data.rows import RowsTaskEncoder
from energon_lite.trainer.data.task_encoder import MultimodalTaskEncoder
from energon_lite.trainer.data.tokenizer import make_tokenizer
from energon_lite.trainer.models.config import ModelConfig


def make_task_encoder(data: DataConfig, model: ModelConfig, *, training: bool = True) -> RowsTaskEncoder:
    """Make the task encoder of a run's data section, for a model.

    ``data.task_encoder`` is called with ``data.task_encoder_args``, and with the arguments of
    :class:`MultimodalTaskEncoder` that its signature names. Batches by tokens are packed if the capacity counts tokens
    without padding (``packed_tokens`` and ``cost``).

    Raises:
        ConfigError: the tokenizer has more tokens than the model, or the arguments do not fit.
        UsageError: there is no such tokenizer, or no such task encoder.
    """
    strategy = None if data.batching is None else strategy_from_dict(data.batching, at="data.batching")
    capacity = getattr(strategy, "capacity", None)
    offered: dict[str, Callable[[], Any]] = {
        "max_length": lambda: data.max_length,
        "image_size": lambda: model.image_size,
        "patch_size": lambda: model.patch_size,
        "pooled": lambda: model.vision is not None and model.vision.pooling != "none",
        "image_token": lambda: None if model.vision is None else model.vision.image_token,
        "training": lambda: training,
        "packed": lambda: (
            isinstance(strategy, ConcatSplit) or getattr(capacity, "unit", "padded_tokens") != "padded_tokens"
        ),
        "tokenizer": lambda: make_tokenizer(data.tokenizer, model.vocab_size),
    }
    return RowsTaskEncoder(_called(data, offered), model)


def _called(data: DataConfig, offered: Mapping[str, Callable[[], Any]]) -> TaskEncoder:
    """Make the encoder from its arguments."""
    made: Any = MultimodalTaskEncoder
    if (text := data.task_encoder) is not None:
        wanted = "a class derived from energon_lite.TaskEncoder"
        example = "data.task_encoder=train:Encoder"
        made = find_named(text, option="data.task_encoder", form="module:Class", example=example, wanted=wanted)
    if callable(made) and not isinstance(made, TaskEncoder):
        names, given = inspect.signature(made).parameters, dict(data.task_encoder_args or {})
        # A class derived from the trainer's that passes on keyword arguments takes all of its arguments.
        passes_on = inspect.isclass(made) and issubclass(made, MultimodalTaskEncoder)
        passes_on &= any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
        taken = {name for name in offered if (passes_on or name in names) and name not in given}
        given = {name: value() for name, value in offered.items() if name in taken} | given
        try:
            inspect.signature(made).bind(**given)
        except TypeError as error:
            what = f"{text or 'MultimodalTaskEncoder'} cannot be made of {', '.join(given) or 'nothing'}: {error}"
            raise ConfigError(what, at="data.task_encoder_args", fix="give its own arguments, by their names") from None
        made = made(**given)
    if not isinstance(made, TaskEncoder):
        what = f"it gives a {type(made).__name__}, and no task encoder"
        raise UsageError(what, where=f"data.task_encoder {text}", fix="derive it from energon_lite.TaskEncoder")
    return made
