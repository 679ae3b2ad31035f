"""The largest capacity that fits, when all one can do is try."""

from __future__ import annotations

from collections.abc import Callable

from energon_lite.errors import UsageError

__all__ = ["largest_fitting"]


def largest_fitting(
    fits: Callable[[int], bool], *, start: int = 1024, most: int = 1 << 20, multiple: int = 1, precision: float = 0.01
) -> int:
    """Double until something does not fit, then bisect.

    Args:
        fits: whether a capacity fits; if one does not, no larger one does.
        start: what is tried first.
        most: what is tried at most.
        multiple: only multiples of this are tried.
        precision: the result is at most this share below the largest that fits, or one ``multiple``.

    Returns:
        The largest capacity that was found to fit; 0 if none does.

    Raises:
        UsageError: nothing can be tried.

    Example:
        >>> largest_fitting(lambda capacity: capacity <= 5000, start=1000, most=100_000, precision=0.0)
        5000
    """
    if multiple < 1 or start < 1 or most < multiple:
        raise UsageError(
            f"from {start} to {most} in multiples of {multiple} there is no capacity", fix="give positive numbers"
        )
    top, good, bad = most // multiple, 0, None
    probe = min(top, max(1, start // multiple))
    while bad is None:
        if not fits(probe * multiple):
            bad = probe
        elif probe == top:
            return probe * multiple
        else:
            good, probe = probe, min(top, 2 * probe)
    while bad - good > max(1, int(good * precision)):
        probe = (good + bad) // 2
        if fits(probe * multiple):
            good = probe
        else:
            bad = probe
    return good * multiple
