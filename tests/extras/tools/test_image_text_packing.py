"""The encoder that packs images and texts: by a plan and by hooks, the row is what was planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from energon_lite import (
    BestFit,
    Capacity,
    CaptioningSample,
    InterleavedSample,
    SkipSample,
    TextSample,
    VQASample,
)
from energon_lite.errors import UsageError
from energon_lite.extras.tools.image_text_packing import ImageTextRow, ImageTextTaskEncoder
from energon_lite.extras.tools.positions import mrope_positions
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import examples, take, train_loader

IMAGE, END = 9, 8
SIZES = [(2, 2), (4, 2), (6, 4), (3, 7)]


class Pictures(ImageTextTaskEncoder):
    """Of a text sample, a caption with an image whose size its number says; every fifth has two, every third none."""

    def __init__(self, **arguments: Any):
        super().__init__(
            lambda text: [ord(one) % 7 for one in text], image_token=IMAGE, end_token=END, patch=1, **arguments
        )

    def pieces(self, sample: Any) -> Any:
        number = int(sample.__key__.partition("-")[2])
        images = [torch.full((3, *SIZES[number % 4]), number / 100)] * (0 if number % 3 == 0 else 1 + (number % 5 == 0))
        text = "x" * (1 + number * 5 % 13)
        return [*((image, False) for image in images), (text, True)]


def lengths(source: Any) -> np.ndarray:
    """As ``measure`` counts them."""
    encoder = Pictures()
    samples = (TextSample(__key__=f"a-{number}", __restore_key__=(), text="") for number in range(len(source)))
    return np.array([len(encoder.encode_sample(sample).tokens) for sample in samples])


def check_row(row: Any, capacity: int) -> None:
    """All that is in a row fits together."""
    assert isinstance(row, ImageTextRow) and row.num_tokens <= capacity
    length = row.tokens.shape[1]
    segments = row.cu_seqlens.diff().tolist()
    assert sum(segments) == length and len(row.__key__) == len(row.sample_ids) == int(row.segment_ids.max()) + 1
    assert row.mrope_position_ids.shape == (3, 1, length)
    sizes = row.image_grids.prod(dim=1)
    is_image = torch.zeros(length, dtype=torch.bool)
    for start, size in zip(row.image_starts.tolist(), sizes.tolist(), strict=True):
        assert bool((row.tokens[0, start : start + size] == IMAGE).all()) and not is_image[start : start + size].any()
        is_image[start : start + size] = True
    assert torch.equal(is_image, row.tokens[0] == IMAGE)
    owners = row.media_samples.get("image", torch.zeros(0, dtype=torch.int64))
    assert torch.equal(row.segment_ids[0, row.image_starts].to(torch.int64), owners)
    shapes = [[image.shape[1] // 2, image.shape[2] // 2] for image in row.media.get("image", [])]
    assert shapes == row.image_grids[:, 1:].tolist()
    begins = row.cu_seqlens.tolist()
    for number, (begin, size) in enumerate(zip(begins, segments, strict=False)):
        mine = owners == number
        expected = mrope_positions(size, (row.image_starts[mine] - begin).tolist(), row.image_grids[mine].tolist())
        assert torch.equal(row.mrope_position_ids[:, 0, begin : begin + size], expected)
    assert not row.loss_mask[0, :-1][row.labels[0, :-1] == IMAGE].any()


def test_by_a_plan(leaf_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WebdatasetSource, "column", lambda self, name: lengths(self))
    with train_loader(leaf_of(50), task_encoder=Pictures(), batching=BestFit(Capacity(60)), repeat=False) as loader:
        dataset: Any = loader.dataset
        steps, rows, planned = len(loader), list(loader), dataset.plan.chunks.get(0, 0)
        for number, row in enumerate(rows):
            check_row(row, 60)
            assert row.num_tokens == sum(span[4] for span in planned.spans(number))
    assert len(rows) == steps and sorted(key for row in rows for key in row.__key__) == sorted(
        f"a-{number}" for number in range(50)
    )
    assert sum(row.num_tokens for row in rows) == lengths(range(50)).sum()


@pytest.mark.parametrize("size", [1, 2])
def test_by_hooks(leaf_of: Any, size: int, tmp_path: Path) -> None:
    how: dict[str, Any] = {"batch_size": size, "packing_buffer_size": 32, "trace": tmp_path / "trace.jsonl"}
    with train_loader(leaf_of(500), task_encoder=Pictures(capacity=60), **how) as loader:
        rows = take(loader, 60)
        stats = loader.stats()
    for row in rows:
        check_row(row, 60 * size)
    assert sum(row.num_tokens for row in rows) / (60 * 60 * size) > 0.95
    assert stats["samples"] == sum(len(row.__key__) for row in rows)
    traced = [line for line in (tmp_path / "trace.jsonl").read_text().splitlines() if '"keys"' in line]
    for row, line in zip(rows, traced[-60:], strict=True):
        assert all(f'"{key}"' in line for key in row.__key__)


def test_each_kind_of_sample() -> None:
    encoder = ImageTextTaskEncoder(lambda text: [ord(one) for one in text], image_token=IMAGE, end_token=END, patch=2)
    image = torch.rand(3, 8, 5)  # two rows and one column of 4 x 4 pixels
    base = {"__key__": "0", "__restore_key__": ()}
    made = encoder.encode_sample(CaptioningSample(**base, image=image, caption="A"))
    assert made.tokens.tolist() == [IMAGE, IMAGE, 65] and made.labels.tolist() == [IMAGE, 65, END]
    assert made.loss_mask is not None and made.loss_mask.tolist() == [0, 1, 1]
    made = encoder.encode_sample(VQASample(**base, image=image, context="B", answers=["C", "D"]))
    assert made.tokens.tolist() == [IMAGE, IMAGE, 66, 67] and made.loss_mask.tolist() == [0, 0, 1, 1]
    made = encoder.encode_sample(InterleavedSample(**base, sequence=["E", image, "F", image]))
    assert made.tokens.tolist() == [69, IMAGE, IMAGE, 70, IMAGE, IMAGE]
    assert made.media["image_starts"].tolist() == [1, 4]
    assert encoder.encode_sample(TextSample(**base, text="G")).labels.tolist() == [END]
    no_text, unanswered = InterleavedSample(**base, sequence=[image]), VQASample(**base, image=image, context="H")
    for nothing in (TextSample(**base, text=""), no_text, unanswered):
        with pytest.raises(SkipSample):
            encoder.encode_sample(nothing)
    empty = encoder.empty_batch(None, 1)
    assert empty.tokens.shape == (1, 0) and empty.mrope_position_ids.shape == (3, 1, 0)


@settings(max_examples=examples(30))
@given(height=st.integers(1, 300), width=st.integers(1, 300), most=st.integers(1, 40))
@example(height=20, width=12, most=40)
def test_an_image_has_at_most_so_many_tokens(height: int, width: int, most: int) -> None:
    encoder = ImageTextTaskEncoder(list, image_token=IMAGE, end_token=END, patch=2, merge=2, max_image_tokens=most)
    made, encoder.max_image_tokens = encoder._resized(torch.zeros(3, height, width)), None
    assert made.shape[1] % 4 == made.shape[2] % 4 == 0 and 1 <= made.shape[1] * made.shape[2] / 16 <= most
    whole = (3, *(4 * max(1, round(side / 4)) for side in (height, width)))
    assert encoder._resized(torch.zeros(3, height, width)).shape == whole
    assert made.shape == whole or whole[1] * whole[2] / 16 > most


# -- positions in three dimensions: by hand, and as transformers has them ----------------------------------------------


def test_positions_by_hand() -> None:
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


def test_positions_that_are_refused() -> None:
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
def test_positions_are_as_in_transformers(parts: list[Any]) -> None:
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
