"""Saving where a run is, and going on there: on the same ranks, or on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from energon_lite.errors import StateError, StateMismatchError
from energon_lite.loading.collectives import broadcast_plain, gather_plain, is_running
from energon_lite.loading.cursor import Cursor, from_state, to_state
from energon_lite.loading.loader import DataLoader

__all__ = ["SavableDataLoader", "State"]

#: Plain data: dicts, lists, strings and integers.
State = dict[str, Any]


class SavableDataLoader(DataLoader):
    """A loader that can be saved and restored at any moment.

    The state says which micro-batch comes next in the global sequence, and what data and configuration that sequence
    belongs to. It is the same on all ranks that are in step, under 4 KiB, made without asking a worker, and can be
    restored on any number of ranks and workers.

    Example:
        >>> for step, batch in enumerate(loader):
        ...     train(batch)
        ...     if step == 100:
        ...         torch.save(loader.save_state_rank(), "loader.pt")
        ...         break
        >>> loader = get_savable_loader(dataset)  # in another process, another day, on other ranks
        >>> loader.restore_state_rank(torch.load("loader.pt"))
    """

    def save_state_rank(self) -> State | None:
        """The state of this rank; None on ranks whose state is saved by a peer (see ``WorkerConfig.from_mesh``)."""
        return to_state(self._cursor, self.dataset.identity) if self.worker_config.saves_state else None

    def restore_state_rank(self, state: State | None) -> None:
        """Go on where ``state`` was saved, on whatever rank it was saved. None: from the beginning.

        May be called at any time; a running ``for`` loop goes on from there.

        Raises:
            StateError: it cannot be read.
            StateMismatchError: it belongs to other data or to another configuration; says what differs.
        """
        self._cursor = Cursor() if state is None else from_state(state, self.dataset.identity)

    def save_state_global(self, global_dst_rank: int = 0) -> State | None:
        """One state for all ranks, on the process ``global_dst_rank``; None on all others.

        A collective: all ranks of a data-parallel group call it (any number of groups may). The ranks compare their
        states.

        Args:
            global_dst_rank: rank in the whole world, not in the group.

        Raises:
            StateMismatchError: the ranks are not at the same step.
        """
        state = to_state(self._cursor, self.dataset.identity)
        if not is_running():
            return state if self.worker_config.saves_state else None
        import torch.distributed as dist

        if self.worker_config.world_size > 1:
            _agreed(gather_plain(state, group=self.worker_config.data_parallel_group))
        return state if dist.get_rank() == global_dst_rank else None

    def restore_state_global(
        self, state: State | Sequence[State | None] | None, *, src_rank: int | None = None
    ) -> None:
        """Go on where a state of :meth:`save_state_global` was saved. All ranks of the group call it.

        Args:
            state: the state, or the states of all ranks as a list (whatever their number).
            src_rank: None: each rank passes the state. Else the rank *inside the data-parallel group* that has it; the
                others pass None.

        Raises:
            StateError, StateMismatchError: as :meth:`restore_state_rank`; on every rank alike.
        """
        merged: State | None = None
        if isinstance(state, Mapping):
            merged = dict(state)
        elif isinstance(state, Sequence) and not isinstance(state, (str, bytes)):
            merged = _agreed([one for one in state if one is not None])
        elif state is not None:
            raise StateError(f"this is not a loader state: a {type(state).__name__}", fix="give the saved state")
        if src_rank is not None and is_running() and self.worker_config.world_size > 1:
            merged = broadcast_plain(merged, src_rank=src_rank, group=self.worker_config.data_parallel_group)
        self.restore_state_rank(merged)

    def state_dict(self) -> State:
        """The state, by torch's name for it; on every rank, and the same on all that are in step."""
        return to_state(self._cursor, self.dataset.identity)

    def load_state_dict(self, state_dict: State) -> None:
        """:meth:`restore_state_rank`, by torch's name for it."""
        self.restore_state_rank(state_dict)


def _agreed(states: Sequence[State]) -> State | None:
    """The one state that all ranks have.

    Raises:
        StateMismatchError: names the ranks that are elsewhere.
    """
    if not states:
        return None
    places = [(state.get("pass_number"), state.get("position")) for state in states]
    if len(set(places)) > 1:
        listed = "\n".join(f"    rank {rank}: pass {at[0]}, micro-batch {at[1]}" for rank, at in enumerate(places))
        raise StateMismatchError(
            f"the ranks are not at the same step:\n{listed}", fix="save after the same number of batches on every rank"
        )
    if any(state != states[0] for state in states):
        raise StateMismatchError(
            "the ranks' states belong to different data or configurations",
            fix="build the loader from the same data and with the same arguments on every rank",
        )
    return dict(states[0])
