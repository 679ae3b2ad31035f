"""State of a loader for all ranks, which any number of ranks can load from a checkpoint."""

from __future__ import annotations

from energon_lite.loading.iterators.collectives import gather_states, is_running
from energon_lite.loading.iterators.state import State
from energon_lite.loading.savable_loader import SavableDataLoader
from energon_lite.loading.states.merge import merged

__all__ = ["common_state"]


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
