"""Rebase of a run to a changed blend, or to another micro-batch size: leaves that stay continue where they were, new
ones start at zero."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from energon_lite.cli.checkpoint import STATES, dataset_of_state, dataset_options, found_states, suffix_of, whole_state
from energon_lite.errors import StateMismatchError, UsageError, counted
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.lane_cursor import LanePlace
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.loading.iterators.state import BATCH_SIZE, State
from energon_lite.loading.saved_states import merged, write_state_file
from energon_lite.order.orders import BlendOrder, EpochBlendOrder, Rebase

#: Prefixes of the names of settings that may change: those of the blend, and the costs used for balancing.
_MAY_CHANGE = ("blend", "weights ", "costs")


@dataclass(frozen=True)
class _MovedCursor:
    """A cursor that was advanced to a position at which another blend can begin.

    Args:
        cursor: cursor of the data set's kind.
        first: position of the next sample to be delivered.
        given_up: number of samples before ``first`` that were not delivered.
        up_to: ``given_up`` is an upper bound.
    """

    cursor: Any
    first: int
    given_up: int = 0
    up_to: bool = False


@dataclass(frozen=True)
class RebasedLeaf:
    """Result of a rebase for one leaf.

    Args:
        name: its path, in the new blend if it is there.
        change: ``"stays"``, ``"new"`` or ``"goes"``.
        shown: samples of its stream that were shown before; 0 for a new one.
        epochs: ``shown`` in epochs of the leaf.
        was: its path in the old blend, if that was another one.
    """

    name: str
    change: str
    shown: int
    epochs: float
    was: str | None = None


@dataclass(frozen=True)
class RebaseReport:
    """Result of a rebase.

    Args:
        position: micro-batches of the run so far, over all ranks.
        first: position, in samples, at which the new blend, or the first micro-batch of the new size, begins.
        given_up: samples before it that are skipped.
        up_to: ``given_up`` is an upper bound, because hooks decide the number.
        leaves: leaves of the new blend, then those that go.
        batch_size: samples in a micro-batch before and after, if that changes.
    """

    position: int
    first: int
    given_up: int
    up_to: bool
    leaves: tuple[RebasedLeaf, ...]
    batch_size: tuple[int | None, int | None] | None = None

    def __str__(self) -> str:
        what = "the new blend begins"
        if self.batch_size is not None:
            old, new = self.batch_size
            what = f"batch_size {old} becomes {new}"
        lines = [f"{what} at sample {self.first:,} of the run, after micro-batch {self.position:,}"]
        if self.given_up:
            most = "up to " if self.up_to else ""
            lines.append(f"passed over: {most}{counted(self.given_up, 'sample')} of what was begun")
        for leaf in self.leaves:
            at = f"{counted(leaf.shown, 'sample')} ({leaf.epochs:.4g} epochs) shown"
            was = f" (was {leaf.was})" if leaf.was else ""
            what = {"stays": f"goes on, {at}", "new": "new, starts at zero", "goes": f"goes, {at}"}[leaf.change]
            lines.append(f"  {leaf.name}{was}: {what}")
        return "\n".join(lines)


def rebase_state(
    state: State | Sequence[State | None], old: SavableDataset, new: SavableDataset, *, give_up: bool = False
) -> tuple[State, RebaseReport]:
    """Return the state with which a run continues under another blend, and a report.

    Each leaf that is in both blends continues in its own stream (its shuffled order, epoch by epoch): no sample of it
    is lost or comes twice. Leaves are identified by their data, so they may have moved. A leaf that is only in the new
    blend starts at zero, also if it was in the run at an earlier time. ``position`` continues, too.

    Micro-batches of a fixed size can be rebased anywhere. Batches that are planned by tokens, or are content-decided,
    use up a whole chunk, in their own order. For these, the new blend begins with the chunk after all begun chunks; the
    undelivered samples of begun chunks have to be given up.

    Args:
        state: state of the whole run, or the states of all ranks.
        old: data set with which it was saved, built the same way; on any rank.
        new: data set with which the run continues: the same arguments; another blend, batch size or costs.
        give_up: allow samples of begun chunks, or of a begun new micro-batch, to be skipped.

    Returns:
        The state, to be restored on all ranks by loaders of the new blend, and the result for each leaf.

    Raises:
        StateError, StateMismatchError: the state is damaged, or not of ``old``.
        UsageError: more than the blend is different; the run has passes that end; samples would be skipped.

    Example:
        >>> state, report = rebase_state(torch.load("loader.pt"), old_dataset, new_dataset)
        >>> print(report)
        >>> loader = get_savable_loader(new_dataset)
        >>> loader.restore_state_rank(state)
    """
    states = [state] if isinstance(state, dict) else [saved for saved in state if saved is not None]
    state = merged(states)
    _check_alike(old, new)
    before = old.at(state)
    order = _blend_of(before)
    sizes = _batch_sizes(old, new)
    moved = _resized(_next_boundary(before.resolved, state), before, new, give_up)
    if moved.given_up and not give_up:
        raise UsageError(
            f"the chunks of {counted(before.plan.chunk, 'sample')} that were begun have "
            f"{'up to ' if moved.up_to else ''}{counted(moved.given_up, 'sample')} that were not delivered yet; the "
            "new blend can begin behind them only",
            fix="allow these to be passed over (give_up=True, `--give-up`), or rebase a state that was saved at a "
            "chunk's end",
        )
    shown = order.counts_before(moved.first).tolist()
    starts, leaves = _carried(before, new, shown)
    same_blend = sizes is not None and _with_batch_size(old, sizes[1]) == new.identity.whole().fingerprint
    after = new.at(state) if same_blend else new.rebased(Rebase(moved.first, starts))
    report = RebaseReport(state["position"], moved.first, moved.given_up, moved.up_to, tuple(leaves), sizes)
    return after.state(moved.cursor), report


def _next_boundary(dataset: SavableDataset, state: State) -> _MovedCursor:
    """Return the first position from a state's on at which another blend can begin: after all begun chunks."""
    if isinstance(dataset, LaneDataset):
        return _next_boundary_of_lanes(dataset, state)
    assert isinstance(dataset, PlannedDataset)
    cursor = dataset.cursor(state)
    size = dataset.plan.chunk
    chunk, *inside = cursor.place
    if not any(inside):
        return _MovedCursor(cursor, chunk * size)
    behind = replace(cursor, place=(chunk + 1, 0))
    return _MovedCursor(behind, (chunk + 1) * size, dataset.plan.undelivered(cursor.pass_number, cursor.place))


