"""``energon-lite info``: what a data set or a blend is made of, as a tree, and which data sets come too often."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import click

from energon_lite.config.metadataset import LeafSpec
from energon_lite.documents.paths import local_path
from energon_lite.loading.leaves import find_leaves, open_source
from energon_lite.loading.stages import find_stages
from energon_lite.order.stages import Stage, StagedBlend

__all__ = ["LeafFacts", "command", "leaf_facts"]

#: The splits that validation reads.
_READ_ONCE = ("val", "test")
#: More warnings, and more stages, than this are only counted.
_SHOWN_WARNINGS, _SHOWN_STAGES = 10, 8


@dataclass(frozen=True)
class LeafFacts:
    """One data set of a blend, in numbers.

    Args:
        spec: what the documents say.
        samples: how many it has.
        share: of the blend, 0 to 1; if it changes, the mean over the run.
        epochs: how often the run shows each of its samples; 0 if its length is not known.
        stages: its share at both ends of each stage, if shares change.
    """

    spec: LeafSpec
    samples: int
    share: float
    epochs: float
    stages: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Columns:
    """Which columns the table has, beside names and samples: weights or repetitions, and epochs."""

    shares: bool
    epochs: bool


def leaf_facts(specs: Sequence[LeafSpec], samples: Sequence[int], blend_samples: int = 0) -> list[LeafFacts]:
    """The numbers of a blend.

    Args:
        specs: its leaves.
        samples: how many samples each of them has.
        blend_samples: over so many samples of the blend, the run, epochs are counted; 0: its length is not known.
    """
    stages = find_stages(specs)
    if len(stages) > 1:
        return _staged_facts(specs, samples, blend_samples, stages)
    shown = [
        spec.weight if spec.repetitions is None else spec.repetitions * count
        for spec, count in zip(specs, samples, strict=True)
    ]
    total = sum(shown)
    return [
        LeafFacts(spec, count, part / total, blend_samples * part / total / count)
        for spec, count, part in zip(specs, samples, shown, strict=True)
    ]


def _staged_facts(
    specs: Sequence[LeafSpec], samples: Sequence[int], blend_samples: int, stages: Sequence[Stage]
) -> list[LeafFacts]:
    ideal = StagedBlend(stages, key=0).ideal_before(blend_samples)
    shown = (ideal.whole + ideal.fraction * 2.0**-62).tolist()
    ends = [zip(stage.weights, stage.last or stage.weights, strict=True) for stage in stages]
    return [
        LeafFacts(spec, count, part / max(blend_samples, 1), part / count, shares)
        for spec, count, part, shares in zip(specs, samples, shown, zip(*ends, strict=True), strict=True)
    ]


@click.command(name="info", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path(path_type=str))
@click.option("--split-part", default="train", show_default=True, help="The split to look at.")
@click.option(
    "--samples", type=click.IntRange(min=1), help="Length of the run, in samples: count epochs, and warn of too many."
)
@click.option(
    "--max-epochs",
    type=click.FloatRange(min=0, min_open=True),
    default=4.0,
    show_default=True,
    help="Warn of data sets that such a run shows more often than this.",
)
@click.option("--split-config", default="split.yaml", show_default=True, help="For a folder: the file of its splits.")
def command(path: str, split_part: str, samples: int | None, max_epochs: float, split_config: str) -> None:
    """Show what PATH, a prepared folder or a metadataset .yaml, is made of.

    A line for each data set: its samples, and in a blend its effective weight (the weights along the path, multiplied)
    or its repetitions. With --samples also its epochs: how often a run of so many samples shows each sample of the data
    set. Where weights change along the run, a second table has them for each stage. The splits val and test are shown
    as validation reads them, once and without weights, unless there is --samples.

    \b
    Example:
      energon-lite info blend.yaml --samples 20000000
    """
    specs = find_leaves(path, split_part, "dataset.yaml", split_config, None)
    facts = leaf_facts(specs, [len(open_source(spec)) for spec in specs], samples or 0)
    base = os.path.abspath(local_path(path))
    folder, blended = os.path.dirname(base), len(facts) > 1 or specs[0].repetitions is not None
    once = samples is None and split_part in _READ_ONCE
    click.echo(_title(base, split_part, facts, once))
    click.echo()
    # Each column is shown only if it says anything.
    columns = Columns(
        shares=blended and not once and (samples is not None or not facts[0].stages), epochs=samples is not None
    )
    rows = [_header(facts, columns), *_rows(facts, folder, 0, partial(_cells, columns=columns))]
    for line in _aligned([*rows, *([_cells("total", facts, columns=columns)] if blended else [])]):
        click.echo(line)
    if once:
        if blended:
            click.echo(
                "\nValidation shows each sample once; weights do not count. For a training run on this split, give "
                "--samples."
            )
        return
    if blended or samples is not None:
        click.echo()
    if facts[0].stages:
        _show_stages(facts, folder, samples, find_stages(specs))
    if specs[0].repetitions is not None:
        epoch = sum(one.samples * (one.spec.repetitions or 0.0) for one in facts)
        click.echo(f"An epoch of the blend has {epoch:,.10g} samples.")
    if samples is not None:
        run = _run(facts, samples)
        click.echo(f"Epochs: how often {run} show each sample of the data set.")
        _warn(facts, folder, run, max_epochs)
    elif blended:
        click.echo("With --samples, the length of the run: how often it shows each sample of a data set.")


def _title(path: str, split_part: str, facts: Sequence[LeafFacts], once: bool) -> str:
    kind = "1 data set"
    if len(facts) > 1:
        how = f"blended by {'weight' if facts[0].spec.repetitions is None else 'repetitions'}"
        kind = f"{len(facts)} data sets, {'one after the other' if once else how}"
    return f"{path} [{split_part}]: {kind}"


def _run(facts: Sequence[LeafFacts], samples: int) -> str:
    """The run, in words."""
    return f"{samples:,} samples of the {'blend' if len(facts) > 1 else 'run'}"


def _show_stages(facts: Sequence[LeafFacts], folder: str, samples: int | None, stages: Sequence[Stage]) -> None:
    """The second table: a column, or a pair of them, for each stage."""
    shown = min(len(stages), _SHOWN_STAGES)
    header = ["from position"]
    for stage in stages[:shown]:
        header += [f"{stage.start:,}", *(["epochs"] if samples else [])]

    def cells(name: str, facts: Sequence[LeafFacts], *, leaf: bool = False) -> list[str]:
        row = [name]
        for number in range(shown):
            first, last = (sum(one.stages[number][side] for one in facts) for side in (0, 1))
            sloping = any(one.stages[number][0] != one.stages[number][1] for one in facts)
            share = f"{100 * first:.4g}% to {100 * last:.4g}%" if sloping else f"{100 * first:.4g}%"
            row.append(share)
            if samples:
                row.append(_number((first + last) / 2 * samples / facts[0].samples) if leaf else "")
        return row

    epochs = f", and the epochs of {samples:,} samples with these weights" if samples else ""
    click.echo(f"Weights in each stage{epochs}:")
    click.echo()
    for line in _aligned([header, *_rows(facts, folder, 0, cells)]):
        click.echo(line)
    if len(stages) > shown:
        click.echo(f"... and {len(stages) - shown} more stages, up to position {stages[-1].start:,}")
    click.echo()
    if samples and stages[-1].start >= samples:
        click.echo(f"Weights change up to position {stages[-1].start:,}: give --samples for a longer run.")


def _aligned(rows: Sequence[list[str]]) -> Iterator[str]:
    """Lines: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def _header(facts: Sequence[LeafFacts], columns: Columns) -> list[str]:
    header = ["data set", "samples"]
    if columns.shares:
        weight = "mean weight" if facts[0].stages else "weight"
        header += [weight] if facts[0].spec.repetitions is None else ["repetitions", "share"]
    return header + (["epochs"] if columns.epochs else [])


