"""Limited and repeated passes over batches without numbers: examples, and what a limit needs of the ranks it goes on.

The oracle compares loops around loops of all kinds, cut and restored anywhere, with plain code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pytest

from energon_lite import WorkerConfig, get_savable_loader
from energon_lite.errors import StateError, TopologyError
from energon_lite.extras.energon import LimitDataset, RepeatDataset
from tests.core.laws.content_encoders import Content
from tests.core.laws.kinds import validation


def test_repetitions_go_on_on_other_ranks_and_limits_where_they_can_be_divided(on_ranks: Any, leaf_of: Any) -> None:
    inside = validation(leaf_of(30, "a"), chunk_size=5, lanes=6, **Content(groups=2).arguments())

    def items(world: int, steps: int, wrapped: Callable[[Any], Any], states: Any = None) -> tuple[list[Any], list[Any]]:
        def work(rank: int) -> Any:
            one = get_savable_loader(wrapped(inside(WorkerConfig(rank=rank, world_size=world))))
            if states is not None:
                one.restore_state_global(states)
            return [item["__key__"] for item in islice(one, steps)], one.save_state_rank()

        done = on_ranks(world, work)
        return [key for step in zip(*(keys for keys, _ in done), strict=True) for key in step if key], [
            state for _, state in done
        ]

    five, four = (partial(LimitDataset, length=length) for length in (5, 4))
    alone, _ = items(1, 40, RepeatDataset)
    for world, after in ((1, 3), (3, 2), (2, 6)):
        before, states = items(world, 9, RepeatDataset)
        behind, _ = items(after, 3, RepeatDataset, states)
        assert before + behind == alone[: len(before) + len(behind)]
    _, states = items(2, 2, five)
    assert len(items(1, 99, five, states)[0]) == 6  # of 10 micro-batches, 4 were delivered
    _, states = items(1, 1, four)
    with pytest.raises(TopologyError, match="3 micro-batches are left of a limit that began on 1 ranks"):
        items(2, 99, four, states)
    for loops in (None, [], [1, 1], ["no"], [-1]):
        with pytest.raises(StateError, match="the state is damaged: loops"):
            items(1, 99, four, [{**states[0], "loops": loops}])
