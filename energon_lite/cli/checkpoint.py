"""``energon-lite checkpoint``: show saved states of loaders, and convert them."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from energon_lite.batching.plan import worlds_for
from energon_lite.cli.arguments import ExistingPath, make_task_encoder, with_options
from energon_lite.entry_points import commands, load, state_readers
from energon_lite.errors import StateError, UsageError, counted, listed
from energon_lite.loading.iterators.lane_cursor import read_lanes, shortened
from energon_lite.loading.iterators.state import KINDS, State, kind_of, read_rebase
from energon_lite.loading.saved_states import (
    SUFFIXES,
    FoundState,
    find_states,
    merged,
    read_state_files,
    write_state_file,
)

STATES = click.argument("states", nargs=-1, required=True, type=ExistingPath())
#: Arguments of ``get_train_dataset`` that are stored in a state.
_NAMES = (
    "split_part", "batch_size", "batch_drop_last", "shuffle_buffer_size", "max_samples_per_sequence", "repeat",
    "packing_buffer_size",
)  # fmt: skip
#: Fields of its option ``batching``.
_OF_BATCHING = ("length_column", "micro_batches_per_step")

# -- the data set of a state ----------------------------------------------------------------------------------------

#: Options of :func:`dataset_of_state`.
dataset_options = with_options(
    click.option("--task-encoder", metavar="MODULE:CLASS", help="The hooks; required if batches are content-decided."),
    click.option("--shuffle-over-epochs-multiplier", default="1", help="As in get_train_dataset."),
    click.option("--dataset-config", default="dataset.yaml", help="As in get_train_dataset."),
    click.option("--split-config", default="split.yaml", help="As in get_train_dataset."),
    click.option("--use-measured-skips", is_flag=True, help="As in get_train_dataset."),
    click.option("--trust-code", is_flag=True, help="As in get_train_dataset."),
)


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
        options: fields of :class:`~energon_lite.Reading`.

    Raises:
        UsageError: the state is of validation, or an option is invalid.
    """
    from energon_lite.loading.options import ByTokens, Chunks, Reading
    from energon_lite.loading.recipes import get_train_dataset
    from energon_lite.worker_config import WorkerConfig

    settings = state["identity"]["settings"]
    if settings.get("kind") != "train":
        raise UsageError("the state is of validation, which always starts anew", fix="give a state of training")
    multiplier = shuffle_over_epochs_multiplier.lower()
    if multiplier not in ("none", "null") and not multiplier.lstrip("-").isdigit():
        raise UsageError(f"--shuffle-over-epochs-multiplier {multiplier}", fix="give an integer, or none")
    if task_encoder is None and state.get("kind") == "lanes" and "batching" not in settings:
        raise UsageError(
            "hooks made the batches of the run, but no task encoder is given",
            fix="give --task-encoder MODULE:CLASS, the task encoder of the run",
        )
    arguments = {name: settings[name] for name in _NAMES if name in settings}
    if batch_size is not None:
        arguments["batch_size"] = batch_size
    if "batching" in settings:
        given = {name: settings[name] for name in _OF_BATCHING if name in settings}
        arguments["batching"] = ByTokens(settings["batching"], **given)
    size = settings.get("chunk_size") or settings.get("plan_chunk")
    return get_train_dataset(
        path,
        **arguments,
        reading=Reading(**options),
        chunks=Chunks(size, settings.get("chunk_remainder"), state.get("lanes")),
        worker_config=WorkerConfig(rank=0, world_size=1, seed_offset=settings.get("seed", 0)),
        shuffle_over_epochs_multiplier=None if multiplier in ("none", "null") else int(multiplier),
        task_encoder=None if task_encoder is None else make_task_encoder(task_encoder),
    )


# -- commands -------------------------------------------------------------------------------------------------------


class _GroupWithGuests(click.Group):
    """Group with the subcommands that guests add under ``checkpoint NAME``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_subcommands()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = _subcommands().get(cmd_name)
        if target is None:
            return super().get_command(ctx, cmd_name)
        return load(target)


def _subcommands() -> dict[str, str]:
    prefix = "checkpoint "
    return {name.removeprefix(prefix): entry.target for name, entry in commands().items() if name.startswith(prefix)}


@click.group(cls=_GroupWithGuests, name="checkpoint", context_settings={"show_default": True})
def command() -> None:
    """Show saved states of loaders, merge those of all ranks, divide them among other ranks, or convert them.

    STATES are files of JSON, msgpack or torch.save: states, or checkpoints with loader states. Or folders of such
    files, or a checkpoint folder of energon_lite's trainer. No code in them is run.
    """


@command.command()
@STATES
@click.option("--json", "as_json", is_flag=True, help="Write the summary as JSON.")
def info(states: tuple[str, ...], as_json: bool) -> None:
    """Show the contents of the states of a run, and the numbers of ranks on which it can be resumed."""
    loaded = found_states(states)
    names, problem = [state.name for state in loaded], None
    try:
        runs = [(names, summary(whole_state(loaded), len(loaded)))]
    except StateError as error:
        problem = error
        runs = [([state.name], summary(state.state)) for state in loaded]
    if as_json:
        named = [{"files": files, **item} for files, item in runs]
        click.echo(json.dumps({"runs": named, "problem": problem and str(problem)}, indent=2))
    else:
        for files, item in runs:
            click.echo(listed(files, 1))
            for title, text in summary_lines(item):
                click.echo(f"  {title:<14}{text}")
    if problem is not None and len(loaded) > 1:
        raise problem


@command.command()
@STATES
@click.option("--output", "-o", required=True, type=click.Path(), help="The file to write.")
def merge(states: tuple[str, ...], output: str) -> None:
    """Merge the states of all ranks into one, which each rank of any suitable number can restore."""
    loaded = found_states(states)
    whole = whole_state(loaded)
    write_state_file(output, whole)
    click.echo(
        f"{output}: {counted(len(loaded), 'state')} at pass {whole['pass_number']}, micro-batch {whole['position']:,}"
    )


# -- steps ----------------------------------------------------------------------------------------------------------


def found_states(paths: tuple[str, ...]) -> list[FoundState]:
    """Read the states in files, and in checkpoint folders that a guest knows."""
    found: list[FoundState] = []
    for path in paths:
        readers = [target for marker, target in state_readers().items() if os.path.exists(os.path.join(path, marker))]
        states = find_states(load(readers[0])(path), path) if readers else read_state_files([path])
        if not states:
            raise StateError("there is no loader state in the checkpoint", where=path, fix="give another one")
        found += states
    return found


def whole_state(found: list[FoundState]) -> State:
    """Merge the states of all ranks."""
    return merged([part.state for part in found], [part.name for part in found])


def suffix_of(path: str) -> str:
    """Return the suffix of a state's file; ``.json`` if it has none of a state."""
    suffix = os.path.splitext(path.rstrip("/"))[1]
    return suffix if suffix in SUFFIXES else ".json"