def _rows(facts: Sequence[LeafFacts], folder: str, depth: int, cells: Callable[..., list[str]]) -> Iterator[list[str]]:
    """The lines for leaves whose trails agree in the first ``depth`` steps."""
    place = 0
    while place < len(facts):
        trail = facts[place].spec.trail
        if len(trail) == depth:
            yield cells("  " * depth + _leaf_name(facts[place].spec, folder), facts[place : place + 1], leaf=True)
            place += 1
            continue
        stop = place
        while stop < len(facts) and facts[stop].spec.trail[: depth + 1] == trail[: depth + 1]:
            stop += 1
        step = trail[depth]
        yield cells(f"{'  ' * depth}{_short(step.path, folder)} [{step.split_part}]", facts[place:stop])
        yield from _rows(facts[place:stop], folder, depth + 1, cells)
        place = stop


def _cells(name: str, facts: Sequence[LeafFacts], *, columns: Columns, leaf: bool = False) -> list[str]:
    cells = [name, f"{sum(one.samples for one in facts):,}"]
    if columns.shares:
        if facts[0].spec.repetitions is not None:
            cells.append(f"{facts[0].spec.repetitions:g}" if leaf else "")
        cells.append(f"{100 * sum(one.share for one in facts):.4g}%")
    if columns.epochs:
        cells.append(_number(facts[0].epochs) if leaf else "")
    return cells


def _number(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.01 else f"{value:.2g}"


def _leaf_name(spec: LeafSpec, folder: str) -> str:
    part = "" if spec.subset is None else f", {spec.subset}"
    return f"{_short(spec.path, folder)} [{spec.split_part}{part}]"


def _short(path: str, folder: str) -> str:
    """A path relative to the top document, if it is below it."""
    return path[len(folder) + 1 :] if path.startswith(folder.rstrip("/") + "/") else path


def _warn(facts: Sequence[LeafFacts], folder: str, run: str, max_epochs: float) -> None:
    often = sorted((one for one in facts if one.epochs > max_epochs), key=lambda one: -one.epochs)
    word = "weight" if facts[0].spec.repetitions is None else "repetitions"
    for one in often[:_SHOWN_WARNINGS]:
        place = f" ({one.spec.origin})" if one.spec.origin else ""
        click.secho(
            f"Warning: {_leaf_name(one.spec, folder)}{place}: {run} show it "
            f"{_number(one.epochs)} times, more than {max_epochs:g}; "
            + (f"lower its {word}, or give it more data" if len(facts) > 1 else "give it more data, or train for less"),
            fg="yellow",
            err=True,
        )
    if len(often) > _SHOWN_WARNINGS:
        click.secho(f"Warning: ... and {len(often) - _SHOWN_WARNINGS} more data sets", fg="yellow", err=True)
