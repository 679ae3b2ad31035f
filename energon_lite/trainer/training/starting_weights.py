"""Where a new run begins that is not from nothing: the weights of a checkpoint, if they are of the same model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from energon_lite.errors import StateMismatchError
from energon_lite.trainer.checkpointing.checkpoint import Place, read_state
from energon_lite.trainer.checkpointing.weights import find_weights, load_weights
from energon_lite.trainer.models.config import MODEL_MEANING, ModelConfig
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.plain_optimizer import Optimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.config_file import model_config_of

#: Names of the parameters that an image prefix adds to a language model; what a checkpoint lacks of them begins as new.
MAY_LACK = ("vision.*",)
#: Settings that it adds.
_PREFIX = ("image_size", "patch_size")


def load_starting_weights(
    place: str, model: LlamaModel, mesh: ParallelMesh, optimizer: Optimizer, *, ignore: Collection[str] = ()
) -> Place:
    """Fill a new run's model with the weights of a checkpoint. Every rank must call it.

    Args:
        place: a checkpoint, or a folder of checkpoints, of which the newest is meant.
        model, optimizer: filled in place.
        mesh: the ranks.
        ignore: settings of the model that may be other ones than the checkpoint's.

    Returns:
        The checkpoint that was read.

    Raises:
        StateError: there is no whole checkpoint.
        StateMismatchError: it is of a model with other settings: its weights might fit, and would mean something else.
    """
    found = find_weights(place, mesh, whole=False)
    saved = read_state(found).get("config")
    changes = [] if saved is None else model_changes(model_config_of(saved), model.config, ignore)
    if changes:
        names = ", ".join(name for name, _, _ in changes)
        said = "; ".join(f"{name} is {there!r} there, {here!r} here" for name, there, here in changes)
        number = "1 setting" if len(changes) == 1 else f"{len(changes)} settings"
        raise StateMismatchError(
            f"the checkpoint is of another model, by {number}: {said}",
            where=found,
            fix="take the checkpoint's own settings with model.preset=init_from; if another model is meant, say so: "
            f"train.init_from_ignore=[{names}]",
        )
    # An image prefix is nothing that a language model has: then it begins as new.
    return load_weights(found, model, mesh, optimizer, may_lack=MAY_LACK)


def model_changes(there: ModelConfig, here: ModelConfig, ignore: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
    """Settings in which two models differ by what they compute, with both values."""
    ignore = {*ignore, *(_PREFIX if there.image_size == 0 else ())}
    # None key heads are one for each query head.
    same = there.kv_heads == here.kv_heads
    compared = [name for name in MODEL_MEANING if name not in ignore and not (name == "num_kv_heads" and same)]
    values = [(name, getattr(there, name), getattr(here, name)) for name in compared]
    return [(name, theirs, ours) for name, theirs, ours in values if theirs != ours]
