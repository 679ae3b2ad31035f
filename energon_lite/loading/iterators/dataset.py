"""Base class of the data sets: leaves, their order, the plan of batches and the hooks; everything but the position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import GenericAlias
from typing import Any, ClassVar, Literal

from typing_extensions import Self

from energon_lite.errors import UsageError, counted
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.iterators.identity import Identity
from energon_lite.loading.iterators.state import CursorFields, State, damaged, make_state, read_rebase
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.order.orders import Rebase
from energon_lite.worker_config import WorkerConfig

__all__ = ["Loop", "MovedCursor", "SavableDataset"]


@dataclass(frozen=True)
class Loop:
    """A loop around the loops inside it.

    Args:
        kind: ``limit``: the first steps of the first loop, always the same ones; ``repeat``: several loops, one after
            the other; ``epoch``: a number of steps that continue after those of the loop before.
        count: steps of each rank, or repetitions; 0: endless.
    """

    kind: Literal["limit", "repeat", "epoch"]
    count: int

    @property
    def by_steps(self) -> bool:
        """True if the loop counts steps, and not repetitions."""
        return self.kind != "repeat"


@dataclass(frozen=True)
class MovedCursor:
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


@dataclass(frozen=True, eq=False, kw_only=True)
class SavableDataset:
    """Data set returned by ``get_train_dataset`` and ``get_val_dataset``. Immutable; its loaders share nothing.

    Args:
        plan: assignment of samples to batches or chunks; each kind of data set has its own plan.
        leaves: the leaves of the blend.
        weights: shares of the leaves; None: the leaves come one after the other, or by repetitions.
        task_encoder: the hooks.
        worker_config: rank and world size of this process.
        identity: identity that is compared with the states of its loaders.
        seed: 64-bit seed of the hooks' random numbers.
        loop_length: micro-batches per rank in one ``for`` loop over an endless stream; 0: the loop never ends.
        repetitions: repetitions of each leaf in an epoch, or None.
        stages: number of stages of the run with their own weights; ``weights`` are those at the start.
        rebase: the blend begins in the middle of a run that had another blend before.
        limit: largest number of steps in a pass, with the world size at its beginning; None: no limit.
        drop_last: a pass ends with the last step in which every rank has a micro-batch.
        loops: wrappers around ``for`` loops, from the inside out; empty: a loop is a pass, or ``loop_length`` steps.
        once: there is a single pass, and ranks do not wait for each other: a rank gets no batches without samples,
            and ends when it has no samples left.
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations may name the type of its batches

    plan: Any
    leaves: Sequence[Leaf]
    weights: tuple[float, ...] | None
    task_encoder: TaskEncoder
    worker_config: WorkerConfig
    identity: Identity
    seed: int
    loop_length: int = 0
    repetitions: tuple[float, ...] | None = None
    stages: int = 1
    rebase: Rebase | None = None
    limit: int | None = None
    drop_last: bool = False
    loops: tuple[Loop, ...] = ()
    once: bool = False

    @property
    def resolved(self) -> SavableDataset:
        """The data set that a loader runs: this one, or the one that a wrapper is resolved to."""
        return self

    @cached_property
    def is_endless(self) -> bool:
        """True if there is only one pass, which does not end."""
        return self.plan.order.bounds(0) is None

    def runner(self) -> JobRunner:
        """Return the runner that runs this data set's jobs."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of micro-batches per rank in one ``for`` loop.

        Raises:
            UnknownLengthError: the number is not known before the loop.
        """
        raise NotImplementedError

    def len_rank(self) -> int:
        """Return the length; Energon's name for ``len()``."""
        return len(self)

    def config(self) -> dict[str, Any]:
        """Return the settings and the data that decide the order, as plain data."""
        return self.identity.to_plain()

    def can_restore_sample(self) -> bool:
        """Return whether any batch can be made again from its key; always True."""
        return True

    def state(self, cursor: Any) -> State:
        """Return the state of a cursor, as plain data."""
        raise NotImplementedError

    def state_at(self, position: int) -> State:
        """Return the state after ``position`` micro-batches, counted over all ranks and all passes.

        Raises:
            UsageError: the number is negative; or batches are content-decided, so that they have no numbers.
        """
        raise UsageError(
            f"where micro-batch {position} begins is unknown until those before it are made: hooks decide",
            fix="restore a state that was saved there",
        )

    def _make_state(self, kind: str, cursor: CursorFields, place: Mapping[str, Any], identity: Identity) -> State:
        ranks = None if self.limit is None else cursor.ranks or self.worker_config.world_size
        return make_state(kind, cursor, place, identity, self.rebase, ranks)

    def next_chunk_boundary(self, state: State) -> MovedCursor:
        """Return the first position from a state's on at which another blend can begin: after all begun chunks."""
        raise NotImplementedError

    def restore_sample(self, key: Any, runner: Any) -> Any:
        """Make the batch or sample of a restore key in this process.

        Keys are ``("batch", pass, *place)``, ``("chunk", pass, number, *place)``, ``("sample", leaf, index, epoch,
        attempt)``, followed by the number of the result if the hooks yield several, and ``("empty",)``.

        Raises:
            UsageError: not a key of such a data set.
            SampleError: the sample (or the batch) cannot be made.
        """
        parts = tuple(key) if isinstance(key, (tuple, list)) else ()
        signed = 3 if parts[:1] == ("chunk",) else 0  # the place in a chunk may begin before its first position: < 0
        if all(
            isinstance(part, int) and not isinstance(part, bool) and (part >= 0 or place == signed)
            for place, part in enumerate(parts[1:], 1)
        ):
            for batch in self._restored(parts, runner):
                return batch
        raise UsageError(
            f"{key!r} is not a restore key of this loader",
            fix="give the __restore_key__ of a batch or of a sample as it was delivered",
        )

    def _restored(self, key: tuple[Any, ...], runner: Any) -> Sequence[Any]:
        """Return the batch or sample of a key, as a sequence of length 1; empty if the key is not of this data set."""
        raise NotImplementedError

    def stop(self, ranks: int | None) -> int | None:
        """Return the position at which the limit ends a pass that began on ``ranks`` ranks; None: there is no limit."""
        return None if self.limit is None else self.limit * (ranks or self.worker_config.world_size)

    def rebased(self, rebase: Rebase) -> Self:
        """Return this data set in a run that had another blend before; see
        :func:`~energon_lite.loading.states.rebase.rebase_state`."""
        return replace(
            self,
            plan=replace(self.plan, order=self.plan.order.rebased(rebase)),
            identity=self.identity.beginning_at(rebase.position),
            rebase=rebase,
        )

    def at(self, state: Any) -> Self:
        """Return this data set in the run of a state, including a change of the blend during that run.

        Raises:
            StateError: the entry of the rebase is damaged. Other entries are not checked.
        """
        rebase = read_rebase(state)
        return self if rebase is None else self.rebased(rebase)

    def check_rebase(self, position: int) -> None:
        """Check the position at which the blend begins by a state. The state's identity has been checked before.

        Args:
            position: position of the run, in samples.

        Raises:
            StateError: the rebase is not possible.
        """
        rebase = self.rebase
        if rebase is None:
            return
        wrong = len(rebase.starts) != len(self.leaves) or sum(rebase.starts) > rebase.position
        if wrong or not self.is_endless or rebase.position > position:
            raise damaged("rebase", {"position": rebase.position, "starts": list(rebase.starts)})

    def has(self, leaf: int, index: int) -> bool:
        """Return whether the leaf exists and has a sample of this index."""
        return 0 <= leaf < len(self.leaves) and 0 <= index < self.leaves[leaf].length

    def describe(self, batches: str) -> str:
        """Return a title and a line for each leaf; ``batches`` describes the batches in the title."""
        kind = "one after the other" if self.weights is None else "by weight"
        kind = kind if self.repetitions is None else "by repetitions"
        if self.stages > 1:
            kind += f" in {self.stages} stages"
        config = self.worker_config
        lines = [
            f"{type(self).__name__}: {counted(len(self.leaves), 'data set')}, {kind}; {batches}, "
            f"rank {config.rank} of {config.world_size}"
        ]
        for number, leaf in enumerate(self.leaves):
            share = "" if self.weights is None else f", weight {self.weights[number]:.6g}"
            share += " at the start" if self.stages > 1 else ""
            share = share if self.repetitions is None else f", {self.repetitions[number]:.6g} times an epoch"
            lines.append(f"  {leaf.name}: {counted(leaf.length, 'sample')}{share}")
        return "\n".join(lines)
