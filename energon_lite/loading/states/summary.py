"""Summary of a state, as plain data and as text."""

from __future__ import annotations

from typing import Any

from energon_lite.batching.plan import worlds_for
from energon_lite.errors import counted
from energon_lite.loading.iterators.lane_cursor import ends_of, read_lanes
from energon_lite.loading.iterators.state import KINDS, State, kind_of, read_rebase

__all__ = ["summary", "summary_lines"]

#: Largest batch size that is listed.
_LARGEST = 1024


def summary(state: State, files: int = 1) -> dict[str, Any]:
    """Return the contents of a state, as plain data.

    Args:
        state: state of a rank, or of the whole run.
        files: number of ranks' states that it was merged from.

    Returns:
        ``world_sizes`` is None if the run can be resumed on any number of ranks; ``batch_sizes``, in endless planned
        runs, are the sizes up to 1,024 that the run can be resumed with, or None for any; ``samples_delivered`` is None
        if only the hooks know it; ``lanes_missing`` are those that other ranks' states have.

    Raises:
        StateError: its lanes are damaged.
    """
    kind = kind_of(state)
    identity = state["identity"]
    settings = identity["settings"]
    entries: dict[str, Any] = {
        "kind": kind,
        "states": files,
        **{name: state[name] for name in ("version", "order_version", "pass_number", "position", "loop_start")},
        "batches_delivered": state["position"],
        "samples_delivered": None,
        "world_sizes": None,
        **{name: identity.get(name) for name in ("leaves", "samples", "fingerprint")},
        "settings": settings,
    }
    rows = settings.get("batch_size") or 1
    place = state.get("place")
    if kind == "planned" and isinstance(place, (list, tuple)) and len(place) == 2:  # by tokens
        entries |= {"chunk": place[0], "batch": place[1]}
    elif kind == "planned" and settings.get("repeat") and isinstance(rows, int):
        entries["samples_delivered"] = samples = state["position"] * rows
        entries["batch_sizes"] = [size for size in range(1, _LARGEST + 1) if samples % size == 0] if samples else None
    if kind == "lanes":
        lanes, places = read_lanes(state)
        entries |= {
            "lanes": lanes,
            "lanes_missing": [lane for lane in range(lanes) if lane not in places],
            "world_sizes": worlds_for(lanes),
        }
    rebase = read_rebase(state)
    if rebase is not None:
        entries["rebase"] = {"position": rebase.position, "leaves_that_went_on": sum(map(bool, rebase.starts))}
    return entries


def summary_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a summary as lines of a title and a text."""
    lines = [
        ("state", f"{KINDS.get(found['kind'], found['kind'])} (format version {found['version']})"),
        ("states", f"{found['states']:,}"),
        ("place", f"pass {found['pass_number']}, micro-batch {found['position']:,} over all ranks"),
    ]
    if found["loop_start"]:
        lines.append(("loop began at", f"micro-batch {found['loop_start']:,}"))
    samples = found["samples_delivered"]
    delivered = counted(found["batches_delivered"], "micro-batch")
    lines.append(("delivered", delivered + (f", {counted(samples, 'sample')}" if samples is not None else "")))
    if "chunk" in found:
        lines.append(("plan", f"chunk {found['chunk']}, micro-batch {found['batch']} of it"))
    if "lanes" in found:
        missing = found["lanes_missing"]
        text = f"{found['lanes']:,}"
        if missing:
            text += f"; the states of other ranks have {len(missing)} of them: {ends_of(missing)}"
        lines.append(("lanes", text))
    if "rebase" in found:
        rebase = found["rebase"]
        lines.append(
            (
                "blend",
                f"changed at sample {rebase['position']:,}; "
                f"{counted(rebase['leaves_that_went_on'], 'data set')} went on",
            )
        )
    worlds = found["world_sizes"]
    lines.append(("can go on on", "any number of ranks" if worlds is None else f"{ends_of(worlds)} ranks"))
    if "batch_sizes" in found:
        sizes = found["batch_sizes"]
        lines.append(("with", "any batch_size" if sizes is None else f"batch_size {ends_of(sizes)}"))
    if None not in (found["leaves"], found["samples"]):
        lines.append(("data sets", f"{found['leaves']:,}, with {counted(found['samples'], 'sample')}"))
    lines.append(("fingerprint", str(found["fingerprint"])))
    titles = ["settings", *[""] * len(found["settings"])]
    for title, (name, value) in zip(titles, found["settings"].items(), strict=False):
        lines.append((title, f"{name}: {value}"))
    return lines
