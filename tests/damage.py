"""What happens to files: flipped bits, holes of zeros, cuts, additions."""

from __future__ import annotations

from hypothesis import strategies as st

__all__ = ["damaged"]


@st.composite
def _damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    data = bytearray(whole)
    kind = draw(st.sampled_from(["bit", "bit", "zeros", "cut", "more"]))
    place = draw(st.integers(0, len(data) - 1))
    if kind == "bit":
        data[place] ^= 1 << draw(st.integers(0, 7))
    elif kind == "zeros":
        size = draw(st.integers(1, len(data) - place))
        data[place : place + size] = bytes(size)
    elif kind == "cut":
        del data[place:]
    else:
        data += draw(st.binary(min_size=1, max_size=600))
    return bytes(data)


def damaged(data: st.DataObject, whole: bytes) -> bytes:
    """The contents of a file after one accident; they may be what they were.

    Args:
        data: hypothesis' ``st.data()``, which chooses the accident.
        whole: the contents, not empty.
    """
    return data.draw(_damaged(whole))
