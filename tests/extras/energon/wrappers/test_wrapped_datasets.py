"""Data sets made of others: the items in the order that the wrappers say, cut anywhere, restored anywhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import (
    SkipSample,
    TaskEncoder,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_lite.errors import UsageError
from energon_lite.extras.energon import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    EpochizeDataset,
    FilterDataset,
    GroupBatchDataset,
    IterMapDataset,
    LimitDataset,
    MapDataset,
    MixBatchDataset,
    PackingDataset,
    RepeatDataset,
    ShuffleBufferDataset,
)
from tests.testing import examples


class Names(TaskEncoder):
    """Batches are the texts of their samples, with a number that was drawn for each."""

    def encode_sample(self, sample: Any) -> str:
        return f"{sample.text}:{self.rng.integers(100)}"

    def batch(self, samples: list[str]) -> list[str]:
        return samples

    def empty_batch(self, like: Any, rows: int) -> list[str]:
        return []


class PackedNames(Names):
    """Two samples a pack."""

    def select_samples_to_pack(self, samples: list[str]) -> list[list[str]]:
        return [samples[at : at + 2] for at in range(0, len(samples), 2)]

    def pack_selected_samples(self, samples: list[str]) -> str:
        return "+".join(samples)


def config(rank: int = 0, world: int = 1, workers: int = 0) -> WorkerConfig:
    return WorkerConfig(rank=rank, world_size=world, num_workers=workers)


def val(path: Path, wc: WorkerConfig, batch_size: int | None = 2, **more: Any) -> Any:
    return get_val_dataset(
        path, worker_config=wc, batch_size=batch_size, task_encoder=Names(), split_part="train", **more
    )


def train(path: Path, wc: WorkerConfig, batch_size: int | None = 2, **more: Any) -> Any:
    return get_train_dataset(path, worker_config=wc, batch_size=batch_size, task_encoder=Names(), **more)


def texts(items: list[Any]) -> list[list[str]]:
    """Without what was drawn."""
    return [[text.split(":")[0] for text in item] for item in items]


def first(dataset: Any, count: int) -> list[Any]:
    with get_savable_loader(dataset) as loader:
        found = []
        for item in loader:
            found.append(item)
            if len(found) == count:
                break
        return found


def everything(dataset: Any) -> list[Any]:
    with get_savable_loader(dataset) as loader:
        return list(loader)


@pytest.fixture
def a(leaf_of: Callable[..., Path]) -> Path:
    return leaf_of(5, "a")


@pytest.fixture
def b(leaf_of: Callable[..., Path]) -> Path:
    return leaf_of(6, "b")


def test_validation_as_megatron_lm_wraps_it(a: Path) -> None:
    wc = config()
    inner = val(a, wc)
    limited = LimitDataset(RepeatDataset(inner, worker_config=wc), length=4, worker_config=wc, reset_after_epoch=True)
    loader = get_loader(limited, worker_config=wc)
    one_pass = everything(inner)
    assert texts(list(loader)) == texts([*one_pass, *one_pass])[:4]
    assert list(loader) == list(loader)  # each evaluation sees the same
    assert len(limited) == len(loader) == 4


def test_a_repetition_has_no_end_and_a_fraction_ends_inside(a: Path) -> None:
    assert texts(first(RepeatDataset(val(a, config())), 7))[3] == texts(everything(val(a, config())))[0]
    assert len(everything(RepeatDataset(val(a, config(), None), repeats=1.5))) == 7
    assert len(everything(RepeatDataset(val(a, config()), repeats=2))) == 6


def test_one_after_the_other(a: Path, b: Path) -> None:
    wc = config()
    both = everything(ConcatDataset(val(a, wc), val(b, wc), worker_config=wc))
    assert both == [*everything(val(a, wc)), *everything(val(b, wc))]
    with pytest.raises(UsageError, match="never ends"):
        everything(ConcatDataset(train(a, wc), val(b, wc)))


def test_a_blend_keeps_its_weights_and_the_order_of_each(a: Path, b: Path) -> None:
    wc = config()
    one, other = train(a, wc, None), train(b, wc, None)
    mixed = first(BlendDataset((one, 3), (other, 1), worker_config=wc), 4096)
    of_one = [text for text in mixed if text.startswith("a")]
    assert abs(len(of_one) - 3072) <= 1
    assert of_one == first(one, len(of_one))


def test_a_blend_of_what_ends_goes_on_with_the_rest(a: Path, b: Path) -> None:
    wc = config()
    one, other = val(a, wc, None), val(b, wc, None)
    mixed = everything(BlendDataset((one, 5), (other, 1), worker_config=wc))
    assert sorted(mixed) == sorted([*everything(one), *everything(other)])
    assert [text for text in mixed if text[0] == "b"] == everything(other)
    assert sum(text[0] == "b" for text in mixed[:6]) <= 2
    endless = first(BlendDataset((one, 5), (train(b, wc, None), 1)), 40)
    assert sum(text[0] == "a" for text in endless) == 5


def test_epochs_go_on_where_the_last_ended(a: Path) -> None:
    loader = get_loader(EpochizeDataset(val(a, config()), 2))
    seen = [item for _ in range(3) for item in list(loader)]
    assert texts(seen) == texts(everything(val(a, config()))) * 2
    assert len(loader) == 2


def test_a_map_draws_the_same_for_the_same_item(a: Path) -> None:
    import random

    def noisy(batch: list[str]) -> list[str]:
        return [f"{text}/{random.random():.6f}" for text in batch]

    mapped = MapDataset(train(a, config()), noisy, worker_config=config())
    alone = first(mapped, 6)
    in_workers = first(MapDataset(train(a, config(workers=2)), noisy), 6)
    assert alone == in_workers and len({text for batch in alone for text in batch}) == 12


def test_what_a_filter_leaves_out_is_replaced_in_training(a: Path) -> None:
    kept = FilterDataset(train(a, config(), None), filter_fn=lambda text: not text.startswith("a-3"))
    loader = get_loader(kept)
    found = [item for item, _ in zip(loader, range(20), strict=False)]
    assert all(found) and not any(text.startswith("a-3") for text in found)
    unfiltered = first(train(a, config(), None), 20)
    assert all(one == other for one, other in zip(found, unfiltered, strict=True) if not other.startswith("a-3"))
    assert loader.stats()["skipped"] >= 4
    empty = everything(FilterDataset(val(a, config(), None), filter_fn=lambda text: not text.startswith("a-3")))
    assert len(empty) == 5 and empty.count(None) == 1


def test_nothing_gets_through(a: Path) -> None:
    def never(item: Any) -> Any:
        raise SkipSample("never")

    from energon_lite.errors import FatalSampleError

    with pytest.raises(FatalSampleError, match="in a row"):
        first(MapDataset(train(a, config()), never, failure_tolerance=7), 1)
    mapped = MapDataset(val(a, config(), None), lambda item: 1 / 0)
    assert everything(mapped) == [None] * 5


def test_batches_of_items(a: Path, b: Path) -> None:
    wc = config()
    batches = everything(BatchDataset(val(a, wc, None), 2, "+".join, worker_config=wc))
    assert batches == ["+".join(batch) for batch in everything(val(a, wc))]
    assert len(everything(BatchDataset(val(a, wc, None), 2, "+".join, drop_last=True))) == 2
    mixed = first(MixBatchDataset((train(a, wc, None), 1), (train(b, wc, None), 1), batch_size=4), 64)
    shares = Counter(text[0] for batch in mixed for text in batch)
    assert {len(batch) for batch in mixed} == {4} and abs(shares["a"] - shares["b"]) <= 20


def test_a_window_is_mixed(b: Path) -> None:
    wc = config()
    plain, mixed = everything(val(b, wc, None)), everything(ShuffleBufferDataset(val(b, wc, None), 3))
    assert mixed != plain and [sorted(mixed[:3]), sorted(mixed[3:])] == [plain[:3], plain[3:]]


def test_groups_and_packs_of_single_samples(a: Path, b: Path) -> None:
    wc = config()
    singles = val(b, wc, None)
    groups = everything(GroupBatchDataset(singles, None, lambda text: (int(text[2]) % 2, 2), list, worker_config=wc))
    assert Counter(len({int(text[2]) % 2 for text in group}) for group in groups) == {1: len(groups)}
    assert sorted(text for group in groups for text in group) == sorted(everything(singles))
    packs = everything(
        PackingDataset(singles, 4, lambda some: [some[:3], some[3:]], "+".join, sample_encoder=str.upper)
    )
    assert sorted("+".join(packs).split("+")) == sorted(text.upper() for text in everything(singles))
    grouped = GroupBatchDataset(singles, 2, lambda text: (int(text[2]) % 2, None), list)
    assert texts(everything(LimitDataset(RepeatDataset(grouped), 3))) == texts(everything(grouped))[:3]
    with pytest.raises(UsageError, match="ConcatDataset of a data set whose hooks"):
        everything(ConcatDataset(RepeatDataset(grouped), singles))
    for inner in (val(b, wc, None, limit=4), train(b, wc, None, virtual_epoch_length=4)):
        with pytest.raises(UsageError, match=r"GroupBatchDataset of a data set that counts single samples"):
            everything(GroupBatchDataset(inner, 2, lambda text: (0, None), list))
    with pytest.raises(UsageError, match=r"single samples|of batches"):
        everything(GroupBatchDataset(val(b, wc), 2, lambda item: (0, None), list))


def test_hooks_that_decide_can_be_repeated_and_limited(b: Path) -> None:
    wc = config()
    packed = get_val_dataset(
        b, worker_config=wc, batch_size=1, packing_buffer_size=4, task_encoder=PackedNames(), split_part="train"
    )
    one_pass = everything(packed)
    wrapped = LimitDataset(RepeatDataset(packed, worker_config=wc), length=7, worker_config=wc)
    loader = get_loader(wrapped)
    found = list(loader)
    assert len(found) == 7 and found == list(loader)
    seen = {text.split(":")[0] for batch in found for pack in batch for text in pack.split("+")}
    assert len(one_pass) == 3 and seen == {f"b-{n}" for n in range(6)}
    epochs = get_loader(EpochizeDataset(packed, 2))
    assert [len(list(epochs)) for _ in range(3)] == [2, 2, 2]


def test_what_cannot_be_planned_is_refused(a: Path) -> None:
    wc = config()
    with pytest.raises(UsageError, match="encode_sample"):
        IterMapDataset(val(a, wc), iter, worker_config=wc)

    def several(item: Any) -> Any:
        yield item

    with pytest.raises(UsageError, match="generator"):
        MapDataset(val(a, wc), several)
    with pytest.raises(UsageError, match="another worker_config"):
        LimitDataset(val(a, wc), 3, worker_config=config(0, 2))
    packed = get_val_dataset(
        a, worker_config=wc, batch_size=1, packing_buffer_size=4, task_encoder=PackedNames(), split_part="train"
    )
    with pytest.raises(UsageError, match="hooks or tokens decide"):
        everything(ConcatDataset(packed, val(a, wc)))


#: Wrapped data sets, by what they have to be restored on: any number of ranks, or the same.
TREES: dict[str, Callable[[Path, Path, WorkerConfig], Any]] = {
    "limited": lambda a, b, wc: LimitDataset(RepeatDataset(val(a, wc)), 12, worker_config=wc),
    "mixed": lambda a, b, wc: BlendDataset(
        (RepeatDataset(ConcatDataset(val(a, wc), val(b, wc))), 2), (MapDataset(train(b, wc), sorted), 1)
    ),
    "batched": lambda a, b, wc: MixBatchDataset((train(a, wc, None), 1), (train(b, wc, None), 3), batch_size=3),
    "nested": lambda a, b, wc: RepeatDataset(BatchDataset(ConcatDataset(val(a, wc, None), val(b, wc, None)), 4, tuple)),
    "filtered": lambda a, b, wc: FilterDataset(train(b, wc, None), filter_fn=lambda text: text[-1] != "3"),
}


@pytest.mark.parametrize("kind", TREES)
@given(cut=st.integers(0, 11), world=st.sampled_from([1, 2, 3]), after=st.sampled_from([1, 2, 4]))
@settings(max_examples=examples(6), deadline=None)
def test_cut_anywhere_and_restored_on_any_ranks(
    leaf_of: Callable[..., Path], kind: str, cut: int, world: int, after: int
) -> None:
    a, b = leaf_of(5, "a"), leaf_of(6, "b")

    def steps(ranks: int, count: int, state: Any = None) -> tuple[list[Any], Any]:
        loaders = [get_savable_loader(TREES[kind](a, b, config(rank, ranks))) for rank in range(ranks)]
        for loader in loaders:
            loader.restore_state_rank(state)
        running = [iter(loader) for loader in loaders]
        found = [next(one) for _ in range(count) for one in running]
        saved = [loader.save_state_rank() for loader in loaders]
        assert all(one == saved[0] for one in saved)
        return found, json.loads(json.dumps(saved[0]))

    whole, _ = steps(1, 12)
    whole = [json.loads(json.dumps(item)) for item in whole]
    before, state = steps(world, cut // world)
    count = (12 - len(before)) // after
    behind, _ = steps(after, count, state)
    found = [json.loads(json.dumps(item)) for item in [*before, *behind]]
    assert found == whole[: len(found)]
    assert len(json.dumps(state)) < 4096


def test_a_limit_inside_belongs_to_its_ranks(a: Path) -> None:
    from energon_lite.errors import StateMismatchError

    def tree(wc: WorkerConfig) -> Any:
        return RepeatDataset(LimitDataset(val(a, wc), 1, worker_config=wc))

    loader = get_savable_loader(tree(config(0, 2)))
    next(iter(loader))
    other = get_savable_loader(tree(config()))
    with pytest.raises(StateMismatchError, match="ranks: 2 in the state"):
        other.restore_state_rank(loader.save_state_rank())


def test_an_item_is_made_again_from_its_key(a: Path, b: Path) -> None:
    class Keyed(Names):
        def batch(self, samples: list[str]) -> Any:
            return {"__key__": samples, "__restore_key__": (), "texts": samples}

    wc = config()
    one, other = (get_train_dataset(path, worker_config=wc, batch_size=2, task_encoder=Keyed()) for path in (a, b))
    mixed = MapDataset(BlendDataset((one, 1), (other, 2)), lambda batch: {**batch, "n": len(batch["texts"])})
    loader = get_savable_loader(mixed)
    found = [batch for batch, _ in zip(loader, range(9), strict=False)]
    for batch in reversed(found):
        assert loader.restore_sample(json.loads(json.dumps(batch["__restore_key__"]))) == batch
    sources = loader.samples_at(4)
    assert {sample.dataset for sample in sources} <= {str(a), str(b)} and len(sources) == 2


@pytest.mark.slow
def test_workers_of_all_kinds(a: Path, b: Path) -> None:
    alone = first(TREES["mixed"](a, b, config()), 9)
    for method in ("fork", "spawn"):
        with get_savable_loader(TREES["mixed"](a, b, config(workers=2)), start_method=method) as loader:
            assert [item for item, _ in zip(loader, range(9), strict=False)] == alone
    with pytest.raises(UsageError, match="thread"):
        first_of = get_savable_loader(TREES["mixed"](a, b, config(workers=1)), start_method="thread")
        next(iter(first_of))
