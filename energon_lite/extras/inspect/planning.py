"""``energon-lite plan``: compare strategies of batching on the lengths of a data set, by metrics of their plans: fill,
balance over ranks, and the effect on the statistics of training."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from energon_lite.batching.capacity import Capacity, Ints, checked_lengths
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.batching.steps import assign, even_step, rank_slot, whole_steps
from energon_lite.batching.strategy import CHUNK, STRATEGIES, packing_capacity, plan_in_chunks, strategy_from_dict
from energon_lite.cli import aligned
from energon_lite.cli.arguments import open_dataset, split_config_option, split_part_option, strategy_document
from energon_lite.documents.paths import is_data_path, local_path
from energon_lite.errors import EmptyDatasetError, UsageError, counted
from energon_lite.imports import optional_imports
from energon_lite.order.hashing import hash_ints
from energon_lite.order.permutation import permute_array

Floats = NDArray[np.float64]


#: Largest number of steps in the picture.
_SHOWN_STEPS = 200
#: Height of a plan's curve, as a share of its row.
_HEIGHT = 0.9


def draw_plans(
    path: str | os.PathLike[str], lengths: Ints, plans: Mapping[str, MicroBatches], capacity: int, ranks: int
) -> None:
    """Draw a histogram of the lengths, the fill of each plan's micro-batches, and the tokens of its ranks in each step.

    Args:
        path: the file; its ending determines the format.
        lengths: tokens of each sample.
        plans: the plans by their names in the picture.
        capacity: the unit of the fill, in tokens.
        ranks: data-parallel ranks, each with one micro-batch a step.

    Raises:
        UsageError: matplotlib is not installed, or cannot write this format.
    """
    with optional_imports("plot", "pictures need the package matplotlib"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    left.hist(lengths, bins=100, color="0.4")
    left.set(xlabel="tokens of a sample", ylabel="samples", title=f"{len(lengths):,} lengths")
    # One row for each plan, so that similar curves do not hide each other.
    edges = np.linspace(0, max(1.0, *(float(plan.tokens().max(initial=0)) / capacity for plan in plans.values())), 51)
    shares = [np.histogram(plan.tokens() / capacity, bins=edges)[0] / max(1, len(plan)) for plan in plans.values()]
    loads = [np.sort(rank_loads(plan, ranks=ranks)[0][:_SHOWN_STEPS], axis=1) for plan in plans.values()]
    highest = max(1e-9, *(float(share.max()) for share in shares))
    most = max(capacity, *(int(load.max(initial=0)) for load in loads))
    for number, (share, load) in enumerate(zip(shares, loads, strict=True)):
        row, color = len(plans) - 1 - number, f"C{number % 10}"
        middle.stairs(row + _HEIGHT * share / highest, edges, baseline=row, fill=True, color=color)
        least, mean, largest = (row + _HEIGHT * part / most for part in (load[:, 0], load.mean(axis=1), load[:, -1]))
        right.fill_between(np.arange(len(load)), least, largest, color=color, alpha=0.25, lw=0)
        right.plot(mean, lw=1, color=color)
        right.axhline(row + _HEIGHT * capacity / most, color="k", lw=0.8, ls=":")
    middle.set_yticks(np.arange(len(plans)), [*plans][::-1], va="bottom")
    right.set_yticks(np.arange(len(plans)), [""] * len(plans))
    for axes in (middle, right):
        axes.set_ylim(0, len(plans))
        axes.grid(axis="y", lw=0.5)
    middle.set(xlabel="tokens of a micro-batch / capacity", title=f"Fill (highest: {highest:.0%} of a plan)")
    right.set(xlabel="step", title=f"{counted(ranks, 'rank')}: least, mean, most tokens (dotted: {capacity:,})")
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UsageError(f"the picture cannot be written: {error}", where=path, fix="use .png, .pdf or .svg") from None


#: The strategies that are compared by default.
_DEFAULT = ("fixed", "capacity", "sorted_window", "best_fit", "bfd", "concat_split")
_POLICIES = click.Choice(["error", "drop", "truncate", "split", "own_batch"])
_COUNT = click.IntRange(min=1)
#: Most steps over which the balance is measured.
_STEPS = 300
#: The columns of the table, with the formats of their numbers.
_COLUMNS = {"micro-batches": ",", "steps": ",", "fill": ".4f", "padding eff.": ".4f", "ICC": ".3f", "step var.": ".2f"}
_COLUMNS |= {"late": ",", "tokens": ".3f", "attention": ".3f"}


@click.command(name="plan", context_settings={"show_default": True})
@click.argument("path", type=click.Path())
@click.option("--capacity", "-c", type=_COUNT, required=True, help="Tokens (or cost) of a micro-batch.")
@click.option(
    "--strategy",
    "-s",
    "strategies",
    multiple=True,
    help="A strategy, with its keys after a colon: best_fit:open_bins=16,max_age=500. Repeatable. "
    "[default: fixed, capacity, sorted_window, best_fit, bfd, concat_split]",
)
@click.option("--oversize", type=_POLICIES, default="error", help="Treatment of samples that do not fit alone.")
@click.option("--ranks", type=_COUNT, default=8, help="Data-parallel ranks.")
@click.option("--micro-batches-per-step", "per_rank", type=_COUNT, default=1, help="Micro-batches of a rank in a step.")
@click.option("--seed", type=int, default=0, help="Seed of the order and of the plans.")
@click.option("--in-order", is_flag=True, help="Use the samples in stored order, without shuffling.")
@click.option("--chunk-size", "chunk", type=_COUNT, default=CHUNK, help="Samples that are planned together.")
@click.option("--length-column", "column", default="length", help="For data sets: the column of lengths.")
@split_part_option
@split_config_option
@click.option("--key-lengths", type=click.Path(), help="Lengths of the key field (.npy or text).")
@click.option("--plot", type=click.Path(dir_okay=False), help="Write a picture: .png, .pdf or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Write the table as JSON.")
def command(path: str, capacity: int, strategies: tuple[str, ...], **options: Any) -> None:
    """Compare strategies of batching on the lengths in PATH.

    PATH is a .npy array of integers, a text file with one length a line, a prepared data set or a .jsonl file with a
    column of lengths (energon-lite measure), or a metadataset of such data sets, whose samples are used once each.

    \b
    fill          tokens, relative to the capacity of all micro-batches
    padding eff.  tokens, relative to tokens and padding
    ICC           likeness of lengths in a micro-batch: 0 by chance, 1 all equal
    step var.     variance of the steps' mean log length, relative to random steps
    late          largest number of places that a sample is delayed
    tokens        mean over maximum of the ranks' tokens in a step (first 300)
    attention     the same for attention, balanced as by micro_batches_per_step

    \b
    Example:
      energon-lite plan lengths.npy --capacity 12000
      energon-lite plan data/ -c 12000 -s best_fit -s sorted_window:batches=9
    """
    lengths = read_lengths(path, options["column"], options["split_part"], options["split_config"])
    keys = None if options["key_lengths"] is None else _read_file(options["key_lengths"])
    if not len(lengths):
        raise EmptyDatasetError("there are no lengths", where=path)
    if keys is not None and len(keys) != len(lengths):
        raise UsageError(
            f"{len(keys)} key lengths for {counted(len(lengths), 'sample')}", fix="give a key length for each sample"
        )
    if not options["in_order"]:
        order = permute_array(np.arange(len(lengths)), len(lengths), hash_ints(options["seed"]))
        lengths, keys = lengths[order], None if keys is None else keys[order]
    click.echo(
        f"{path}: {counted(len(lengths), 'sample')}, {counted(int(lengths.sum()), 'token')}, "
        f"mean {lengths.mean():,.1f}, longest {int(lengths.max()):,}; "
        f"{capacity / max(1e-9, float(lengths.mean())):.1f} samples fill the capacity\n",
        err=options["as_json"],
    )
    plans: dict[str, MicroBatches] = {}
    titles, rows = ["strategy", *_COLUMNS], []
    for name in strategies or _DEFAULT:
        strategy = strategy_from_dict(_document(name, capacity, options["oversize"], lengths), at="--strategy")
        plan = plan_in_chunks(strategy, lengths, seed=options["seed"], key_lengths=keys, chunk=options["chunk"])
        plans[name] = plan
        rows.append([name, *_values(plan, strategy, capacity, options["ranks"], options["per_rank"])])
    if options["as_json"]:
        table = [dict(zip(titles, row, strict=True)) for row in rows]
        click.echo(json.dumps({"samples": len(lengths), "tokens": int(lengths.sum()), "plans": table}, indent=2))
    else:
        forms = ("", *_COLUMNS.values())
        cells = [["-" if v is None else f"{v:{form}}" for v, form in zip(row, forms, strict=True)] for row in rows]
        click.echo("\n".join(aligned([titles, *cells])))
    for name, plan in plans.items():
        for words in plan.counts.words():  # about samples that did not fit
            click.secho(f"{name}: {words}", fg="yellow", err=True)
    if options["plot"]:
        draw_plans(options["plot"], lengths, plans, capacity, options["ranks"])
        click.echo(f"\nThe picture is in {options['plot']}.", err=options["as_json"])


def read_lengths(path: str, column: str, split_part: str, split_config: str) -> Ints:
    """Read lengths from a file, or the column of a data set or a blend, one leaf after the other.

    Raises:
        UsageError: the file is no list of lengths.
        DatasetError: the folder is not a prepared data set, or lacks the column.
    """
    path = local_path(path)
    if os.path.isfile(path) and not path.endswith((".yaml", ".yml")) and not is_data_path(path):
        return _read_file(path)
    lengths = [
        checked_lengths(source.column(column)[np.arange(len(source))], f"column {column!r} of {spec.path}")
        for spec, source in open_dataset(path, split_part, split_config)
    ]
    return np.concatenate(lengths)


def _read_file(path: str) -> Ints:
    try:
        if path.endswith(".npy"):
            values = np.load(path, allow_pickle=False)
        else:
            with open(path, encoding="utf-8") as file:
                values = np.array([int(word) for word in file.read().split()], dtype=np.int64)
    except ValueError as error:
        raise UsageError(
            f"this is not a list of lengths: {error}", where=path, fix="give a .npy of integers, or one number a line"
        ) from None
    return checked_lengths(values, "the lengths in the file")


def _document(text: str, capacity: int, oversize: str, lengths: Ints) -> dict[str, Any]:
    """Convert ``name:key=value,key=value`` to a document, with the command's options that the strategy has."""
    written = strategy_document(text, "--strategy")
    name = written["strategy"]
    fields = getattr(STRATEGIES.get(name), "__dataclass_fields__", {})
    given: dict[str, Any] = {"capacity": capacity, "tokens": capacity, "oversize": oversize}
    if name == "fixed":
        # The number that fits in the worst case, as for a user without a capacity.
        given["batch_size"] = max(1, capacity // max(1, int(lengths.max())))
    return {key: value for key, value in given.items() if key in fields} | written


def _values(plan: MicroBatches, strategy: Any, capacity: int, ranks: int, per_rank: int) -> list[float | None]:
    if not len(plan):
        return [0, 0, *[None] * 7]
    metrics = measure_plan(plan, ranks=ranks, per_rank=per_rank)
    fill = int(plan.tokens().sum()) / (len(plan) * capacity)
    balance = even_balance(plan, packing_capacity(strategy), ranks=ranks, per_rank=per_rank, steps=_STEPS)
    values = [metrics.micro_batches, metrics.steps, fill, metrics.padding_efficiency, metrics.length_correlation]
    return [*values, metrics.step_variance_ratio, metrics.lateness, *balance]


# -- metrics --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanMetrics:
    """Metrics of a plan.

    Args:
        micro_batches: number of micro-batches.
        steps: optimizer steps of an epoch, including a last partial one.
        fill: tokens, of the tokens that all micro-batches could hold; None without a capacity.
        padding_efficiency: tokens, as a share of tokens and padding.
        over: share of the micro-batches above the capacity.
        length_correlation: intraclass correlation of log lengths in micro-batches. 0: lengths are combined at random;
            1: all lengths of a micro-batch are equal.
        step_variance_ratio: variance of a step's mean log length, relative to that of steps of random samples.
        effective_samples: share of the samples that count if each micro-batch's mean loss has the same weight
            (Kish's effective sample size); 1 if all samples weigh the same.
        lateness: largest number of places by which a sample comes after its place in the stream.
    """

    micro_batches: int
    steps: int
    fill: float | None
    padding_efficiency: float
    over: float
    length_correlation: float
    step_variance_ratio: float
    effective_samples: float
    lateness: int


def measure_plan(batches: MicroBatches, *, ranks: int = 8, per_rank: int = 1) -> PlanMetrics:
    """Measure a plan with steps of ``ranks * per_rank`` consecutive micro-batches.

    Args:
        batches: the plan of an epoch, at least one micro-batch.
        ranks: data-parallel ranks.
        per_rank: micro-batches of a rank in a step.
    """
    step = ranks * per_rank
    tokens = batches.tokens()
    space = batches.space()
    rows = batches.rows()
    weights = np.repeat(1.0 / np.maximum(rows, 1), rows)
    limit = batches.limit
    return PlanMetrics(
        micro_batches=len(batches),
        steps=-(-len(batches) // step),
        fill=None if limit is None else float(tokens.sum() / (len(batches) * limit)),
        padding_efficiency=float(tokens.sum() / max(1, int(space.sum()))),
        over=0.0 if limit is None else float((space > limit).mean()),
        length_correlation=length_correlation(batches),
        step_variance_ratio=_step_variance_ratio(batches, step),
        effective_samples=float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
        lateness=int(lateness(batches).max(initial=0)),
    )


def even_balance(
    batches: MicroBatches, capacity: Capacity | None, *, ranks: int = 8, per_rank: int = 1, steps: int | None = None
) -> tuple[float, float]:
    """Balance of tokens and of attention, as achieved by the loader's steps of ``ranks * per_rank`` micro-batches.

    Args:
        batches: the plan.
        capacity: capacity of packed micro-batches; None: no samples are swapped.
        ranks, per_rank: see :func:`measure_plan`.
        steps: measure only this number of steps, from the first; None: all.
    """
    step = ranks * per_rank
    whole = whole_steps(batches, step, capacity)
    count = len(whole) // step if steps is None else min(steps, len(whole) // step)
    slots = np.array(
        [[rank_slot(rank, ranks, turn) + turn * ranks for rank in range(ranks)] for turn in range(per_rank)]
    )
    loads = np.zeros((2, count, ranks), dtype=np.int64)
    for number in range(count):
        even = even_step(whole.select(np.arange(number * step, (number + 1) * step)), capacity)
        loads[0, number] = even.space()[slots].sum(axis=0)
        loads[1, number] = even.attention()[slots].sum(axis=0)
    return mean_balance(loads[0]), mean_balance(loads[1])


def rank_loads(batches: MicroBatches, *, ranks: int, per_rank: int = 1) -> tuple[Ints, Ints]:
    """Tokens (padding included) and squared lengths of each rank in each full step, ``[steps, ranks]`` both."""
    step = ranks * per_rank
    shape = (len(batches) // step, step)
    tokens, squares = (values[: shape[0] * step].reshape(shape) for values in (batches.space(), batches.attention()))
    if per_rank == 1:
        return tokens, squares
    assignments = [assign(np.stack([mine, costs]), ranks) for mine, costs in zip(tokens, squares, strict=True)]
    assigned = np.array(assignments, dtype=np.int64).reshape(shape[0], step)
    rows = np.arange(shape[0])[:, None]
    loads = (values[rows, assigned].reshape(shape[0], per_rank, ranks).sum(axis=1) for values in (tokens, squares))
    return next(loads), next(loads)


def lateness(batches: MicroBatches) -> Ints:
    """Number of places by which each entry comes after its place in the stream, ``[entries]``; negative if before."""
    rank = np.empty(len(batches.sample), dtype=np.int64)
    rank[np.lexsort((batches.start, batches.sample))] = np.arange(len(rank))
    return np.arange(len(rank)) - rank


def length_correlation(batches: MicroBatches) -> float:
    """Intraclass correlation of log lengths, with micro-batches as classes.

    It is a one-way analysis of variance with classes of unequal size (Donner 1986). Slightly negative values are noise,
    or the effect of combining long samples with short ones.
    """
    rows, group, values = _log_lengths(batches)
    count, total = int((rows > 0).sum()), len(values)
    if count < 2 or total <= count:
        return 0.0
    means = np.bincount(group, weights=values, minlength=len(rows)) / np.maximum(rows, 1)
    between = float((rows * (means - values.mean()) ** 2).sum()) / (count - 1)
    within = float(((values - means[group]) ** 2).sum()) / (total - count)
    size = float(total - (rows**2).sum() / total) / (count - 1)
    spread = between + (size - 1) * within
    return (between - within) / spread if spread > 0 else 0.0


def _step_variance_ratio(batches: MicroBatches, step: int) -> float:
    """Variance of the steps' mean log lengths, each relative to that of a mean of equally many random samples."""
    rows, group, values = _log_lengths(batches)
    steps = len(rows) // step
    variance = float(values.var()) if len(values) else 0.0
    if steps < 2 or variance == 0.0:
        return 1.0
    of_step = group // step
    kept = of_step < steps
    counts = np.bincount(of_step[kept])
    means = np.bincount(of_step[kept], weights=values[kept]) / counts
    return float((counts * (means - values.mean()) ** 2).mean()) / variance


def _log_lengths(batches: MicroBatches) -> tuple[Ints, Ints, Floats]:
    """Samples of each micro-batch, the micro-batch of each sample, and its log length, relative to the first one's:
    equal lengths are zeros, which differ by no rounding."""
    rows = batches.rows()
    values = np.log(np.maximum(batches.length, 1).astype(np.float64))
    return rows, np.repeat(np.arange(len(rows)), rows), values - values[:1]


def mean_balance(loads: Ints) -> float:
    """Mean over steps of mean / max over ranks, of loads ``[steps, ranks]``; see :func:`rank_loads`."""
    if not len(loads):
        return 1.0
    return float((loads.mean(axis=1) / np.maximum(loads.max(axis=1), 1)).mean())
