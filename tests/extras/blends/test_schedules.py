"""Weights that change along the run: what a state says when the document was edited meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from energon_lite import BestFit, Capacity, TaskEncoder, stateless
from energon_lite.errors import StateMismatchError
from energon_lite.order.block_counts import BLOCK
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import take, train_loader

RAMP, LONGER = (({"linear": {0: 0.9, n: 0.1}}, {"linear": {0: 0.1, n: 0.9}}) for n in (30_000, 40_000))


WriteWeights = Callable[..., dict[str, Any]]


@pytest.fixture
def write_weights(leaf_of: Any) -> WriteWeights:
    """A blend of leaves "a", "b", ... of 50 samples each, with these weights."""

    def write(*weights: Any) -> dict[str, Any]:
        blend = [
            {"path": str(leaf_of(50, tag)), "weight": weight} for tag, weight in zip("abcdef", weights, strict=False)
        ]
        return {"splits": {"train": {"blend": blend}}}

    return write


def _loader(metadataset: Any, batch_size: int | None = 8, **more: Any) -> Any:
    return train_loader(metadataset, batch_size=batch_size, **more)


def _state(metadataset: Any, samples: int) -> Any:
    """As if so many samples had been consumed, in batches of 8."""
    loader = _loader(metadataset)
    loader._delivered = replace(loader._delivered, place=(samples // 8,), position=samples // 8)
    return json.loads(json.dumps(loader.save_state_rank()))


def _keys(loader: Any, batches: int) -> list[str]:
    return [key for batch in take(loader, batches) for key in batch.__key__]


def _state_that_goes_on(build: Callable[[Any], Any], before: Any, after: Any, first: int, more: int) -> Any:
    """A state that was saved with some weights; with others, the run goes on as if these had always been there."""
    with build(before) as loader:
        consumed = _keys(loader, first)
        state = loader.save_state_rank()
    with build(after) as loader:
        loader.restore_state_rank(state)
        rest = _keys(loader, more)
    with build(after) as loader:
        assert _keys(loader, first + more) == consumed + rest
    return state


def test_batches_by_tokens_go_on_with_other_stages_ahead(
    write_weights: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun there is a whole plan chunk: of it, no weight may change."""
    monkeypatch.setattr(WebdatasetSource, "column", lambda self, name: np.arange(len(self)) % 9 + 1, raising=False)

    def build(weights: Any) -> Any:
        return _loader(write_weights(*weights), None, batching=BestFit(Capacity(200)), chunk_size=BLOCK)

    state = _state_that_goes_on(build, ({0: 1, BLOCK: 3}, 1), ({0: 1, BLOCK: 1, 2 * BLOCK: 5}, 1), 10, 300)
    with build(({0: 1, 100: 3}, 1)) as loader, pytest.raises(StateMismatchError):
        loader.restore_state_rank(state)


def test_lanes_belong_to_all_stages(write_weights: WriteWeights) -> None:
    """How far the lanes of other ranks are, and so which stages began, nobody knows: none may change."""

    class Twice(TaskEncoder):
        @stateless
        def encode_sample(self, sample: Any) -> Any:
            yield sample
            yield sample

    def build(weights: Any) -> Any:
        return _loader(write_weights(*weights), 4, task_encoder=Twice())

    before, after = ({0: 1, 4096: 3}, 1), ({0: 1, 4096: 4}, 1)
    state = _state_that_goes_on(build, before, before, 10, 30)
    with build(after) as loader, pytest.raises(StateMismatchError):
        loader.restore_state_rank(state)


