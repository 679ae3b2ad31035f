"""Law 6 where content decides: each sample is delivered or counted, and too many failures end the run."""

from __future__ import annotations

from typing import Any

import pytest

from energon_lite import TaskEncoder, get_loader, get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite.errors import FatalSampleError
from tests.core.laws.content_encoders import Content
from tests.testing import ALONE, alone


@pytest.mark.parametrize("remainder", [None, "keep", "drop"])
@pytest.mark.parametrize(
    "content",
    [
        Content(groups=3, skips=5, batch_size=3),
        Content(packing=7, skips=5, batch_size=2, late=True),
        Content(packing=7, skips=5, batch_size=None, pack_yields=True),
        Content(yields=True, skips=5, batch_size=2, batch_yields=True, encoded_yields=True),
    ],
    ids=["groups", "packs", "single packs", "generators"],
)
def test_what_all_loaders_of_a_pass_counted_adds_up(leaf_of: Any, content: Content, remainder: str | None) -> None:
    arguments: dict[str, Any] = {"chunk_size": 7, "chunk_remainder": remainder, "lanes": 2}

    def loader() -> Any:
        return get_savable_loader(
            get_val_dataset(leaf_of(32, "a"), worker_config=ALONE, **arguments, **content.arguments())
        )

    def counts(*loaders: Any) -> dict[str, int]:
        stats = [one.stats() for one in loaders]
        return {
            kind: sum(one[kind] for one in stats) for kind in ("batches", "samples", "skipped", "failed", "dropped")
        }

    whole = loader()
    length = len(list(whole))
    assert counts(whole)["skipped"] and (content.groups == 0 or remainder != "drop" or counts(whole)["dropped"])
    for cut in range(length + 1):
        first, second = loader(), loader()
        assert len([batch for _, batch in zip(range(cut), first, strict=False)]) == cut
        second.restore_state_rank(first.save_state_rank())
        iterator = iter(second)
        rest = [next(iterator) for _ in range(length - cut)]
        if cut < length:
            assert next(iterator, None) is None and len(rest) == length - cut
            assert counts(first, second) == counts(whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_chunks_that_give_nothing_end_the_run(leaf_of: Any, workers: int) -> None:
    class Nothing(TaskEncoder):
        failure_tolerance = 5

        def encode_sample(self, sample: Any) -> Any:
            yield from ()

    dataset = get_train_dataset(leaf_of(50, "a"), batch_size=2, task_encoder=Nothing(), worker_config=alone(workers))
    with get_loader(dataset) as loader, pytest.raises(FatalSampleError, match="5 chunks in a row did not give a"):
        next(iter(loader))


def test_failures_are_only_in_a_row_where_nothing_went_well_between(leaf_of: Any) -> None:
    class Half(TaskEncoder):
        failure_tolerance = 3

        def preencode_sample(self, sample: Any) -> Any:
            if int(sample.text.split("-")[1]) % 2:
                raise ValueError("odd")
            return sample

        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            return [samples]

        def pack_selected_samples(self, samples: list[Any]) -> Any:
            return {"__key__": "+".join(sample.text for sample in samples)}

    dataset = get_val_dataset(
        leaf_of(50, "a"), batch_size=1, packing_buffer_size=50, task_encoder=Half(), worker_config=ALONE
    )
    loader = get_loader(dataset)
    assert len(list(loader)) == 1 and loader.stats()["failed"] == 25


@pytest.mark.parametrize("hook", ["same size", "both", "neither", "no pair"])
def test_wrong_group_criteria_end_the_run(leaf_of: Any, hook: str) -> None:
    class Groups(TaskEncoder):
        def batch_group_criterion(self, sample: Any) -> Any:
            number = int(sample.text.split("-")[1])
            return {"same size": ("all", 1 + number), "both": ("all", 2), "neither": ("all", None), "no pair": 5}[hook]

    words = {
        "same size": "gave group 'all' batches of",
        "both": "let one of the two say it",
        "neither": "let one of the two say it",
        "no pair": "returned 5",
    }[hook]
    size = 2 if hook in ("both", "no pair") else None
    loader = get_loader(get_val_dataset(leaf_of(50, "a"), batch_size=size, task_encoder=Groups(), worker_config=ALONE))
    with pytest.raises(FatalSampleError, match=words):
        list(loader)
