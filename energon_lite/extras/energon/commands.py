"""``energon-lite filter`` stores the samples of a data set that meet a condition, as a filter index;
``energon-lite checkpoint redist`` divides the state of a run among another number of ranks, as in Energon."""

from __future__ import annotations

import os
import re
from itertools import zip_longest
from typing import Any

import click

from energon_lite.cli.arguments import ExistingPath
from energon_lite.cli.checkpoint import found_states, suffix_of, whole_state
from energon_lite.errors import StateError, UsageError, counted
from energon_lite.loading.iterators.state import State
from energon_lite.loading.saved_states import SUFFIXES, read_state_files, redistributed, write_state_file


@click.command(name="filter", context_settings={"show_default": True})
@click.argument("path", type=ExistingPath())
@click.argument("name")
@click.argument("where")
@click.option("--force-overwrite", "overwrite", is_flag=True, help="Replace a filter index with this name.")
def command(path: str, name: str, where: str, overwrite: bool) -> None:
    """Store which samples of PATH, a prepared folder or a JSONL file, meet the condition WHERE, under a NAME.

    WHERE compares measured columns, such as "tokens <= 4096 and quality.score > 0.5". A metadataset may name the filter
    (filter: NAME), also for Megatron-Energon 8. In energon_lite it may have the condition itself instead, which follows
    changes of the columns; an index does not change.

    \b
    Example:
      energon-lite filter data/coco short "tokens <= 4096"
    """
    from energon_lite.extras.energon.sample_filters import SampleFilter, build_filter_index
    from energon_lite.storage.read.webdataset import WebdatasetSource

    condition = SampleFilter(where)
    if condition.index is not None:
        raise UsageError(f"{where!r} is not a condition", fix='compare columns: "tokens <= 4096"')
    source = WebdatasetSource.open(path)
    kept = condition.keep({column: source.column(column)[:] for column in condition.columns}).nonzero()[0]
    build_filter_index(path, name, kept, overwrite=overwrite)
    click.echo(f"{path}: filter {name!r} keeps {len(kept):,} of {counted(len(source), 'sample')}")


@click.command(name="redist", context_settings={"show_default": True})
@click.argument("states", nargs=-1, required=True, type=click.Path())
@click.option(
    "--ranks", "--new-world-size", "world", type=click.IntRange(min=1), help="Data-parallel ranks to resume on."
)
@click.option("--output", "-o", type=click.Path(), help="The folder to write.  [default: the last of STATES]")
@click.option("--suffix", type=click.Choice(SUFFIXES), help="Format of the files.  [default: that of the first STATE]")
def redist(states: tuple[str, ...], world: int | None, output: str | None, suffix: str | None) -> None:
    """Divide the state of a run among another number of ranks, with a file for each. Files of an earlier call for the
    same states are replaced.

    Usually this is not necessary: each rank of any suitable number can resume from the file of any rank, or from the
    file of `merge`. Files are named like STATES, if these have a number in their names, else loader_rankN.
    """
    if output is None:  # Energon's form: redist STATES... FOLDER
        *given, output = states
        states = tuple(given)
    existing = ExistingPath()
    states = tuple(existing.convert(state, None, click.get_current_context()) for state in states)
    if not states:
        raise UsageError("there are no states", fix="give files of states, and then the folder to be written")
    whole = whole_state(found_states(states))
    if world is None:
        click.echo(f"The state was saved on {counted(whole.get('world_size', len(states)), 'rank')}.")
        world = int(click.prompt("Data-parallel ranks to resume on", type=click.IntRange(min=1)))
    own = redistributed(whole, world)
    os.makedirs(output, exist_ok=True)
    suffix = suffix or suffix_of(states[0])
    names = _numbered_names(states, world, suffix)
    there = os.listdir(output)
    _check_replaceable(output, there, {*names, *_numbered_names(states, len(there), suffix)}, states, whole)
    for name, state in zip(names, own, strict=True):
        write_state_file(os.path.join(output, name), state)
    for name in set(there) - set(names):
        os.remove(os.path.join(output, name))
    click.echo(f"{output}: {counted(world, 'state')} at micro-batch {own[0]['position']:,}")


def _check_replaceable(folder: str, there: list[str], names: set[str], given: tuple[str, ...], whole: State) -> None:
    """Refuse a folder with other files than those that an earlier call made for the same states."""
    mine = [_moment(whole)]
    sources = (path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path)) for path in given)
    replaceable = not any(os.path.samefile(folder, source) for source in sources)
    for name in there:
        replaceable = replaceable and name in names
        try:
            states = read_state_files([os.path.join(folder, name)]) if replaceable else []
        except StateError:
            states = []
        if [_moment(other.state) for other in states] != mine:
            raise UsageError(
                f"the folder is not empty: {name} is not of an earlier redist of these states",
                where=folder,
                fix="give another folder, so that states of different runs are not mixed",
            )


def _moment(state: State) -> tuple[Any, ...]:
    """Identity of a state's run, and its position."""
    return state["identity"]["fingerprint"], state["pass_number"], state["position"]


def _numbered_names(states: tuple[str, ...], world: int, suffix: str) -> list[str]:
    """File names for ranks: the names of the states, with the rank in place of the number in which they differ."""
    parts = [re.split(r"(\d+)", os.path.splitext(os.path.basename(state.rstrip("/")))[0]) for state in states]
    places = [place for place, texts in enumerate(zip_longest(*parts)) if len(set(texts)) > 1]
    if len(places) != 1 or places[0] % 2 == 0:
        width = len(str(world - 1))
        return [f"loader_rank{rank:0{width}}{suffix}" for rank in range(world)]
    (place,), words = places, parts[0]
    width = min(len(name_parts[place]) for name_parts in parts)
    numbers = (f"{rank:0{width}}" for rank in range(world))
    return ["".join([*words[:place], number, *words[place + 1 :]]) + suffix for number in numbers]