CONSTANT = (1, 1)
#: (weights when the state was saved, samples consumed by then, weights when it is restored)
ALLOWED: dict[str, tuple[Any, int, Any]] = {
    "a constant blend gets a stage ahead": (CONSTANT, 4000, ({0: 1, 4096: 2}, 1)),
    "the stage begins at once, at the end of a block": (CONSTANT, 8192, ({0: 1, 8192: 2}, 1)),
    "a stage ahead is taken away": (({0: 1, 4096: 2}, 1), 4096, CONSTANT),
    "weights ahead change": (({0: 1, 5000: 2}, 1), 5000, ({0: 1, 5000: 3}, 1)),
    "a stage ahead moves": (({0: 1, 5000: 2}, 1), 4096, ({0: 1, 6000: 2}, 1)),
    "a slope ahead": (({"linear": {0: 1, 5000: 1, 9000: 2}}, 1), 4000, ({"linear": {0: 1, 5000: 1, 7000: 4}}, 1)),
    "what comes after a slope changes": (RAMP, 24_000, ({"linear": {0: 0.9, 30_000: 0.1, 50_000: 1}}, RAMP[1])),
    "a data set comes in": (CONSTANT, 4000, (1, 1, {0: 0, 5000: 1})),
    "a data set that was to come in does not": ((1, 1, {0: 0, 5000: 1}), 4000, CONSTANT),
    "written in another way": (({0: 1, 100: 2}, 1), 4000, ({0: 2, 50: 2, 100: 4}, {0: 2})),
    "saved at the start": (({0: 1, 100: 2}, 1), 0, ({0: 1, 4096: 7}, 1)),
    "a data set is to leave, a block ahead": (CONSTANT, 4096, ({0: 1, 8192: 0}, 1)),
}
#: The message says what may be changed.
WORDS = r"weights from position 100:[\s\S]*up to the one that begins at position 100[\s\S]*stages ahead may be changed"
#: The same, and the stage that has to be named.
REFUSED: dict[str, tuple[Any, int, Any, str]] = {
    "weights of the past": (({0: 1, 100: 2}, 1), 104, ({0: 1, 100: 3}, 1), WORDS),
    "a past stage was taken away": (({0: 1, 100: 2}, 1), 104, CONSTANT, "weights from position 100:"),
    "a past stage was put in": (CONSTANT, 104, ({0: 1, 100: 2}, 1), "weights from position 100:"),
    "a past stage was moved": (({0: 1, 100: 2}, 1), 400, ({0: 1, 200: 2}, 1), "weights from position 200:"),
    "weights at the start": (({0: 1, 100: 2}, 1), 8, ({0: 3, 100: 2}, 1), "stage which began at position 0|data set 0"),
    "weights of a constant blend": (CONSTANT, 8, ({0: 3, 100: 2}, 1), "begins at position 0"),
    "the end of a slope": (RAMP, 8, LONGER, "position 0:"),
    "a stage that cuts a block which was begun": (CONSTANT, 4200, ({0: 1, 5000: 2}, 1), "up to 5000"),
    "a data set is to leave within the block": (CONSTANT, 4200, ({0: 1, 8192: 0}, 1), "up to 8192, without"),
    "a data set that came in was taken away": ((1, 1, {0: 0, 96: 1}), 104, CONSTANT, "number of data sets: 3"),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_may_be_edited(write_weights: WriteWeights, case: str) -> None:
    saved, samples, here = ALLOWED[case]
    state = _state(write_weights(*saved), samples)
    with _loader(write_weights(*here)) as loader:
        loader.restore_state_rank(state)
        after = _keys(loader, 20)
    whole = np.arange(samples + len(after))
    before, now = (
        _loader(write_weights(*weights)).dataset.plan.order.lookup(whole).rows() for weights in (saved, here)
    )
    assert before[:samples] == now[:samples]  # the past is the same by either document
    assert after == [f"{'abcdef'[leaf]}-{index}" for leaf, index, _ in now[samples:]]


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_not_be_edited(write_weights: WriteWeights, case: str) -> None:
    saved, samples, here, words = REFUSED[case]
    state = _state(write_weights(*saved), samples)
    with pytest.raises(StateMismatchError, match=words) as caught:
        _loader(write_weights(*here)).restore_state_rank(state)
    assert caught.value.fix


def test_a_data_set_that_comes_in_may_still_change(write_weights: WriteWeights, leaf_of: Any) -> None:
    document = write_weights(1, {0: 0, 2 * BLOCK: 1})
    state = _state(document, BLOCK)
    document["splits"]["train"]["blend"][1]["path"] = str(leaf_of(20, "b"))
    _loader(document).restore_state_rank(state)
    with pytest.raises(StateMismatchError, match="samples"):
        _loader(document).restore_state_rank(_state(write_weights(1, {0: 0, 8: 1}), 16))


def test_two_leaves_of_the_same_data_keep_their_keys(write_weights: WriteWeights) -> None:
    """The first of two has a key of its own: one that comes in must not be put before it."""
    document = write_weights(1, 1)
    state = _state(document, BLOCK)
    blend = document["splits"]["train"]["blend"]
    late = {**blend[0], "weight": {0: 0, 2 * BLOCK: 1}}
    _loader({"splits": {"train": {"blend": [*blend, late]}}}).restore_state_rank(state)
    with pytest.raises(StateMismatchError, match="number of data sets"):
        _loader({"splits": {"train": {"blend": [late, *blend]}}}).restore_state_rank(state)


def test_a_state_with_many_stages_is_small(write_weights: WriteWeights) -> None:
    many = {start: 1 + start % 3 for start in range(0, 1000)}
    state = _state(write_weights(many, 1), 8000)
    assert len(json.dumps(state)) < 2048
    _loader(write_weights(many, 1)).restore_state_rank(state)
    with pytest.raises(StateMismatchError, match="weights before position"):
        _loader(write_weights(many | {77: 9}, 1)).restore_state_rank(state)


def test_the_data_set_says_that_weights_change(write_weights: WriteWeights) -> None:
    text = str(_loader(write_weights(*RAMP)).dataset)
    assert "by weight in 2 stages" in text and "weight 0.9 at the start" in text
    text = str(_loader(write_weights({0: 3, 9: 3}, 1)).dataset)
    assert "stages" not in text and "weight 0.75" in text
    sloping, constant = (_loader(write_weights(*weights)).config()["settings"] for weights in (RAMP, (1, 1)))
    assert len(sloping) > len(constant)
