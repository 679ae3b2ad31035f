"""One state of a loader for all ranks, as a checkpoint holds it that any number of ranks can load."""

from __future__ import annotations

from energon_lite.loading.iterators.collectives import gather_states, is_running
from energon_lite.loading.iterators.state import State
from energon_lite.loading.savable_loader import SavableDataLoader
from energon_lite.loading.states.merge import merged

__all__ = ["common_state"]


def common_state(loader: SavableDataLoader, state: State | None = None) -> State:
    """The state for all data-parallel ranks, on each of them.

    Where hooks decide what is in a batch, each rank knows its own lanes only, so this is a collective of all ranks.
    Else every rank knows it by itself.

    Args:
        state: what ``loader.state_dict()`` was on this rank; None: what it is.
    """
    state, config = loader.state_dict() if state is None else state, loader.worker_config
    if state["kind"] != "lanes" or config.world_size == 1 or not is_running():
        return state
    states = gather_states(state, config)
    return merged(states, [f"rank {rank}" for rank in range(len(states))])
