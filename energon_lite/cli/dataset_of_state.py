"""Reconstruction of the data set of a loader's state, from the state and from options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from energon_lite.errors import UsageError
from energon_lite.loading.iterators.state import State

__all__ = ["dataset_of_state", "dataset_options"]

#: Arguments of ``get_train_dataset`` that are stored in a state.
_NAMES = (
    "split_part", "batch_size", "batch_drop_last", "shuffle_buffer_size", "max_samples_per_sequence", "repeat",
    "batching", "length_column", "plan_chunk", "micro_batches_per_step", "packing_buffer_size", "chunk_size",
    "chunk_remainder",
)  # fmt: skip
_OPTIONS = (
    click.option("--task-encoder", metavar="MODULE:CLASS", help="The hooks; required if batches are content-decided."),
    click.option("--shuffle-over-epochs-multiplier", default="1", help="As in get_train_dataset."),
    click.option("--dataset-config", default="dataset.yaml", help="As in get_train_dataset."),
    click.option("--split-config", default="split.yaml", help="As in get_train_dataset."),
    click.option("--use-measured-skips", is_flag=True, help="As in get_train_dataset."),
    click.option("--trust-code", is_flag=True, help="As in get_train_dataset."),
)


def dataset_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of :func:`dataset_of_state` to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def dataset_of_state(
    state: State,
    path: str,
    batch_size: int | None = None,
    *,
    task_encoder: str | None,
    shuffle_over_epochs_multiplier: str,
    **options: Any,
) -> Any:
    """Make the data set of a state, optionally with another blend or batch size.

    Args:
        state: state of a loader.
        path: path of the blend, or of the folder.
        batch_size: samples of a micro-batch; None: as in the state.
        task_encoder, shuffle_over_epochs_multiplier: values of the options.
        options: further arguments of ``get_train_dataset``.

    Raises:
        UsageError: the state is of validation, or an option is invalid.
    """
    from energon_lite.cli.task_encoder_argument import make_task_encoder
    from energon_lite.loading.recipes import get_train_dataset
    from energon_lite.worker_config import WorkerConfig

    settings = state["identity"]["settings"]
    if settings.get("kind") != "train":
        raise UsageError("the state is of validation, which begins anew", fix="give a state of training")
    multiplier = shuffle_over_epochs_multiplier.lower()
    if multiplier not in ("none", "null") and not multiplier.lstrip("-").isdigit():
        raise UsageError(f"--shuffle-over-epochs-multiplier {multiplier}", fix="give an integer, or none")
    if task_encoder is None and state.get("kind") == "lanes" and "batching" not in settings:
        raise UsageError(
            "hooks made the batches of the run, and none are given",
            fix="give --task-encoder MODULE:CLASS, the task encoder of the run",
        )
    arguments = {name: settings[name] for name in _NAMES if name in settings}
    if batch_size is not None:
        arguments["batch_size"] = batch_size
    return get_train_dataset(
        path,
        **arguments,
        **options,
        lanes=state.get("lanes"),
        worker_config=WorkerConfig(rank=0, world_size=1, seed_offset=settings.get("seed", 0)),
        shuffle_over_epochs_multiplier=None if multiplier in ("none", "null") else int(multiplier),
        task_encoder=None if task_encoder is None else make_task_encoder(task_encoder),
    )
