"""The same bytes as from tarfile and numpy."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.trainer.tokenizing.shards import ArrayTar, npy

names = st.text("abc-_.0123456789", min_size=1, max_size=100)
arrays = st.builds(
    lambda length, dtype: np.arange(length).astype(dtype),
    st.integers(0, 3000) | st.sampled_from([0, 1, 192, 193, 448]),
    st.sampled_from(["u1", "u2", "i4", "i8", "f4"]),
)


@given(st.lists(st.tuples(names, arrays), max_size=12))
def test_the_bytes_are_those_of_tarfile(members: list[tuple[str, np.ndarray]]) -> None:
    expected, found = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=expected, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, array in members:
            data = io.BytesIO()
            np.lib.format.write_array(data, array, version=(1, 0))
            assert npy(array) == data.getvalue()
            info = tarfile.TarInfo(name)
            info.size = data.tell()
            data.seek(0)
            tar.addfile(info, data)
    ours = ArrayTar(found)
    for name, array in members:
        ours.add(name, array)
    ours.finish()
    assert found.getvalue() == expected.getvalue()


def test_a_name_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="101"):
        ArrayTar(io.BytesIO()).add("n" * 101, np.zeros(1))
