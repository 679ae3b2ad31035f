"""Format and checks of a state: plain integers, strings, lists and dicts that belong to one run.

A state can be stored by JSON, msgpack and ``torch.load(weights_only=True)``. It counts micro-batches *delivered to the
user*, over all ranks together. It does not depend on prefetching, or on workers and their number.

A run can be resumed with another micro-batch size at every position at which a micro-batch of that size begins: the
sequence of samples does not depend on the size, which only decides where the sequence is cut. If ``micro_batch_size *
world_size`` stays the same, or the global batch is split in any other way, each global batch has the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, TypeVar

from energon_lite.errors import StateError, StateMismatchError, counted
from energon_lite.order.orders import ORDER_VERSION, Rebase
from energon_lite.order.permutation import MAX_LENGTH

#: Plain data: dicts, lists, strings and integers.
State = dict[str, Any]

#: Value of a state's entry ``format``.
FORMAT = "energon_lite.loader"
#: Version of the format; incremented when the meaning of a state changes.
_VERSION = 1
#: Kinds of states, with their descriptions in messages.
KINDS = {
    "planned": "of planned batches",
    "lanes": "of content-decided batches",
}
# Exclusive upper bounds of the numbers in a state; above them it is damaged. No run reaches them, and sums of such
# numbers still fit into 64 bits.
#: Passes of a run.
_MOST_PASSES = 1 << 40
#: Micro-batches of a pass, over all ranks.
_MOST_BATCHES = 1 << 60
#: Ranks of a run.
_MOST_RANKS = 1 << 32
#: Largest number of lanes of a run. Each takes some hundred bytes of a state, and every rank has at least one.
MAX_LANES = 1 << 20
#: Largest number of values in a state. A state with a million lanes has some millions.
_MOST_VALUES = 1 << 24
#: Largest depth of nesting in a state, in levels.
_DEPTH = 16
#: Largest length of an integer in a state, in bits.
_BITS = 256


@dataclass(frozen=True, kw_only=True)
class CursorFields:
    """Fields that all cursors have.

    Args:
        pass_number: finished passes over a finite stream.
        position: micro-batches of this pass that were delivered, over all ranks.
        loop_start: the position at which the running ``for`` loop began (virtual epochs of an endless stream); in a
            pass that ends, the part of ``position`` that counts steps in which no rank had a micro-batch left.
        ranks: the world size at the beginning of the pass, which a limit is counted with; None: the present one.
    """

    pass_number: int = 0
    position: int = 0
    loop_start: int = 0
    ranks: int | None = None


def make_state(
    kind: str,
    cursor: CursorFields,
    place: Mapping[str, Any],
    identity: Mapping[str, Any],
    rebase: Rebase | None,
    ranks: int | None,
) -> State:
    """Return the state of a cursor.

    Args:
        kind: one of :data:`KINDS`.
        cursor: the position in the run.
        place: entries that only this kind has.
        identity: the data and configuration as plain data, as far as they count at this position.
        rebase: the blend begins in the middle of the run.
        ranks: with a limit, which counts steps: the world size at the beginning of the pass. It keeps the total number
            of batches the same if the run is resumed on another world size.
    """
    return {
        "format": FORMAT,
        "version": _VERSION,
        "order_version": ORDER_VERSION,
        "kind": kind,
        "pass_number": cursor.pass_number,
        "position": cursor.position,
        "loop_start": cursor.loop_start,
        **({} if ranks is None else {"ranks": ranks}),
        **place,
        **({} if rebase is None else {"rebase": {"position": rebase.position, "starts": list(rebase.starts)}}),
        "identity": identity,
    }


def kind_of(state: Any) -> Any:
    """Return the kind that a state declares, unchecked; see :data:`KINDS`."""
    return state.get("kind") if isinstance(state, Mapping) else None


def identity_of(state: Any) -> Mapping[str, Any]:
    """Return the identity that a state declares, unchecked; empty if there is none."""
    identity = state.get("identity") if isinstance(state, Mapping) else None
    return identity if isinstance(identity, Mapping) else {}


def checked(state: Any, kind: str | None = None) -> CursorFields:
    """Check a state, except its identity and the entries that only its kind has.

    Args:
        state: the state, perhaps after a round trip through JSON.
        kind: the required kind; None: any.

    Raises:
        StateError: not a state, a damaged one, or one of a format that this version does not know.
        StateMismatchError: a state of another order or kind; says what differs.
    """
    name = state.get("format") if isinstance(state, Mapping) else None
    if not isinstance(name, str) or name != FORMAT:
        raise StateError(
            f"this is not a loader state: a {type(state).__name__}, {shown(state, 60)}",
            fix="give what save_state_rank or save_state_global returned",
        )
    _check_plain(state)
    version = state.get("version")
    if version != _VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > _VERSION
        raise StateError(
            f"the state has format version {version!r}, this energon_lite reads version {_VERSION}",
            fix="upgrade energon_lite" if newer else "save the state again",
        )
    if state.get("order_version") != ORDER_VERSION:
        raise StateMismatchError(
            f"the state was saved under order version {state.get('order_version')!r}, this energon_lite has "
            f"{ORDER_VERSION}: the same positions would be other samples",
            fix="resume with the release that saved it, or start without the state",
        )
    saved_kind = kind_of(state)
    ranks = state.get("ranks")
    if not isinstance(saved_kind, str) or saved_kind not in KINDS:
        raise damaged("kind", saved_kind)
    given = {name: state.get(name) for name in ("pass_number", "position", "loop_start")}
    for name, most in zip(given, (_MOST_PASSES, _MOST_BATCHES, _MOST_BATCHES), strict=True):
        if not is_count(given[name], most):
            raise damaged(name, given[name])
    numbers = CursorFields(**given, ranks=ranks if given["position"] else None)
    if numbers.loop_start > numbers.position:
        raise damaged("loop_start", numbers.loop_start)
    if ranks is not None and not (is_count(ranks, _MOST_RANKS) and ranks):
        raise damaged("ranks", ranks)
    if kind not in (None, saved_kind):
        raise StateMismatchError(
            f"the state is one {KINDS[saved_kind]}, and this loader one {KINDS[kind or saved_kind]}",
            fix="build the loader with the hooks, packing_buffer_size and batching with which the state was saved",
        )
    return numbers


def read_rebase(state: Any) -> Rebase | None:
    """Return the change of the blend that a state records; None if there was none, or if it is not a state.

    Raises:
        StateError: the entry is damaged.
    """
    entry = state.get("rebase") if isinstance(state, Mapping) else None
    if entry is None:
        return None
    position = entry.get("position") if isinstance(entry, Mapping) else None
    starts = entry.get("starts") if isinstance(entry, Mapping) else None
    if not isinstance(starts, Sequence) or not all(is_count(place, MAX_LENGTH) for place in (position, *starts)):
        raise damaged("rebase", entry)
    return Rebase(position, tuple(starts))  # type: ignore[arg-type]  # checked to be a count above


def is_count(value: Any, limit: int) -> bool:
    """Return whether a value is an integer from 0 on, below ``limit``."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def damaged(name: str, value: Any) -> StateError:
    """Return the error for an invalid entry of a state."""
    return StateError(f"the state is damaged: {name} is {shown(value, 80)}", fix="use another checkpoint")


