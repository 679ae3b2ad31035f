"""Positions of text and images in three dimensions: by hand, and as transformers has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.extras.tools.positions import mrope_positions
from tests.testing import examples


def test_by_hand() -> None:
    found = mrope_positions(10, [0, 5], [(1, 1, 3), (2, 1, 2)])
    #          three columns, two tokens, two frames of two columns, a token
    assert found.tolist() == [
        [0, 0, 0, 3, 4, 5, 5, 6, 6, 7],
        [0, 0, 0, 3, 4, 5, 5, 5, 5, 7],
        [0, 1, 2, 3, 4, 5, 6, 5, 6, 7],
    ]
    assert mrope_positions(3, [], []).tolist() == [[0, 1, 2]] * 3
    assert mrope_positions(0, [], []).shape == (3, 0)
    assert torch.equal(mrope_positions(7, [0, 5], [(1, 1, 3), (2, 1, 2)]), found[:, :7])  # an image that is cut


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="begins at position 2"):
        mrope_positions(9, [0, 2], [(1, 1, 3), (1, 1, 1)])
    with pytest.raises(UsageError, match="2 images have 1 grids"):
        mrope_positions(9, [0, 2], [(1, 1, 3)])


@pytest.mark.slow
@settings(max_examples=examples(50), deadline=None)
@given(
    parts=st.lists(
        st.integers(1, 5) | st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6
    )  # so many tokens of text, or rows and columns of an image
)
def test_as_in_transformers(parts: list[Any]) -> None:
    modeling = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    config = type("Config", (), {"vision_config": type("Vision", (), {"spatial_merge_size": 2})})
    model: Any = type("Model", (), {"config": config})()
    model.get_vision_position_ids = modeling.Qwen2VLModel.get_vision_position_ids.__get__(model)
    kinds: list[int] = []
    starts, grids = [], []
    for part in parts:
        if isinstance(part, int):
            kinds += [0] * part
        else:
            if kinds and kinds[-1] == 1:
                kinds.append(0)  # between images there is text, there
            starts.append(len(kinds))
            grids.append((1, *part))
            kinds += [1] * (part[0] * part[1])
    patches = torch.tensor([(1, 2 * rows, 2 * columns) for _, rows, columns in grids]).view(-1, 3)
    ids, types = torch.zeros(1, len(kinds), dtype=torch.int64), torch.tensor([kinds], dtype=torch.int32)
    theirs, _ = modeling.Qwen2VLModel.get_rope_index(model, ids, types, image_grid_thw=patches)
    assert torch.equal(mrope_positions(len(kinds), starts, grids), theirs[:, 0])
