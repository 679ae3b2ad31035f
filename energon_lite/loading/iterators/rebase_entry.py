"""The entry of a state that says that the blend was changed in mid-run: from where on, and where each leaf goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from energon_lite.loading.iterators.plain_state import damaged, is_count
from energon_lite.order.permutation import MAX_LENGTH
from energon_lite.order.rebase import Rebase

__all__ = ["check_rebase", "read_rebase", "rebase_entry"]


def rebase_entry(rebase: Rebase | None) -> dict[str, Any]:
    """What a state has of it: nothing, if the blend was never changed."""
    if rebase is None:
        return {}
    return {"rebase": {"position": rebase.position, "starts": list(rebase.starts)}}


def read_rebase(state: Any) -> Rebase | None:
    """What a state says about it; None: the blend was never changed, or it is no state.

    Raises:
        StateError: it is damaged.
    """
    entry = state.get("rebase") if isinstance(state, Mapping) else None
    if entry is None:
        return None
    position = entry.get("position") if isinstance(entry, Mapping) else None
    starts = entry.get("starts") if isinstance(entry, Mapping) else None
    if not isinstance(starts, Sequence) or not all(is_count(place, MAX_LENGTH) for place in (position, *starts)):
        raise damaged("rebase", entry)
    return Rebase(position, tuple(starts))  # type: ignore[arg-type]  # it is a place


def check_rebase(rebase: Rebase | None, *, leaves: int, position: int, ends: bool) -> None:
    """Check an entry, after the state's identity was.

    Args:
        leaves: how many there are.
        position: where the run is, in samples.
        ends: whether its passes end.

    Raises:
        StateError: the entry cannot be right.
    """
    if rebase is None:
        return
    if ends or len(rebase.starts) != leaves or rebase.position > position or sum(rebase.starts) > rebase.position:
        raise damaged("rebase", rebase_entry(rebase)["rebase"])