def _next_boundary_of_lanes(dataset: LaneDataset, state: State) -> _MovedCursor:
    """Return that position with content-decided batches. Lanes that lag behind skip the chunks before it."""
    cursor = dataset.cursor(state, whole=True)
    size = dataset.plan.chunk
    begun = [
        at.chunk if any(at.place[2:]) or at.place.unit > 0 else at.chunk - cursor.lanes for at in cursor.at.values()
    ]
    first = max(0, max(begun) + 1)
    given_up = 0
    places = {}
    for lane, (chunk, place, tails, begins) in cursor.at.items():
        left = len(range(chunk, first, cursor.lanes))
        given_up += left * size - (place.unit if left or place.unit < 0 else 0)
        given_up += sum(size - tail.place.unit for tail in tails) - sum(begin.place.unit for begin in begins)
        places[lane] = LanePlace(chunk + left * cursor.lanes)
    return _MovedCursor(replace(cursor, at=places), first * size, given_up, up_to=True)


def _batch_sizes(old: SavableDataset, new: SavableDataset) -> tuple[int | None, int | None] | None:
    """Return the batch sizes before and after, if they differ and may do so; else None."""
    before, after = (dataset.identity.settings.get(BATCH_SIZE) for dataset in (old, new))
    fixed = isinstance(old, PlannedDataset) and old.plan.rows is not None
    return (before, after) if before != after and (fixed or None not in (before, after)) else None


def _with_batch_size(dataset: SavableDataset, size: int | None) -> str:
    """Return the fingerprint of a data set with another batch size."""
    identity = dataset.identity
    return replace(identity, settings={**identity.settings, BATCH_SIZE: size}).whole().fingerprint


def _resized(moved: _MovedCursor, old: SavableDataset, new: SavableDataset, give_up: bool) -> _MovedCursor:
    """Convert the beginning of the new run to micro-batches of its own size."""
    if not (isinstance(old, PlannedDataset) and isinstance(new, PlannedDataset)) or old.plan.rows is None:
        return moved
    cursor = new.resized(moved.cursor, old, give_up=give_up)
    first = cursor.position * new.plan.chunk
    return _MovedCursor(cursor, first, first - moved.first)


