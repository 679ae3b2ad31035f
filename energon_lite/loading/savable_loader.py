"""Saving the position of a run, and resuming there: on the same ranks, or on others."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from types import GenericAlias
from typing import Any, ClassVar

import torch.distributed as dist
from typing_extensions import Self

from energon_lite.errors import StateError
from energon_lite.loading.iterators.collectives import broadcast_plain, gather_states, is_running
from energon_lite.loading.iterators.state import State
from energon_lite.loading.loader import DataLoader
from energon_lite.loading.makers.hook_errors import short_traceback
from energon_lite.worker_config import whole_numbers

logger = logging.getLogger(__name__)


class SavableDataLoader(DataLoader):
    """A loader that can be saved and restored at any moment.

    The state has the position in the global sequence of micro-batches, and a fingerprint of the data and configuration
    of that sequence. It is the same on all ranks that are in step, under 4 KiB, made without asking a worker, and can
    be restored on any number of ranks and workers.

    Example:
        >>> for step, batch in enumerate(loader):
        ...     train(batch)
        ...     if step == 100:
        ...         torch.save(loader.save_state_rank(), "loader.pt")
        ...         break
        >>> loader = get_savable_loader(dataset)  # in another process, another day, on other ranks
        >>> loader.restore_state_rank(torch.load("loader.pt"))
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations may name the type of its batches

    def save_state_rank(self) -> State | None:
        """Return the state of this rank; None if a peer saves it (see ``WorkerConfig.from_mesh``)."""
        return self.state_dict() if self.worker_config.saves_state else None

    @short_traceback
    def restore_state_rank(self, state: State | None) -> None:
        """Resume where ``state`` was saved, on any rank. None: start from the beginning.

        May be called at any time; a running ``for`` loop continues from there.

        Raises:
            StateError: it cannot be read.
            StateMismatchError: it belongs to other data or to another configuration; says what differs.
        """
        self._turn.take()
        try:
            self._path.forget()
            self._dataset_iterator.restore(state)
            self._in_step = False
            self._delivered = self._dataset_iterator.cursor
            self._path.restored(state or {})
        finally:
            self._turn.holder = None

    def state_at(self, position: int) -> State:
        """Return the state of a run that has delivered ``position`` micro-batches; the loader does not move.

        For trainers that count micro-batches, and do not store the loader's state. No sample is read. The state is
        computed at once for micro-batches of a fixed size; if they are planned by tokens, the chunks up to the position
        are planned.

        Args:
            position: micro-batches that were delivered, over all ranks together. In finite data, passes are counted
                too: each as many as its steps times the ranks, also if some rank had no micro-batch in the last step.

        Raises:
            UsageError: a negative number; or batches are content-decided, so that they have no numbers.

        Example:
            >>> loader.restore_state_rank(loader.state_at(consumed_samples // batch_size))
        """
        return self.dataset.resolved.state_at(*whole_numbers(position=position))

    def with_restored_state_rank(self, state: State | None) -> Self:
        """Return the loader itself, after :meth:`restore_state_rank`.

        Example:
            >>> with get_savable_loader(dataset).with_restored_state_rank(state) as loader:
            ...     for batch in loader: ...
        """
        self.restore_state_rank(state)
        return self

    def with_restored_state_global(
        self, state: State | Sequence[State | None] | None, *, src_rank: int | None = None
    ) -> Self:
        """Return the loader itself, after :meth:`restore_state_global`."""
        self.restore_state_global(state, src_rank=src_rank)
        return self

    def save_state_global(self, global_dst_rank: int = 0) -> State | None:
        """Return one state for all ranks, on the process ``global_dst_rank``; None on all others.

        A collective: all ranks of a data-parallel group call it (any number of groups may). The ranks compare their
        states.

        Args:
            global_dst_rank: rank in the default group, not in the data-parallel group.

        Raises:
            StateMismatchError: the ranks are not at the same step.
            TopologyError: no process has one of the data-parallel ranks, because several have the same one.
        """
        state = self.state_dict()
        if not is_running():
            return state if self.worker_config.saves_state else None
        if self.worker_config.world_size > 1:
            from energon_lite.loading.saved_states import merged

            states = gather_states(state, self.worker_config)
            names = [f"rank {rank}" for rank in range(len(states))]
            state = merged(states, names) if self.worker_config.reads else state
        return state if dist.get_rank() == global_dst_rank else None

    @short_traceback
    def restore_state_global(
        self, state: State | Sequence[State | None] | None, *, src_rank: int | None = None
    ) -> None:
        """Resume where a state of :meth:`save_state_global` was saved. All ranks of the group call it.

        Args:
            state: the state, or the states of all ranks as a list (whatever their number).
            src_rank: None: each rank passes the state. Else the rank *inside the data-parallel group* that has it; the
                others pass None.

        Raises:
            StateError, StateMismatchError: as :meth:`restore_state_rank`, on every rank alike; also if no state is
                given, so that a run is not restarted by accident when a file is missing.
        """
        group = self.worker_config.data_parallel_group
        if src_rank is None or not is_running() or self.worker_config.world_size == 1:
            self.restore_state_rank(_one_state(state))
            return
        # An invalid state is only detected on one rank, and must end the call on all of them.
        message: dict[str, Any] = {}
        if dist.get_rank(group) == src_rank:
            try:
                message = {"state": _one_state(state)}
                json.dumps(message)
            except (StateError, TypeError, ValueError) as error:
                message = {"error": str(error)}
        message = broadcast_plain(message, src_rank=src_rank, group=group)
        if "error" in message:
            raise StateError(f"rank {src_rank} of the group has no state to restore:\n{message['error']}")
        self.restore_state_rank(message["state"])

    def save_state(self, dst_rank: int = 0) -> State | None:
        """Call :meth:`save_state_global`; Energon's deprecated name for it."""
        logger.warning("save_state is deprecated: call save_state_rank, or save_state_global")
        return self.save_state_global(dst_rank)

    def restore_state(self, state: State | Sequence[State | None] | None) -> None:
        """Call :meth:`restore_state_global`; Energon's deprecated name for it."""
        logger.warning("restore_state is deprecated: call restore_state_rank, or restore_state_global")
        self.restore_state_global(state)

    def state_dict(self) -> State:
        """Return the state on every rank, the same on all that are in step; torch's name for it."""
        return self._dataset_iterator.state(self._delivered) | self._path.notes()

    def load_state_dict(self, state_dict: State) -> None:
        """Call :meth:`restore_state_rank`; torch's name for it."""
        self.restore_state_rank(state_dict)

    def is_last(self) -> bool | None:
        """Return whether the batch returned last is the last one of its ``for`` loop; None: this is not known before
        the next batch is requested, because hooks decide how many a pass has."""
        iterator = self._dataset_iterator
        return iterator.is_over() if iterator.knows_end else None


def _one_state(state: Any) -> State:
    """Return the state given by a state, or by a list of the states of all ranks."""
    if isinstance(state, Mapping):
        return dict(state)
    if isinstance(state, Sequence) and not isinstance(state, (str, bytes)):
        from energon_lite.loading.saved_states import merged

        given = [(f"state {number}", entry) for number, entry in enumerate(state) if entry is not None]
        return merged([entry for _, entry in given], [name for name, _ in given])
    what = "there is no state" if state is None else f"this is not a loader state: a {type(state).__name__}"
    raise StateError(what, fix="give what save_state_global returned on the rank that it was saved on")