def _check_plain(state: Mapping[str, Any]) -> None:
    """Refuse a state with values other than plain data, or with endless nesting."""
    waiting: list[tuple[str, Any, int]] = [("it", state, 0)]
    for _ in range(_MOST_VALUES):
        if not waiting:
            return
        at, value, depth = waiting.pop()
        if isinstance(value, Mapping):
            if depth > _DEPTH or not all(isinstance(key, str) for key in value):
                break
            waiting += [(key, inner, depth + 1) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            if depth > _DEPTH:
                break
            waiting += [(at, inner, depth + 1) for inner in value]
        elif isinstance(value, int):
            if value.bit_length() > _BITS:
                raise damaged(at, value)
        elif not (value is None or isinstance(value, (float, str))):
            raise damaged(at, value)
    raise StateError("the state is damaged: it is nested too deeply, or not plain data", fix="use another checkpoint")


def shown(value: Any, most: int) -> str:
    """Return the ``repr`` of any value, cut to at most ``most`` characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits, which Python refuses to write
        text = f"a {type(value).__name__} that is too long to be shown"
    return text if len(text) <= most else f"{text[:most]}..."


N = TypeVar("N", bound=CursorFields)

#: Name of the micro-batch size among the settings of a run.
BATCH_SIZE = "batch_size"
#: Exclusive upper bound of a valid micro-batch size, in samples.
_MOST = 1 << 32


def saved_batch_size(state: Any) -> Any:
    """Return the ``batch_size`` that a state was saved with; None if batches are single samples or it is not stored."""
    settings = identity_of(state).get("settings")
    size = settings.get(BATCH_SIZE) if isinstance(settings, Mapping) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and 0 < size < _MOST else None


def next_position(position: int, old: int, new: int) -> int:
    """Return the first position from ``position`` on, in micro-batches of ``old`` samples, where one of ``new`` begins.

    Example:
        >>> next_position(3, old=2, new=4)
        4
    """
    unit = new // gcd(old, new)
    return -(-position // unit) * unit


def steps_to(position: int, old: int, new: int, world_size: int, end: int | None = None) -> int | None:
    """Return the number of steps after which a micro-batch of ``new`` samples begins, or the pass has ended before;
    None if there is no such step.

    A step is ``world_size`` micro-batches of ``old`` samples; ``position`` counts micro-batches of ``old`` samples.

    Example:
        >>> steps_to(3, old=2, new=4, world_size=3), steps_to(3, old=2, new=4, world_size=2)
        (1, None)
    """
    unit = new // gcd(old, new)
    steps = next((steps for steps in range(unit) if not (position + steps * world_size) % unit), None)
    return steps if steps is None or end is None else min(steps, -((position - end) // world_size))


def resized(
    numbers: N, old: int, new: int, ends: tuple[int | None, int | None], world_size: int, *, give_up: bool = False
) -> N:
    """Convert a cursor to micro-batches of another size.

    Args:
        numbers: the cursor, in micro-batches of ``old`` samples.
        old, new: samples in a micro-batch.
        ends: positions at which the pass ends, with the old and the new size; None if it does not end.
        world_size: number of ranks of the resumed run; only used in the error message.
        give_up: skip the rest of a new micro-batch that begins before the position.

    Raises:
        StateMismatchError: the position is inside a new micro-batch; the message says where the next one begins.
    """
    position = numbers.position
    end, new_end = ends
    if end is not None and new_end is not None and position >= end:
        return replace(numbers, position=new_end, loop_start=0)
    samples = position * old
    if samples % new and not give_up:
        following = next_position(position, old, new)
        following = following if end is None else min(following, end)
        steps = steps_to(position, old, new, world_size, end)
        ranks = counted(world_size, "rank")
        way = f"{steps} on {ranks}" if steps is not None else f"{following - position} on 1 rank; on {ranks} none ends"
        raise StateMismatchError(
            f"batch_size: {old} in the state, {new} here, and no batch of {new} begins at micro-batch {position:,}, "
            f"which is sample {samples:,}",
            fix=f"go on with batch_size={old} to micro-batch {following:,} (steps: {way} there), save, and change it "
            f"then; or take a state that was saved at a multiple of {new // gcd(old, new)} micro-batches",
        )
    # The samples delivered in the running loop stay the same; they are rounded up to whole new micro-batches.
    in_loop = -(-(position - numbers.loop_start) * old // new)
    here = -(-samples // new)
    return replace(numbers, position=here, loop_start=max(0, here - in_loop))
