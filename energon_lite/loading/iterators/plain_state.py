"""What a state is made of: plain data, no more of it than a state has, and numbers that nothing overflows with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_lite.errors import StateError

__all__ = ["check_plain", "damaged", "is_count", "shown"]

#: Values in a state at most, how deep they are, and bits of a number. Those with a million lanes have some millions.
_MOST_VALUES, _DEPTH, _BITS = 1 << 24, 16, 256


def check_plain(state: Mapping[str, Any]) -> None:
    """Refuse what no state has in it: other values than plain data, or without end.

    Raises:
        StateError: the state is damaged.
    """
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
        elif _is_long(value) or not (value is None or isinstance(value, (bool, int, float, str))):
            raise damaged(at, value)
    raise StateError("the state is damaged: it is nested too deeply, or is no plain data", fix="use another checkpoint")


def is_count(value: Any, limit: int) -> bool:
    """Whether it is a whole number from 0 on, below ``limit``."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def damaged(name: str, value: Any) -> StateError:
    """The error for an entry of a state that cannot be right."""
    return StateError(f"the state is damaged: {name} is {shown(value, 80)}", fix="use another checkpoint")


def shown(value: Any, most: int) -> str:
    """A value in at most so many characters, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # there is a number of thousands of digits in it, which Python does not write
        text = f"a {type(value).__name__} that is too long to be shown"
    return text if len(text) <= most else f"{text[:most]}..."


def _is_long(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() > _BITS
