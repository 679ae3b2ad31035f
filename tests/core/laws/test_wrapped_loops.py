"""Limited and repeated passes over batches without numbers: examples, and what a limit needs of the ranks it goes on.

The oracle compares loops around loops of all kinds, cut and restored anywhere, with plain code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_val_dataset
from energon_lite.errors import StateError, TopologyError
from energon_lite.extras.energon import LimitDataset, RepeatDataset
from tests.core.laws.content_encoders import Content
from tests.core.laws.kinds import validation


class Several(TaskEncoder):
    """A generator, as validation of Megatron-LM's multimodal example has one."""

    def encode_sample(self, sample: Any) -> Iterator[str]:
        yield sample.text

    def batch(self, samples: list[str]) -> list[str]:
        return samples


@pytest.mark.parametrize("workers", [0, 2])
def test_five_batches_of_a_generator_are_five(leaf_of: Any, workers: int) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    one = get_val_dataset(leaf_of(18, "a"), worker_config=config, batch_size=4, task_encoder=Several())
    names = [f"a-{number}" for number in range(18)]
    batches = [names[at : at + 4] for at in range(0, 18, 4)]
    for dataset, wanted in (
        (LimitDataset(one, length=5), batches),
        (LimitDataset(one, length=3), batches[:3]),
        (LimitDataset(RepeatDataset(one), length=7), [*batches, *batches[:2]]),
        (RepeatDataset(one, repeats=2), batches * 2),
        (RepeatDataset(LimitDataset(one, 2), repeats=2), batches[:2] * 2),
    ):
        with get_savable_loader(dataset) as loader:
            assert list(loader) == wanted == list(loader), str(dataset)
    limited = get_val_dataset(leaf_of(18, "a"), worker_config=config, batch_size=4, task_encoder=Several(), limit=3)
    with get_savable_loader(limited) as loader:
        assert list(loader) == batches[:3] == list(loader)
    assert len(LimitDataset(RepeatDataset(one), length=7)) == 7
    assert RepeatDataset(one).is_endless and not LimitDataset(RepeatDataset(one), 7).is_endless


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
