"""Search for the largest capacity that fits, by trial."""

from __future__ import annotations

from collections.abc import Callable

from energon_lite.errors import UsageError

__all__ = ["largest_fitting"]


def largest_fitting(
    fits: Callable[[int], bool], *, start: int = 1024, most: int = 1 << 20, multiple: int = 1, precision: float = 0.01
) -> int:
    """Largest capacity that fits: double until a trial fails, then bisect.

    Args:
        fits: True if a capacity fits; if one does not fit, no larger one may.
        start: the first capacity to try.
        most: the largest capacity to try.
        multiple: only multiples of this number are tried.
        precision: the result is at most this share, or one ``multiple``, below the largest that fits.

    Returns:
        The largest tried capacity that fits; 0 if none does.

    Raises:
        UsageError: the range holds no capacity to try.

    Example:
        >>> largest_fitting(lambda capacity: capacity <= 5000, start=1000, most=100_000, precision=0.0)
        5000
    """
    if multiple < 1 or start < 1 or most < multiple:
        raise UsageError(
            f"from {start} to {most} in multiples of {multiple} there is no capacity", fix="give positive numbers"
        )
    top = most // multiple
    good, bad = 0, None
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
