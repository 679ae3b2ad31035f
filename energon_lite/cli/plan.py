"""``energon-lite plan``: what strategies of batching make of the lengths of a data set, side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from energon_lite.batching.capacity import Ints
    from energon_lite.batching.micro_batches import MicroBatches

__all__ = ["command", "read_lengths"]

#: What is compared if nothing is asked for.
_DEFAULT = ("fixed", "capacity", "sorted_window", "best_fit", "bfd", "concat_split")
#: The balance is that of so many steps.
_STEPS = 300
_HEADER = (
    "strategy",
    "micro-batches",
    "steps",
    "fill",
    "padding eff.",
    "ICC",
    "step var.",
    "late",
    "tokens",
    "attention",
)


@click.command(name="plan", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path(path_type=str))
@click.option("--capacity", "-c", type=click.IntRange(min=1), required=True, help="Tokens (or cost) of a micro-batch.")
@click.option(
    "--strategy",
    "-s",
    "strategies",
    multiple=True,
    help="A strategy, with keys of its own after a colon: best_fit:open_bins=16,max_age=500. Several times: several "
    "are compared. Without it: fixed, capacity, sorted_window, best_fit, bfd and concat_split.",
)
@click.option(
    "--oversize",
    type=click.Choice(["error", "drop", "truncate", "split", "own_batch"]),
    default="error",
    show_default=True,
    help="What to do with samples that do not fit alone.",
)
@click.option("--ranks", type=click.IntRange(min=1), default=8, show_default=True, help="Data-parallel ranks.")
@click.option("--per-rank", type=click.IntRange(min=1), default=1, show_default=True, help="Micro-batches in a step.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the order and of the plans.")
@click.option("--in-order", is_flag=True, help="Take the samples as they are stored, instead of shuffling them first.")
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    default=1 << 17,
    show_default=True,
    help="Samples that are planned together.",
)
@click.option("--column", default="length", show_default=True, help="For data sets: the column of lengths.")
@click.option("--split-part", default="train", show_default=True, help="For data sets: the split.")
@click.option("--split-config", default="split.yaml", show_default=True, help="For data sets: the file of the splits.")
@click.option("--key-lengths", type=click.Path(path_type=str), help="Lengths of the key field (.npy or text).")
@click.option("--plot", type=click.Path(path_type=str, dir_okay=False), help="Write a picture: .png, .pdf or .svg.")
def command(path: str, capacity: int, strategies: tuple[str, ...], **options: Any) -> None:
    """Compare strategies of batching on the lengths in PATH.

    PATH is a .npy array of integers, a text file with one length a line, a prepared data set or a .jsonl file with a
    column of lengths (energon-lite measure), or a metadataset of such, each sample of which is taken once.

    \b
    fill          tokens, of what all micro-batches could hold
    padding eff.  tokens, of tokens and padding
    ICC           how alike lengths in a micro-batch are: 0 as by chance, 1 all the same
    step var.     variance of the steps' mean log length, over that of random steps
    late          most places that a sample comes after its own
    tokens        mean over largest of the ranks' tokens in a step (first 300 steps)
    attention     the same of attention cost, with steps evened out as micro_batches_per_step does it

    \b
    Example:
      energon-lite plan lengths.npy --capacity 12000
      energon-lite plan data/ -c 12000 -s best_fit -s sorted_window:batches=300 --plot plan.png
    """
    import numpy as np

    from energon_lite.order.hashing import hash_ints
    from energon_lite.order.permutation import permute_array

    lengths = read_lengths(path, options["column"], options["split_part"], options["split_config"])
    keys = None if options["key_lengths"] is None else _read_file(options["key_lengths"])
    if not len(lengths):
        raise _nothing(path)
    if not options["in_order"]:
        order = permute_array(np.arange(len(lengths)), len(lengths), hash_ints(options["seed"]))
        lengths, keys = lengths[order], None if keys is None else _as_many(keys, lengths)[order]
    click.echo(
        f"{path}: {len(lengths):,} samples, {int(lengths.sum()):,} tokens, mean {lengths.mean():,.1f}, "
        f"longest {int(lengths.max()):,}; {capacity / max(1e-9, float(lengths.mean())):.1f} samples fill the capacity"
    )
    documents = [_document(text, capacity, options["oversize"], lengths) for text in strategies or _DEFAULT]
    names = [*strategies] or [*_DEFAULT]
    plans = [_plan(document, lengths, keys, options) for document in documents]
    rows = [
        _cells(name, document, plan, capacity, options["ranks"], options["per_rank"])
        for name, document, plan in zip(names, documents, plans, strict=True)
    ]
    click.echo()
    for line in _table([_HEADER, *rows]):
        click.echo(line)
    for name, plan in zip(names, plans, strict=True):
        for line in _losses(name, plan):
            click.secho(line, fg="yellow", err=True)
    if options["plot"]:
        from energon_lite.cli.plan_picture import draw_plans

        draw_plans(options["plot"], lengths, dict(zip(names, plans, strict=True)), capacity, options["ranks"])
        click.echo(f"\nThe picture is in {options['plot']}.")


def read_lengths(path: str, column: str, split_part: str, split_config: str) -> Ints:
    """The lengths that a file has, or the samples of a data set or a blend, one leaf after the other.

    Raises:
        UsageError: not a list of lengths.
        DatasetError: not a prepared data set, or one without the column.
    """
    from energon_lite.documents.paths import local_path

    path = local_path(path)
    if os.path.isfile(path) and not path.endswith((".yaml", ".yml", ".jsonl")):
        return _read_file(path)
    import numpy as np

    from energon_lite.batching.capacity import checked_lengths
    from energon_lite.loading.leaves import find_leaves, open_source

    specs = find_leaves(path, split_part, "dataset.yaml", split_config, None)
    found = []
    for spec in specs:
        source = open_source(spec)
        values = source.column(column)
        found.append(checked_lengths(values[np.arange(len(source))], f"column {column!r} of {spec.path}"))
    return np.concatenate(found)


def _read_file(path: str) -> Ints:
    import numpy as np

    from energon_lite.batching.capacity import checked_lengths
    from energon_lite.errors import UsageError

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


def _nothing(path: str) -> Exception:
    from energon_lite.errors import EmptyDatasetError

    return EmptyDatasetError("there are no lengths", where=path)


def _as_many(keys: Ints, lengths: Ints) -> Ints:
    from energon_lite.errors import UsageError

    if len(keys) != len(lengths):
        raise UsageError(f"{len(keys)} key lengths for {len(lengths)} samples", fix="give one for each sample")
    return keys


def _document(text: str, capacity: int, oversize: str, lengths: Ints) -> dict[str, Any]:
    """``name:key=value,key=value`` as a document; the options of the command are added where the strategy has them."""
    import yaml

    from energon_lite.batching.strategy import STRATEGIES

    name, _, rest = text.partition(":")
    document: dict[str, Any] = {"strategy": name}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        document[key.strip()] = yaml.safe_load(value)
    fields = getattr(STRATEGIES.get(name), "__dataclass_fields__", {})
    given = {"capacity": capacity, "tokens": capacity, "oversize": oversize}
    if name == "fixed":
        # What fits in the worst case, as one who has no capacity would choose.
        given["batch_size"] = max(1, capacity // max(1, int(lengths.max())))
    return {key: value for key, value in given.items() if key in fields} | document


def _plan(document: dict[str, Any], lengths: Ints, keys: Ints | None, options: dict[str, Any]) -> MicroBatches:
    from energon_lite.batching.strategy import from_dict, plan_in_chunks

    return plan_in_chunks(
        from_dict(document, at="--strategy"), lengths, seed=options["seed"], key_lengths=keys, chunk=options["chunk"]
    )


def _cells(
    name: str, document: dict[str, Any], plan: MicroBatches, capacity: int, ranks: int, per_rank: int
) -> tuple[str, ...]:
    from energon_lite.batching.metrics import even_balance, measure_plan
    from energon_lite.batching.strategy import from_dict, packing_capacity

    if not len(plan):
        return (name, "0", "0", *["-"] * 7)
    found = measure_plan(plan, ranks=ranks, per_rank=per_rank)
    limit = packing_capacity(from_dict(document))
    tokens, attention = even_balance(plan, limit, ranks=ranks, per_rank=per_rank, steps=_STEPS)
    return (
        name,
        f"{found.micro_batches:,}",
        f"{found.steps:,}",
        f"{int(plan.tokens().sum()) / (len(plan) * capacity):.4f}",
        f"{found.padding_efficiency:.4f}",
        f"{found.length_correlation:.3f}",
        f"{found.step_variance_ratio:.2f}",
        f"{found.lateness:,}",
        f"{tokens:.3f}",
        f"{attention:.3f}",
    )


def _losses(name: str, plan: MicroBatches) -> Iterator[str]:
    """What planning did to samples that did not fit."""
    counts = plan.counts
    if counts.dropped_samples:
        yield f"{name}: {counts.dropped_samples:,} samples are dropped, with {counts.dropped_tokens:,} tokens"
    if counts.truncated_samples:
        yield f"{name}: {counts.truncated_samples:,} samples are truncated, by {counts.truncated_tokens:,} tokens"
    if counts.split_samples:
        yield f"{name}: {counts.split_samples:,} samples are split"
    if counts.own_batches:
        yield f"{name}: {counts.own_batches:,} samples have a batch of their own, above the capacity"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned lines: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()
