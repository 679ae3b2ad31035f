"""The built-in model of a run: the maker of a Llama or VLM from a configuration, and its first weights."""

from __future__ import annotations

from collections.abc import Collection

from energon_lite.errors import StateMismatchError, counted
from energon_lite.trainer.checkpointing.checkpoint import read_state
from energon_lite.trainer.checkpointing.files import Place
from energon_lite.trainer.checkpointing.weights import find_weights, load_weights
from energon_lite.trainer.conversion.from_huggingface import huggingface_model_config, is_huggingface, load_huggingface
from energon_lite.trainer.models.config import ModelConfig, model_changes, model_config_of
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.training.config import TrainerConfig

#: Parts that a language model lacks: they start with random weights.
NEW_PARTS = ("vision.*", "projector.*")
#: Advice for weights of another model.
_STARTING = "take their own settings with model.preset=init_from; if another model is meant, say so:"


def language_model(config: TrainerConfig, mesh: ParallelMesh, *, resumes: bool = False) -> LlamaModel:
    """Make the model of ``config.model``, with the weights of ``train.init_from`` if that is given.

    Args:
        config: configuration of the run.
        mesh: the ranks.
        resumes: leave out the first weights, because those of a checkpoint will replace them.

    Raises:
        TopologyError: the model does not fit the ranks.
        StateError, ConfigError, StateMismatchError: see :func:`load_starting_weights`.
    """
    place = None if resumes else config.train.init_from
    drawn = () if resumes else ("*",) if place is None else NEW_PARTS
    model = LlamaModel(config.model, mesh, seed=config.seed, drawn=drawn)
    if place is not None:
        load_starting_weights(place, model, ignore=config.train.init_from_ignore)
    return model


def load_starting_weights(place: str, model: LlamaModel, *, ignore: Collection[str] = ()) -> None:
    """Fill a new run's model with existing weights, before its optimizer is made. Every rank must call it.

    Args:
        place: a checkpoint, a folder of checkpoints (the newest is used), or a Hugging Face model folder.
        model: filled in place.
        ignore: model settings that may differ from the checkpoint's.

    Raises:
        StateError: there is no complete checkpoint.
        ConfigError: the model of the folder has parts that this one lacks.
        StateMismatchError: the model settings differ: the weights might fit, but would have another meaning.
    """
    here, mesh = model.config, model.mesh
    if is_huggingface(place):
        there = huggingface_model_config(place, dtype=here.dtype, vocab_multiple=here.vocab_multiple)
        _check_same(there, here, place, _STARTING, ignore)
        load_huggingface(place, model, there, mesh, may_lack=NEW_PARTS)
        return
    checkpoint = find_weights(place, mesh, whole=False)
    check_model(checkpoint, here, _STARTING, ignore)
    load_weights(checkpoint, model, mesh, may_lack=NEW_PARTS)


def check_model(checkpoint: Place, here: ModelConfig, fix: str, ignore: Collection[str] = ()) -> None:
    """Check that a checkpoint is of a model with these settings, if it records any.

    Args:
        checkpoint: the checkpoint.
        here: the settings.
        fix: advice for the error, before ``train.init_from_ignore`` with the settings that differ.
        ignore: settings that may differ.

    Raises:
        StateMismatchError: settings differ: the tensors might fit, but would have another meaning.
    """
    saved = read_state(checkpoint).get("config")
    if saved is not None:
        _check_same(model_config_of(saved), here, checkpoint, fix, ignore)


def _check_same(there: ModelConfig, here: ModelConfig, found: Place, fix: str, ignore: Collection[str]) -> None:
    changes = model_changes(there, here, ignore)
    if changes:
        names = ", ".join(name for name, _, _ in changes)
        differences = "; ".join(f"{name} is {theirs!r} there, {ours!r} here" for name, theirs, ours in changes)
        raise StateMismatchError(
            f"the weights are of another model, by {counted(len(changes), 'setting')}: {differences}",
            where=found,
            fix=f"{fix} train.init_from_ignore=[{names}]",
        )
