"""How many patches an image becomes, by its size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.extras.balance.image_columns import ImagePatches
from tests.testing import examples

SIZES = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), min_size=1, max_size=5)


def test_by_hand() -> None:
    sizes = [[480, 640], [28, 55], [1, 1]]
    assert ImagePatches(14)(sizes).tolist() == [34 * 45, 2 * 3, 0]
    assert ImagePatches(14, image_size=28)(sizes).tolist() == [4, 4, 4]
    # 480 and 640 are 17.1 and 22.9 times 28; 55 is nearly twice.
    assert ImagePatches(14, multiple=28)(sizes).tolist() == [34 * 46, 2 * 4, 4]
    # To 10,000 pixels, the sides of 480 x 640 shrink to 86.6 and 115.5: three and four times 28.
    assert ImagePatches(14, multiple=28, max_pixels=10_000)(sizes).tolist() == [6 * 8, 8, 4]
    # To 3,136 pixels, 1 x 1 grows to 56 x 56, and 28 x 55 to 40 x 79.
    assert ImagePatches(14, multiple=28, min_pixels=3136)(sizes).tolist() == [34 * 46, 4 * 6, 4 * 4]
    assert ImagePatches(14)(np.zeros((0, 2))).tolist() == []


@given(SIZES, st.integers(1, 3), st.integers(20, 3000))
@settings(max_examples=examples(100), deadline=None)
def test_limits_are_kept_and_proportions_nearly(sizes: list[tuple[int, int]], times: int, side: int) -> None:
    multiple = 14 * times
    most = max(side * side, multiple * multiple)
    for (height, width), patches in zip(
        sizes, ImagePatches(14, multiple=multiple, max_pixels=most)(sizes), strict=True
    ):
        assert patches % times**2 == 0 and patches > 0
        # A side that is shorter than a patch is rounded up, however long the other one is.
        if min(height, width) * side >= max(height, width) * multiple:
            assert patches * 14 * 14 <= most


@pytest.mark.parametrize(
    "wrong", [{"patch_size": 0}, {"patch_size": 14, "multiple": 15}, {"patch_size": 2, "max_pixels": 0}]
)
def test_settings_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        ImagePatches(**wrong)
    with pytest.raises(UsageError, match="with other sizes"):
        ImagePatches(14, image_size=28, max_pixels=100)
