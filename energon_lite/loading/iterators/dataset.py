"""Base class of the data sets: leaves, their order, the plan of batches and the hooks; everything but the position. And
the identity of a run: the data, and the settings that decide the order, with which a state is compared on restore.

A state holds a digest of both. To let an error name the differences, it also holds the settings in clear text and a few
characters of the digest of each leaf. All of this takes less than 1 KiB for a blend of 100 leaves.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import GenericAlias
from typing import Any, ClassVar, NoReturn

from typing_extensions import Self

from energon_lite.errors import StateError, StateMismatchError, UsageError, counted
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.iterators.state import CursorFields, State, damaged, make_state, read_rebase
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.order.orders import Rebase
from energon_lite.worker_config import WorkerConfig

#: Characters spent on the digests of all leaves together.
_DIGEST_BUDGET = 512
#: Characters spent on the digest of one leaf, at most.
_DIGEST_LENGTH = 4


@dataclass(frozen=True)
class LeafIdentity:
    """The properties of one leaf that the order depends on.

    Args:
        name: for messages; not part of the identity, because data may be moved.
        samples: number of samples.
        fingerprint: digest of the data, from which the order is derived.
        settings: weight and similar settings.
        contents: a more specific digest of the data; used in place of ``fingerprint`` unless empty.
    """

    name: str
    samples: int
    fingerprint: str
    settings: tuple[Any, ...] = ()
    contents: str = ""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the leaf's properties, as URL-safe base64 text."""
        text = json.dumps([self.samples, self.contents or self.fingerprint, self.settings])
        return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()


@dataclass(frozen=True)
class Identity:
    """All properties that decide the order of a run.

    Args:
        settings: plain values by name: the arguments of the call that built the data set.
        leaves: the identities of the leaves, in their order.
    """

    settings: Mapping[str, Any]
    leaves: Sequence[LeafIdentity] = field(default=())

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all settings and leaves: 64 bits, as 16 hexadecimal characters."""
        text = json.dumps([dict(sorted(self.settings.items())), [leaf.digest for leaf in self.leaves]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def _nested_settings(self) -> bytes:
        """Settings that are containers, pickled: each state gets its own copy, and unpickling is the fastest way."""
        nested = (dict, list, tuple)
        return pickle.dumps({name: value for name, value in self.settings.items() if isinstance(value, nested)})

    @cached_property
    def _leaf_marks(self) -> str:
        length = min(_DIGEST_LENGTH, _DIGEST_BUDGET // max(1, len(self.leaves)))
        if not length:
            return ""  # without a digest of each of very many leaves
        return "".join(leaf.digest[:length] for leaf in self.leaves)

    @cached_property
    def _samples(self) -> int:
        known: int | None = getattr(self.leaves, "samples", None)
        return sum(leaf.samples for leaf in self.leaves) if known is None else known

    def at(self, samples: int) -> Identity:
        """Return the identity of the first ``samples`` positions of the run; the same object if nothing changes."""
        return self

    def whole(self) -> Identity:
        """Return the identity of the whole run."""
        return self

    def beginning_at(self, position: int) -> Identity:
        """Return the identity of a run whose blend begins at a position; an earlier blend covers those before it."""
        return self

    def to_plain(self) -> dict[str, Any]:
        """Return the identity as plain data, as it is stored in a state."""
        return {
            "fingerprint": self.fingerprint,
            "settings": dict(self.settings) | pickle.loads(self._nested_settings),
            "leaves": len(self.leaves),
            "samples": self._samples,
            "marks": self._leaf_marks,
        }

    def check(self, saved: Any) -> None:
        """Compare with the identity in a state.

        Raises:
            StateError: the saved identity cannot be read.
            StateMismatchError: the saved identity differs; the message names all differences that can be determined.
        """
        if not isinstance(saved, Mapping) or not isinstance(saved.get("fingerprint"), str):
            raise StateError("the state is damaged: it does not say what it belongs to", fix="use another checkpoint")
        if saved["fingerprint"] == self.fingerprint:
            return
        differences = [*self._setting_differences(saved), *self._leaf_differences(saved)]
        if not differences:
            differences = [f"fingerprint: {saved['fingerprint']} in the state, {self.fingerprint} here"]
        raise StateMismatchError(
            "the state belongs to another run:\n" + "\n".join(f"    {difference}" for difference in differences),
            fix="build the loader as it was when the state was saved, or start without the state",
        )

    def _setting_differences(self, saved: Mapping[str, Any]) -> list[str]:
        theirs = saved.get("settings")
        theirs = theirs if isinstance(theirs, Mapping) else {}
        names = sorted({*theirs, *self.settings}, key=str)
        absent = "(not set)"
        pairs = [(name, theirs.get(name, absent), self.settings.get(name, absent)) for name in names]
        return [f"{name}: {there!r} in the state, {here!r} here" for name, there, here in pairs if there != here]

    def _leaf_differences(self, saved: Mapping[str, Any]) -> list[str]:
        here = self.to_plain()
        counts = [
            f"{label}: {saved.get(name)!r} in the state, {here[name]!r} here"
            for name, label in (("leaves", "number of data sets"), ("samples", "samples in all data sets"))
            if saved.get(name) != here[name]
        ]
        marks = saved.get("marks")
        length = len(self._leaf_marks) // max(1, len(self.leaves))
        if not length or not isinstance(marks, str) or len(marks) != len(self._leaf_marks):
            return counts
        different = [
            f"data set {number} ({leaf.name}, {leaf.samples} samples, weight and settings {list(leaf.settings)}): "
            "other data, weight or settings when the state was saved"
            for number, leaf in enumerate(self.leaves)
            if marks[number * length : (number + 1) * length] != leaf.digest[:length]
        ]
        more = [f"... and {len(different) - 5} more data sets"] if len(different) > 5 else []
        return counts + different[:5] + more


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
        loops: makes the :class:`~energon_lite.loading.iterators.iterator.DatasetIterator` of each of its loaders, with
            loops around its loops, given the class of its own iterators; None: a loop is a pass, or ``loop_length``
            steps.
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
    loops: Callable[[type[Any]], Callable[..., Any]] | None = None
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

    def __iter__(self) -> NoReturn:
        raise UsageError(
            "a data set is not iterated itself",
            fix="iterate over a loader of it: get_loader(dataset), or get_savable_loader(dataset), which has a state",
        )

    def __getitem__(self, _: object) -> NoReturn:  # torch's DataLoader asks by number
        self.__iter__()

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
        return make_state(kind, cursor, place, identity.to_plain(), self.rebase, ranks)

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
        """Return this data set in a run that had another blend before."""
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
