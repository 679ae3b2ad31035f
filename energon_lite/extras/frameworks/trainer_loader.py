"""Loader for other libraries' trainers: one state for all ranks, a marked end, and batches of equal size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from energon_lite.batching.collate import rows_of, with_rows
from energon_lite.errors import TopologyError, UsageError
from energon_lite.loading.iterators.collectives import gather_states, is_running
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.state import State
from energon_lite.loading.recipes import get_savable_loader
from energon_lite.loading.savable_loader import SavableDataLoader
from energon_lite.loading.saved_states import merged

__all__ = ["TrainerLoader", "common_state"]


def common_state(loader: SavableDataLoader, state: State | None = None) -> State:
    """Return the state for all data-parallel ranks, on each of them.

    For content-decided batches, each rank knows only its own lanes, so this is a collective of all ranks. Otherwise
    every rank computes it alone.

    Args:
        state: an earlier ``loader.state_dict()`` of this rank; None: the current one.
    """
    state, config = loader.state_dict() if state is None else state, loader.worker_config
    if state["kind"] != "lanes" or config.world_size == 1 or not is_running():
        return state
    states = gather_states(state, config)
    return merged(states, [f"rank {rank}" for rank in range(len(states))])


#: The most batches that a trainer may have taken and not yet trained on.
_MOST_AHEAD = 8


class TrainerLoader:
    """Iterable of a savable loader's batches, for the loop of a trainer.

    * A loop over validation data always starts at the first batch, also after a loop that was left early.
    * At the end of a pass with fixed-size micro-batches, ranks with fewer samples in the last step have theirs filled
      with copies, because trainers gather results of equal size from each rank; ``remainder`` is the number of real
      samples in that step, over all ranks in order.
    * The state is common to all ranks.

    Args:
        given: the loader, or a data set to make one of.
        rank: rank of this process in the trainer.
        world_size: number of the trainer's processes.
        convert: function applied to each batch.

    Attributes:
        at_end: True if the last delivered batch is the last of the loop.
        taken_ahead: function that returns the number of batches the trainer has taken and not trained on.

    Raises:
        UsageError: ``given`` is neither a loader nor a data set.
        TopologyError: the loader is for another rank, or another number of ranks.
    """

    def __init__(
        self,
        given: SavableDataLoader | SavableDataset,
        *,
        rank: int,
        world_size: int,
        convert: Callable[[Any], Any] | None = None,
    ):
        if isinstance(given, SavableDataset):
            given = get_savable_loader(given)
        if not isinstance(given, SavableDataLoader):
            raise UsageError(
                f"the trainer's data is a {type(given).__name__}", fix="give what get_savable_loader returned"
            )
        self.loader = given
        config = given.worker_config
        alone = config.data_parallel_group is None and config.replica is None  # groups may count otherwise
        if alone and (config.rank, config.world_size) != (rank, world_size):
            raise TopologyError(
                f"the loader is made for rank {config.rank} of {config.world_size}, and this process is rank {rank} of "
                f"{world_size}",
                fix="make it after the trainer's process group, with WorkerConfig.default_worker_config()",
            )
        settings, state = given.config()["settings"], given.state_dict()
        is_fixed = state["kind"] == "planned" and "place" not in state
        #: Samples in a micro-batch; None: their number varies.
        self.rows: int | None = (settings.get("batch_size") or None) if is_fixed else None
        is_training = getattr(given.dataset.resolved, "refills", settings["kind"] != "val")  # also inside of wrappers
        self.starts_over = not (is_training or given.dataset.once)
        self._convert = convert
        self._states: deque[State] = deque(maxlen=_MOST_AHEAD + 1)
        self._full: Any = None
        self._is_ahead = False
        self.at_end = False
        self.taken_ahead: Callable[[], int] = int

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.starts_over:
            self.loader.restore_state_rank(None)
        elif self._is_ahead:
            self.loader.restore_state_rank(self._states[-1])  # return batches taken ahead in a loop that was left
        self._is_ahead = False
        self._states.append(self.loader.state_dict())
        for batch, state, is_last in self._marked():
            self._states.append(state)
            self.at_end = is_last
            batch = self._filled(batch)
            yield batch if self._convert is None else self._convert(batch)
        self._is_ahead = False

    def _marked(self) -> Iterator[tuple[Any, State, bool]]:
        """Yield each batch, the state after it, and whether it is the last."""
        loader = self.loader
        if loader.is_last() is not None:
            for batch in loader:
                yield batch, loader.state_dict(), bool(loader.is_last())
            return
        batches, end = iter(loader), object()
        following = next(batches, end)
        while following is not end:
            batch, state = following, loader.state_dict()
            following = next(batches, end)
            self._is_ahead = following is not end
            yield batch, state, following is end

    # -- the state ------------------------------------------------------------------------------------------------

    def own_state(self) -> State:
        """Return the state of this rank."""
        return self._states[-1 - self.taken_ahead()] if self._states else self.loader.state_dict()

    def state_dict(self, state: State | None = None) -> State:
        """Return the state for all ranks, on each; a collective for content-decided batches.

        Args:
            state: an earlier :meth:`own_state`; None: the current one.
        """
        return common_state(self.loader, self.own_state() if state is None else state)

    def load_state_dict(self, state_dict: State) -> None:
        """Resume from a state, on any number of ranks."""
        self.loader.restore_state_rank(state_dict)
        self._states.clear()
        self._is_ahead = False

    # -- the last step of a pass ----------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """Number of samples in a pass, over all ranks; for an endless stream, in all data sets.

        Raises:
            UnknownLengthError: the number is not known.
        """
        loader = self.loader
        if self.rows is None or loader.dataset.is_endless or not len(self):
            return int(loader.config()["samples"])
        # Computed for a future pass: steps of a restored pass may begin elsewhere.
        later = loader.state_dict()["pass_number"] + 1
        last = loader.samples_at(len(self) - 1, all_ranks=True, pass_number=later)
        return (len(self) - 1) * loader.worker_config.world_size * self.rows + len(last)

    @property
    def remainder(self) -> int:
        """Number of samples in the last step of the pass that starts or continues next, over all ranks.

        0: as many as in every other step; -1: not known.
        """
        if self.rows is None or self.loader.dataset.is_endless:
            return -1
        samples, begun = self.samples, self.own_state()["position"] * self.rows
        left = samples if self.starts_over or begun >= samples else samples - begun
        return left % (self.loader.worker_config.world_size * self.rows)

    def _filled(self, batch: Any) -> Any:
        """Fill a batch of a finite pass to the number of rows of all others."""
        wanted, loader = self.rows, self.loader
        if wanted is None or loader.worker_config.world_size == 1 or loader.dataset.is_endless or batch is None:
            return batch
        rows = rows_of(batch, wanted)
        if rows >= wanted:
            self._full = batch
            return batch
        if not rows:
            if self._full is None:  # the first batch of the pass, of another rank
                self._full = loader.restore_sample(("batch", loader.state_dict()["pass_number"], 0))
            batch, rows = self._full, rows_of(self._full, wanted)
        return with_rows(batch, rows, [number % rows for number in range(wanted)])