def _check_alike(old: SavableDataset, new: SavableDataset) -> None:
    """Refuse changes of anything but the blend, the batch size and the costs."""
    may_change = _MAY_CHANGE if _batch_sizes(old, new) is None else (*_MAY_CHANGE, BATCH_SIZE)
    settings = [
        {name: value for name, value in dataset.identity.settings.items() if not name.startswith(may_change)}
        for dataset in (old, new)
    ]
    differences = [
        f"{name}: {settings[0].get(name)!r} and {settings[1].get(name)!r}"
        for name in sorted({*settings[0], *settings[1]})
        if settings[0].get(name) != settings[1].get(name)
    ]
    if type(old) is not type(new):
        differences.append(f"kind of batches: {type(old).__name__} and {type(new).__name__}")
    if differences:
        raise UsageError(
            "a rebase changes the blend, the batch size or the costs, and nothing else; these differ: "
            f"{'; '.join(differences)}",
            fix="build both data sets with the same arguments",
        )
    if old.plan.order.bounds(0) is not None:
        raise UsageError(
            "only endless training streams can be rebased, and this one has passes that end",
            fix="let the pass end, and begin the next one with the new blend",
        )


def _carried(
    before: SavableDataset, new: SavableDataset, shown: Sequence[int]
) -> tuple[tuple[int, ...], list[RebasedLeaf]]:
    """Return the start of each new leaf's stream, and the result for all leaves."""
    old_orders, new_orders = (_blend_of(dataset).leaves.leaves for dataset in (before, new))
    old_names, new_names = ([leaf.name for leaf in dataset.identity.leaves] for dataset in (before, new))
    known = {order.key: number for number, order in enumerate(old_orders)}
    starts = []
    leaves = []
    for order, name in zip(new_orders, new_names, strict=True):
        number = known.pop(order.key, None)
        if number is None:
            starts.append(0)
            leaves.append(RebasedLeaf(name, "new", 0, 0.0))
            continue
        if order != old_orders[number]:
            raise StateMismatchError(
                f"shuffle_over_epochs of data set {name} was {old_orders[number].copies}, and is {order.copies} in the "
                "new blend: it would have another order, in which its place means nothing",
                fix="leave it as it was",
            )
        was = old_names[number]
        starts.append(shown[number])
        epochs = shown[number] / order.length
        leaves.append(RebasedLeaf(name, "stays", shown[number], epochs, None if was == name else was))
    leaves += [
        RebasedLeaf(old_names[number], "goes", shown[number], shown[number] / old_orders[number].length)
        for number in known.values()
    ]
    return tuple(starts), leaves


def _blend_of(dataset: SavableDataset) -> BlendOrder | EpochBlendOrder:
    order = dataset.plan.order
    assert isinstance(order, (BlendOrder, EpochBlendOrder))  # the orders of all endless data sets
    return order


# -- the command ----------------------------------------------------------------------------------------------------


@click.command(name="rebase", context_settings={"show_default": True})
@STATES
@click.option("--from", "old", required=True, metavar="PATH", help="The blend (or folder) it was saved with.")
@click.option("--to", "new", metavar="PATH", help="The blend (or folder) to resume with.  [default: that of --from]")
@click.option("--batch-size", type=click.IntRange(min=1), help="New number of samples in a micro-batch.")
@click.option(
    "--output", "-o", type=click.Path(), help="The file to write.  [default: STATE with .rebased in its name]"
)
@click.option("--give-up", is_flag=True, help="Allow the loss of samples of unfinished work.")
@dataset_options
def command(
    states: tuple[str, ...],
    old: str,
    new: str | None,
    batch_size: int | None,
    output: str | None,
    give_up: bool,
    **options: Any,
) -> None:
    """Continue a run with a changed blend or batch size. Data sets in both blends continue where they were, new ones
    start at zero.

    The other arguments of get_train_dataset are taken from the state.
    """
    output = output or os.path.splitext(states[0].rstrip("/"))[0] + ".rebased" + suffix_of(states[0])
    whole = whole_state(found_states(states))
    if new is None and batch_size is None:
        raise UsageError("neither --to nor --batch-size: nothing would change", fix="give one of them, or both")
    before = dataset_of_state(whole, old, **options)
    after = dataset_of_state(whole, new or old, batch_size, **options)
    try:
        state, report = rebase_state(whole, before, after, give_up=give_up)
    except StateMismatchError as error:
        if "another run" not in error.what:
            raise
        fix = "give the blend as it was when the state was saved, and the options that it was built with"
        raise StateMismatchError(error.what, where=f"--from {old}", fix=fix) from None
    write_state_file(output, state)
    click.echo(f"{output}: {report}")
