"""Where a new run begins that is not from nothing: the weights of a checkpoint, or of a folder of Hugging Face, if they
are of the same model."""

from __future__ import annotations

from collections.abc import Collection

from energon_lite.errors import StateMismatchError
from energon_lite.trainer.checkpointing.checkpoint import Place, read_state
from energon_lite.trainer.checkpointing.weights import find_weights, load_weights
from energon_lite.trainer.conversion.to_model import huggingface_model_config, is_huggingface, load_huggingface
from energon_lite.trainer.models.config import ModelConfig, model_changes, model_config_of
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.plain_optimizer import Optimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh

#: An image prefix is nothing that a language model has: then it begins as new.
NEW_PARTS = ("vision.*", "projector.*")


def load_starting_weights(
    place: str, model: LlamaModel, mesh: ParallelMesh, optimizer: Optimizer, *, ignore: Collection[str] = ()
) -> Place:
    """Fill a new run's model with weights that are there. Every rank must call it.

    Args:
        place: a checkpoint, a folder of checkpoints, of which the newest is meant, or a model's folder of Hugging Face.
        model, optimizer: filled in place.
        mesh: the ranks.
        ignore: settings of the model that may be other ones than the checkpoint's.

    Returns:
        The checkpoint or folder that was read.

    Raises:
        StateError: there is no whole checkpoint.
        ConfigError: the folder has a model with parts that ours has not.
        StateMismatchError: it is of a model with other settings: its weights might fit, and would mean something else.
    """
    here = model.config
    if is_huggingface(place):
        there = huggingface_model_config(place, dtype=here.dtype, vocab_multiple=here.vocab_multiple)
        _check_same(there, here, ignore, place)
        load_huggingface(place, model, there, mesh, optimizer, may_lack=NEW_PARTS)
        return place
    found = find_weights(place, mesh, whole=False)
    saved = read_state(found).get("config")
    if saved is not None:
        _check_same(model_config_of(saved), here, ignore, found)
    return load_weights(found, model, mesh, optimizer, may_lack=NEW_PARTS)


def _check_same(there: ModelConfig, here: ModelConfig, ignore: Collection[str], found: Place) -> None:
    changes = model_changes(there, here, ignore)
    if changes:
        names = ", ".join(name for name, _, _ in changes)
        said = "; ".join(f"{name} is {theirs!r} there, {ours!r} here" for name, theirs, ours in changes)
        number = "1 setting" if len(changes) == 1 else f"{len(changes)} settings"
        raise StateMismatchError(
            f"the weights are of another model, by {number}: {said}",
            where=found,
            fix="take their own settings with model.preset=init_from; if another model is meant, say so: "
            f"train.init_from_ignore=[{names}]",
        )
