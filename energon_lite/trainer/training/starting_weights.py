"""Weights that a new run starts from: a checkpoint or a Hugging Face folder, of the same model."""

from __future__ import annotations

from collections.abc import Collection

from energon_lite.errors import StateMismatchError
from energon_lite.trainer.checkpointing.checkpoint import Place, read_state
from energon_lite.trainer.checkpointing.weights import find_weights, load_weights
from energon_lite.trainer.conversion.from_huggingface import huggingface_model_config, is_huggingface, load_huggingface
from energon_lite.trainer.models.config import ModelConfig, model_changes, model_config_of
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh

#: Parts that a language model lacks: they start with random weights.
NEW_PARTS = ("vision.*", "projector.*")


def load_starting_weights(
    place: str,
    model: LlamaModel,
    mesh: ParallelMesh,
    optimizer: OverlappedDistributedOptimizer,
    *,
    ignore: Collection[str] = (),
) -> Place:
    """Fill a new run's model with existing weights. Every rank must call it.

    Args:
        place: a checkpoint, a folder of checkpoints (the newest is used), or a Hugging Face model folder.
        model, optimizer: filled in place.
        mesh: the ranks.
        ignore: model settings that may differ from the checkpoint's.

    Returns:
        The checkpoint or folder that was read.

    Raises:
        StateError: there is no complete checkpoint.
        ConfigError: the model of the folder has parts that this one lacks.
        StateMismatchError: the model settings differ: the weights might fit, but would have another meaning.
    """
    here = model.config
    if is_huggingface(place):
        there = huggingface_model_config(place, dtype=here.dtype, vocab_multiple=here.vocab_multiple)
        _check_same(there, here, ignore, place)
        load_huggingface(place, model, there, mesh, optimizer, may_lack=NEW_PARTS)
        return place
    checkpoint = find_weights(place, mesh, whole=False)
    saved = read_state(checkpoint).get("config")
    if saved is not None:
        _check_same(model_config_of(saved), here, ignore, checkpoint)
    return load_weights(checkpoint, model, mesh, optimizer, may_lack=NEW_PARTS)


def _check_same(there: ModelConfig, here: ModelConfig, ignore: Collection[str], found: Place) -> None:
    changes = model_changes(there, here, ignore)
    if changes:
        names = ", ".join(name for name, _, _ in changes)
        differences = "; ".join(f"{name} is {theirs!r} there, {ours!r} here" for name, theirs, ours in changes)
        number = "1 setting" if len(changes) == 1 else f"{len(changes)} settings"
        raise StateMismatchError(
            f"the weights are of another model, by {number}: {differences}",
            where=found,
            fix="take their own settings with model.preset=init_from; if another model is meant, say so: "
            f"train.init_from_ignore=[{names}]",
        )
