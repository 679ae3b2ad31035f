"""A data set as a loader takes it: leaves, their order, the plan of batches, the hooks. Everything but the position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import GenericAlias
from typing import Any, ClassVar

from typing_extensions import Self

from energon_lite.errors import UsageError, counted
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.iterators.identity import Identity
from energon_lite.loading.iterators.loops import Loop
from energon_lite.loading.iterators.state import Numbers, State, damaged, make_state, read_rebase
from energon_lite.loading.makers.chunk_pipeline import ChunkPipeline
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.pipeline import Pipeline
from energon_lite.order.rebase import Rebase
from energon_lite.order.stages import WeightStage
from energon_lite.worker_config import WorkerConfig

__all__ = ["Moved", "SavableDataset"]


@dataclass(frozen=True)
class Moved:
    """A cursor that was moved to where another blend can begin.

    Args:
        cursor: of the kind that the data set has.
        first: position, in samples, of what it has to deliver next.
        given_up: samples before it that were not delivered.
        up_to: ``given_up`` is an upper bound.
    """

    cursor: Any
    first: int
    given_up: int = 0
    up_to: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class SavableDataset:
    """What ``get_train_dataset`` and ``get_val_dataset`` return. Immutable; loaders of it do not share anything.

    Args:
        plan: which samples make up which batch, or chunk; each kind of data set has its own.
        leaves: the data sets it is made of.
        weights: their shares, or None: one after the other, or by repetitions.
        task_encoder: the hooks.
        worker_config: this process's place among the ranks.
        identity: what states of its loaders are checked against.
        seed: 64 bits, for the hooks' randomness.
        loop_length: micro-batches per rank in one ``for`` loop over an endless stream; 0: the loop never ends.
        repetitions: how often an epoch shows each leaf, or None.
        stages: how the weights change, if they do; then ``weights`` are those at the start.
        rebase: the blend begins in the middle of a run, that was one of another blend before.
        limit: steps of a pass at most, on the ranks on which it begins; None: all.
        drop_last: a pass ends with its last step in which every rank has a micro-batch.
        loops: what ``for`` loops are made of, from the inside out; nothing: each is a pass, or ``loop_length`` steps.
        once: there is one pass and no other, and it is no concern of a rank what the others still have: it gets no
            batch without samples, and ends when it has none left.
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations may say what is in it

    plan: Any
    leaves: Sequence[Leaf]
    weights: tuple[float, ...] | None
    task_encoder: TaskEncoder
    worker_config: WorkerConfig
    identity: Identity
    seed: int
    loop_length: int = 0
    repetitions: tuple[float, ...] | None = None
    stages: tuple[WeightStage, ...] = ()
    rebase: Rebase | None = None
    limit: int | None = None
    drop_last: bool = False
    loops: tuple[Loop, ...] = ()
    once: bool = False

    @property
    def runs_as(self) -> SavableDataset:
        """What a loader runs: this very data set, or what a wrapper around others comes to."""
        return self

    @cached_property
    def is_endless(self) -> bool:
        """Whether there is only one pass, which does not end."""
        return self.plan.order.bounds(0) is None

    def pipeline(self) -> Pipeline | ChunkPipeline:
        """What runs this data set's jobs."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Micro-batches per rank in one ``for`` loop.

        Raises:
            UnknownLengthError: nobody knows.
        """
        raise NotImplementedError

    def len_rank(self) -> int:
        """The length, by Energon's name for it."""
        return len(self)

    def config(self) -> dict[str, Any]:
        """The settings and the data that decide the order, as plain data."""
        return self.identity.to_plain()

    def can_restore_sample(self) -> bool:
        """Whether any batch can be made again from its key: always."""
        return True

    def state(self, cursor: Any) -> State:
        """A place in the run as plain data."""
        raise NotImplementedError

    def state_at(self, position: int) -> State:
        """The place of a run that has delivered so many micro-batches, over all ranks and in all passes.

        Raises:
            UsageError: a negative number; or hooks decide what a micro-batch is, so that they have no numbers.
        """
        raise UsageError(
            f"where micro-batch {position} begins is not known before those in front of it are made: hooks decide",
            fix="restore a state that was saved there",
        )

    def _make_state(self, kind: str, cursor: Numbers, place: Mapping[str, Any], identity: Identity) -> State:
        ranks = None if self.limit is None else cursor.ranks or self.worker_config.world_size
        return make_state(kind, cursor, place, identity, self.rebase, ranks)

    def behind_begun(self, state: State) -> Moved:
        """The first place, from a state's on, at which another blend can begin: behind all chunks that were begun."""
        raise NotImplementedError

    def restore_sample(self, key: Any, pipeline: Any) -> Any:
        """The batch or sample of a restore key, made in this process.

        Keys are ``("batch", pass, *place)``, ``("chunk", pass, number, *place)``, ``("sample", leaf, index, epoch,
        attempt)``, with the number of the result behind it if the hooks yield several, and ``("empty",)``.

        Raises:
            UsageError: not a key of such a data set.
            SampleError: the sample (or the batch) cannot be made.
        """
        parts = tuple(key) if isinstance(key, (tuple, list)) else ()
        signed = 3 if parts[:1] == ("chunk",) else 0  # a position of a chunk may be one before it
        if all(
            isinstance(part, int) and not isinstance(part, bool) and (part >= 0 or place == signed)
            for place, part in enumerate(parts[1:], 1)
        ):
            for made in self._restored(parts, pipeline):
                return made
        raise UsageError(
            f"{key!r} is not a restore key of this loader",
            fix="give the __restore_key__ of a batch or of a sample as it was delivered",
        )

    def _restored(self, key: tuple[Any, ...], pipeline: Any) -> Sequence[Any]:
        """What a key stands for; nothing, if it is none of this data set."""
        raise NotImplementedError

    def stop(self, ranks: int | None) -> int | None:
        """The position at which the limit ends a pass that began on so many ranks; None: there is no limit."""
        return None if self.limit is None else self.limit * (ranks or self.worker_config.world_size)

    def rebased(self, rebase: Rebase) -> Self:
        """The same data set, in a run whose blend was another one before; see
        :func:`~energon_lite.loading.states.rebase.rebase_state`."""
        return replace(
            self,
            plan=replace(self.plan, order=self.plan.order.rebased(rebase)),
            identity=self.identity.beginning_at(rebase.position),
            rebase=rebase,
        )

    def at(self, state: Any) -> Self:
        """The data set in the run that a state is of: whether its blend was changed on the way.

        Raises:
            StateError: it is damaged. What else may be wrong with it is not looked at.
        """
        rebase = read_rebase(state)
        return self if rebase is None else self.rebased(rebase)

    def check_rebase(self, position: int) -> None:
        """Check where a state says that the blend begins, after the state's identity was checked.

        Args:
            position: where the run is, in samples.

        Raises:
            StateError: it cannot be right.
        """
        rebase = self.rebase
        if rebase is None:
            return
        wrong = len(rebase.starts) != len(self.leaves) or sum(rebase.starts) > rebase.position
        if wrong or not self.is_endless or rebase.position > position:
            raise damaged("rebase", {"position": rebase.position, "starts": list(rebase.starts)})

    def has(self, leaf: int, index: int) -> bool:
        """Whether there is such a sample."""
        return 0 <= leaf < len(self.leaves) and 0 <= index < self.leaves[leaf].length

    def describe(self, batches: str) -> str:
        """A title and a line for each leaf; ``batches`` is a part of the title."""
        kind = "one after the other" if self.weights is None else "by weight"
        kind = kind if self.repetitions is None else "by repetitions"
        if self.stages:
            kind += f" in {len(self.stages)} stages"
        config = self.worker_config
        lines = [
            f"{type(self).__name__}: {counted(len(self.leaves), 'data set')}, {kind}; {batches}, "
            f"rank {config.rank} of {config.world_size}"
        ]
        for number, leaf in enumerate(self.leaves):
            share = "" if self.weights is None else f", weight {self.weights[number]:.6g}"
            share += " at the start" if self.stages else ""
            share = share if self.repetitions is None else f", {self.repetitions[number]:.6g} times an epoch"
            lines.append(f"  {leaf.name}: {counted(leaf.length, 'sample')}{share}")
        return "\n".join(lines)
