"""Laws 2, 4, 5 and 6 where content decides: each sample once in a pass that ends, or counted; ranks in step; an
interrupt at any point loses nothing and repeats nothing; too many failures end the run."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import TaskEncoder
from energon_lite.errors import FatalSampleError, UnknownLengthError, UsageError
from energon_lite.loading.iterators import lane_cursor, lane_dataset, lane_iterator, lane_prefetcher
from tests.core.laws.content_encoders import Content
from tests.core.laws.naive_items import KINDS
from tests.core.laws.oracle import on_ranks
from tests.testing import errors_of, examples, same, take, train_loader, val_loader


def _grouped(get: Any, leaf_of: Any, **more: Any) -> Any:
    return get(leaf_of(20, "a"), **Content(groups=2).arguments(), **more)


def test_without_a_group_the_first_pass_says_what_to_do(leaf_of: Any) -> None:
    with pytest.raises(UsageError, match=r"(?s)no process group.*init_process_group.*world_size=1"):
        take(_grouped(val_loader, leaf_of, world_size=2), 1)


def test_a_rank_without_data_cannot_know_the_end(leaf_of: Any) -> None:
    ends, endless = (_grouped(get, leaf_of, world_size=2, loads_data=False) for get in (val_loader, train_loader))
    with pytest.raises(UsageError, match="loads no data cannot know"):
        take(ends, 1)
    assert take(endless, 3) == [None] * 3
    assert endless.state_dict()["cursors"] == [] and endless.state_dict()["position"] == 6


def test_the_length_is_not_known(leaf_of: Any) -> None:
    loader = _grouped(val_loader, leaf_of)
    with pytest.raises(UnknownLengthError, match=r"(?s)unknown until the hooks have run.*virtual_epoch_length"):
        len(loader)
    with pytest.raises(TypeError):
        len(loader)
    assert len(list(loader)) >= 7  # list() asks for the length, and can do without it
    loops = _grouped(train_loader, leaf_of, virtual_epoch_length=5)
    assert len(loops) == 5 and [len(list(loops)) for _ in range(3)] == [5, 5, 5]


def _passes(world: int, leaf: Any, workers: int = 0, **arguments: Any) -> list[list[Any]]:
    """The batches of a pass that each rank gets."""

    def work(rank: int) -> list[Any]:
        with val_loader(leaf, workers, rank=rank, world_size=world, **arguments) as loader:
            return list(loader)

    return on_ranks(world, work)


def test_an_error_on_one_rank_ends_the_loop_on_all(leaf_of: Any) -> None:
    class Breaks(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            if sample.text == "a-17":
                raise FatalSampleError("seventeen")
            yield sample

    words = _errors(3, leaf_of(60), batch_size=2, chunk_size=4, task_encoder=Breaks())
    assert sorted("seventeen" in word for word in words) == [False, False, True]


def _errors(world: int, leaf: Any, **arguments: Any) -> list[str]:
    """The errors of ranks of which one fails, the others because of that."""

    def work(rank: int) -> None:
        list(val_loader(leaf, rank=rank, world_size=world, **arguments))

    words = errors_of(on_ranks, world, FatalSampleError, work)
    assert sum("another rank of the data-parallel group failed" in word for word in words) == world - 1
    return words


@pytest.mark.parametrize("workers", [0, 2])
def test_empty_batches_look_like_the_others(leaf_of: Any, workers: int) -> None:
    class Echo(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            yield sample

    per_rank = _passes(2, leaf_of(9), workers, batch_size=2, chunk_size=6, task_encoder=Echo())
    assert [[batch.text for batch in batches] for batches in per_rank] == [
        [["a-0", "a-1"], ["a-2", "a-3"], ["a-4", "a-5"]],
        [["a-6", "a-7"], ["a-8"], []],
    ]
    assert per_rank[1][2].__restore_key__ == ("empty",)
    with val_loader(leaf_of(9), batch_size=2, chunk_size=6, task_encoder=Echo()) as loader:
        assert same(loader.restore_sample(["empty"]), per_rank[1][2])


class Halves(TaskEncoder):
    """Makes two batches of the samples for one; with ``tensors`` their names are told by nothing but a tensor."""

    tensors = False

    def batch(self, samples: list[Any]) -> Any:
        numbers = [int(sample.text.split("-")[1]) for sample in samples]
        for half in (numbers[::2], numbers[1::2]):
            if half and self.tensors:
                yield {"numbers": torch.tensor(half), "mean": torch.tensor(half).float().mean()}
            elif half:
                yield {"__key__": [f"a-{number}" for number in half], "numbers": half, "shape": (2, 3)}


class TensorHalves(Halves):
    tensors = True


@pytest.mark.parametrize("encoder", [Halves, TensorHalves])
@pytest.mark.parametrize("workers", [0, 2])
def test_empty_batches_of_hooks_that_yield_batches_are_empty(leaf_of: Any, encoder: Any, workers: int) -> None:
    found = _passes(2, leaf_of(13), workers, batch_size=3, chunk_size=9, task_encoder=encoder())
    per_rank = [[list(map(int, batch["numbers"])) for batch in batches] for batches in found]
    assert len(per_rank[0]) == len(per_rank[1]) and [] in per_rank[1]
    assert sorted(number for batches in per_rank for batch in batches for number in batch) == list(range(13))


@pytest.mark.parametrize("hook", ["encode_sample", "encode_batch"])
def test_a_batch_that_cannot_be_emptied_is_an_error_on_all_ranks(leaf_of: Any, hook: str) -> None:
    def sums(self: Any, samples: list[Any]) -> Any:
        return {"sum": sum(int(sample.text.split("-")[1]) for sample in samples)}

    def yields(self: Any, value: Any) -> Any:
        yield value

    encoder = type("Sums", (TaskEncoder,), {"batch": sums, hook: yields})()
    words = _errors(2, leaf_of(33), batch_size=3, chunk_size=24, task_encoder=encoder)
    assert sum("write empty_batch(self, like, rows)" in word for word in words) == 1


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
    def loader() -> Any:
        return val_loader(leaf_of(32), chunk_size=7, chunk_remainder=remainder, lanes=2, **content.arguments())

    def counts(*loaders: Any) -> dict[str, int]:
        stats = [one.stats() for one in loaders]
        return {kind: sum(one[kind] for one in stats) for kind in ("batches", *KINDS)}

    whole = loader()
    length = len(list(whole))
    assert counts(whole)["skipped"] and (content.groups == 0 or remainder != "drop" or counts(whole)["dropped"])
    for cut in range(length + 1):
        first, second = loader(), loader()
        assert len(take(first, cut)) == cut
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

    loader = train_loader(leaf_of(50), workers, batch_size=2, task_encoder=Nothing())
    with loader, pytest.raises(FatalSampleError, match="5 chunks in a row did not give a"):
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

    loader = val_loader(leaf_of(50), batch_size=1, packing_buffer_size=50, task_encoder=Half())
    assert len(list(loader)) == 1 and loader.stats()["failed"] == 25


@pytest.mark.parametrize(
    ("criterion", "size", "words"),
    [
        (lambda number: ("all", 1 + number), None, "gave group 'all' batches of"),
        (lambda number: ("all", 2), 2, "let one of the two say it"),
        (lambda number: ("all", None), None, "let one of the two say it"),
        (lambda number: 5, 2, "returned 5"),
        (lambda number: (torch.tensor(number % 2), None), 2, "returned .tensor"),
    ],
    ids=["same size", "both", "neither", "no pair", "tensor"],
)
def test_wrong_group_criteria_end_the_run(leaf_of: Any, criterion: Any, size: int | None, words: str) -> None:
    class Groups(TaskEncoder):
        def batch_group_criterion(self, sample: Any) -> Any:
            return criterion(int(sample.text.split("-")[1]))

    with pytest.raises(FatalSampleError, match=words):
        list(val_loader(leaf_of(50), batch_size=size, task_encoder=Groups()))


_FILES = {module.__file__ for module in (lane_iterator, lane_prefetcher, lane_dataset, lane_cursor)}


class Interrupts:
    """Raises KeyboardInterrupt between two instructions of the walk, after so many of them, again and again."""

    def __init__(self, gaps: list[int]):
        self._gaps, self._left, self.raised = list(gaps), 0, 0

    def __enter__(self) -> None:
        self._left = self._gaps.pop(0) if self._gaps else 1 << 60
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in _FILES:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._at

    def _at(self, frame: Any, event: str, argument: Any) -> Any:
        self._left -= event == "opcode"
        if self._left < 0:
            self.raised += 1
            raise KeyboardInterrupt
        return self._at


CONTENTS = {
    "yields": Content(yields=True, skips=9, batch_size=3),
    "packs": Content(packing=4, batch_size=2, late=True),
    "groups": Content(groups=2, batch_size=2),
    "cut": Content(batch_yields=True, batch_size=2),
}


@pytest.mark.parametrize("content", CONTENTS)
@settings(max_examples=examples(20))
@given(gaps=st.lists(st.integers(0, 300), min_size=8, max_size=30), ends=st.booleans())
def test_an_interrupt_at_any_point_loses_nothing(leaf_of: Any, content: str, gaps: list[int], ends: bool) -> None:
    def walk() -> Any:
        loader = val_loader if ends else train_loader
        return loader(leaf_of(40), chunk_size=8, lanes=3, **CONTENTS[content].arguments())._dataset_iterator

    calm, expected, count = walk(), list[Any](), 30
    while len(expected) < count and (result := calm.take()) is not None:
        calm.advance()
        expected.append((result.batch, calm.state()))

    shaken, found, interrupts = walk(), list[Any](), Interrupts(gaps)
    for _ in range(2 * count):
        before, batch = shaken.state()["position"], None
        try:
            with interrupts:
                result = shaken.take()
                if result is None:
                    break
                batch = result.batch
                shaken.advance()
        except KeyboardInterrupt:
            shaken.start_loop()  # as the next `for` does
        if shaken.state()["position"] != before and batch is not None:  # delivered: the place is behind it
            found.append((batch, shaken.state()))
        if len(found) == count:
            break
    assert interrupts.raised >= min(3, len(gaps))
    assert found == expected
