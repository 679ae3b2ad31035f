"""Who encodes which image: every image once, sent and returned by lists that fit together, with even work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import TopologyError, UsageError
from energon_lite.extras.balance.shared_images import EncoderPlan
from tests.testing import examples


def travelled(plan: EncoderPlan, images: np.ndarray) -> list[list[int]]:
    """What each rank has when all images went there and came back, by the lists alone."""
    own = [images[plan.owner == rank].tolist() for rank in range(plan.ranks)]
    there = [
        [own[rank][image] for rank in range(plan.ranks) for image in plan.send(rank)[to]] for to in range(plan.ranks)
    ]
    for rank in range(plan.ranks):
        assert there[rank] == images[plan.encoded(rank)].tolist()
        assert [len(plan.send(one)[rank]) for one in range(plan.ranks)] == plan.receive(rank)
    back = []
    for rank in range(plan.ranks):
        came = [there[one][place] for one in range(plan.ranks) for place in plan.give_back(one)[rank]]
        back.append([came[place] for place in plan.order_back(rank)])
    return back


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2**40)), max_size=60), st.integers(6, 9))
def test_each_image_goes_there_and_back(values: list[tuple[int, int]], ranks: int) -> None:
    values.sort(key=lambda one: one[0])
    owner, costs = (np.array([one[i] for one in values], dtype=np.int64) for i in (0, 1))
    plan = EncoderPlan.of(owner, costs, ranks)
    numbers = np.arange(len(values)) + 100
    assert travelled(plan, numbers) == [numbers[owner == rank].tolist() for rank in range(ranks)]
    assert plan.loads(costs).sum() == costs.sum()
    # Graham's bound for the longest first, and the one part in fifty by which less is sent.
    most = max(int(costs.max(initial=0)), -(-int(costs.sum()) // ranks))
    assert plan.loads(costs).max() <= max(1.02 * most + 1, 4 / 3 * most + 1)
    assert EncoderPlan.of(owner, costs, ranks).encoder.tolist() == plan.encoder.tolist()


def test_what_is_even_stays() -> None:
    owner = np.repeat(np.arange(4), 5)
    plan = EncoderPlan.of(owner, np.full(20, 7), 4)
    assert plan.encoder.tolist() == owner.tolist()


def test_images_of_one_rank_are_for_all() -> None:
    costs = np.random.default_rng(0).lognormal(8, 1, 400).astype(np.int64)
    plan = EncoderPlan.of(np.zeros(400, dtype=np.int64), costs, 8)
    loads = plan.loads(costs)
    assert loads.mean() > 0.97 * loads.max()


def test_owners_that_are_no_ranks() -> None:
    with pytest.raises(TopologyError, match="images of ranks 0 to 2, of 2"):
        EncoderPlan.of(np.array([0, 2]), np.array([1, 1]), 2)


@pytest.mark.parametrize("costs", [[3], [3, 4, 5], [3, -1], [0.5, 2.5], [[3], [4]]])
def test_costs_that_are_none_of_these_images(costs: object) -> None:
    with pytest.raises(UsageError, match="for 2 images"):
        EncoderPlan.of(np.array([0, 1]), np.array(costs), 2)