# -- summary --------------------------------------------------------------------------------------------------------

#: Largest batch size that is listed.
_LARGEST = 1024


def summary(state: State, files: int = 1) -> dict[str, Any]:
    """Return the contents of a state, as plain data.

    Args:
        state: state of a rank, or of the whole run.
        files: number of ranks' states that it was merged from.

    Returns:
        ``world_sizes`` is None if the run can be resumed on any number of ranks; ``batch_sizes``, in endless planned
        runs, are the sizes up to 1,024 that the run can be resumed with, or None for any; ``samples_delivered`` is None
        if only the hooks know it; ``lanes_missing`` are those that other ranks' states have.

    Raises:
        StateError: its lanes are damaged.
    """
    kind = kind_of(state)
    identity = state["identity"]
    settings = identity["settings"]
    entries: dict[str, Any] = {
        "kind": kind,
        "states": files,
        **{name: state[name] for name in ("version", "order_version", "pass_number", "position", "loop_start")},
        "batches_delivered": state["position"],
        "samples_delivered": None,
        "world_sizes": None,
        **{name: identity.get(name) for name in ("leaves", "samples", "fingerprint")},
        "settings": settings,
    }
    rows = settings.get("batch_size") or 1
    place = state.get("place")
    if kind == "planned" and isinstance(place, (list, tuple)) and len(place) == 2:  # by tokens
        entries |= {"chunk": place[0], "batch": place[1]}
    elif kind == "planned" and settings.get("repeat") and isinstance(rows, int):
        entries["samples_delivered"] = samples = state["position"] * rows
        entries["batch_sizes"] = [size for size in range(1, _LARGEST + 1) if samples % size == 0] if samples else None
    if kind == "lanes":
        lanes, places = read_lanes(state)
        entries |= {
            "lanes": lanes,
            "lanes_missing": [lane for lane in range(lanes) if lane not in places],
            "world_sizes": worlds_for(lanes),
        }
    rebase = read_rebase(state)
    if rebase is not None:
        entries["rebase"] = {"position": rebase.position, "leaves_that_went_on": sum(map(bool, rebase.starts))}
    return entries


def summary_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a summary as lines of a title and a text."""
    lines = [
        ("state", f"{KINDS.get(found['kind'], found['kind'])} (format version {found['version']})"),
        ("states", f"{found['states']:,}"),
        ("place", f"pass {found['pass_number']}, micro-batch {found['position']:,} over all ranks"),
    ]
    if found["loop_start"]:
        lines.append(("loop began at", f"micro-batch {found['loop_start']:,}"))
    samples = found["samples_delivered"]
    delivered = counted(found["batches_delivered"], "micro-batch")
    lines.append(("delivered", delivered + (f", {counted(samples, 'sample')}" if samples is not None else "")))
    if "chunk" in found:
        lines.append(("plan", f"chunk {found['chunk']}, micro-batch {found['batch']} of it"))
    if "lanes" in found:
        missing = found["lanes_missing"]
        text = f"{found['lanes']:,}"
        if missing:
            text += f"; the states of other ranks have {len(missing)} of them: {shortened(missing)}"
        lines.append(("lanes", text))
    if "rebase" in found:
        rebase = found["rebase"]
        went_on = counted(rebase["leaves_that_went_on"], "data set")
        lines.append(("blend", f"changed at sample {rebase['position']:,}; {went_on} went on"))
    worlds = found["world_sizes"]
    lines.append(("world sizes", "any" if worlds is None else shortened(worlds)))
    if "batch_sizes" in found:
        sizes = found["batch_sizes"]
        lines.append(("batch sizes", "any" if sizes is None else shortened(sizes)))
    if None not in (found["leaves"], found["samples"]):
        lines.append(("data sets", f"{found['leaves']:,}, with {counted(found['samples'], 'sample')}"))
    lines.append(("fingerprint", str(found["fingerprint"])))
    titles = ["settings", *[""] * len(found["settings"])]
    for title, (name, value) in zip(titles, found["settings"].items(), strict=False):
        lines.append((title, f"{name}: {value}"))
    return lines
