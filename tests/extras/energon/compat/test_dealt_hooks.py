"""Validation under Energon's names has the batches of Energon's workers, rank by rank, in their order; also where hooks
decide what a batch is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon_lite.errors import StateMismatchError
from energon_lite.extras import energon as mine
from energon_lite.extras.energon.compat import loaders as compat
from energon_lite.extras.energon.compat.dealt_plan import DealtPlan, Shares
from energon_lite.extras.energon.compat.hooks import DefaultTaskEncoder
from energon_lite.order.orders import ConcatOrder
from tests.core.laws.content_encoders import Content
from tests.core.laws.kinds import contents
from tests.core.laws.oracle import on_ranks
from tests.testing import alone, examples, nightly_but, write_tar

energon = pytest.importorskip("megatron.energon")


def hooks_of(lib: Any, kind: str) -> dict[str, Any]:
    """Hooks by name, written for either library."""

    def encode_sample(self: Any, sample: Any) -> str:
        if "skip" in kind and int(sample.text[-2:]) % 7 == 3:
            raise lib.SkipSample("by chance")
        return str(sample.text)

    def yielding(self: Any, sample: Any) -> Iterator[str]:
        for part in range(int(sample.text[-1]) % 3):
            yield f"{sample.text}.{part}"

    def batch(self: Any, samples: list[Any]) -> list[str]:
        return samples

    def batch_group_criterion(self: Any, sample: str) -> tuple[int, int | None]:
        size = 2 + int(sample[3]) % 3 if "own sizes" in kind else None
        return int(sample[3]) % 3, size

    def select_samples_to_pack(self: Any, samples: list[str]) -> list[list[str]]:
        return [samples[at : at + 3] for at in range(0, len(samples), 3)]

    def pack_selected_samples(self: Any, samples: list[str]) -> str:
        return "+".join(samples)

    def several_packs(self: Any, samples: list[str]) -> Iterator[str]:
        for part in range(len(samples) % 3):
            yield f"({'+'.join(samples)}).{part}"

    def several_batches(self: Any, samples: list[str]) -> Iterator[list[str]]:
        for part in range(int(samples[0][3]) % 3):
            yield [*samples, str(part)]

    def postencode_sample(self: Any, sample: str) -> str:
        return sample

    first = lib.stateless(yielding if "yields" in kind else encode_sample)
    found = {"batch": lib.stateless(several_batches if "several batches" in kind else batch)}
    if "groups" in kind:
        found["batch_group_criterion"] = batch_group_criterion
    if "packs" in kind:
        pack = lib.stateless(several_packs if "several packs" in kind else pack_selected_samples)
        found |= {"preencode_sample": first, "postencode_sample": lib.stateless(postencode_sample)}
        found |= {"select_samples_to_pack": select_samples_to_pack, "pack_selected_samples": pack}
    else:
        found["encode_sample"] = first
    for name, function in found.items():
        function.__name__ = name  # Energon goes by it
    return found


def encoder(lib: Any, base: Any, kind: str) -> Any:
    return type("Encoder", (base,), hooks_of(lib, kind))()


def theirs(build: Callable[[Any], Any], rank: int, world: int, workers: int) -> list[Any]:
    """What a rank gets of Energon's loader: its workers take turns. Here each of them runs in this process."""
    from torch.utils.data import _utils

    of_workers = []
    for worker in range(max(workers, 1)):
        config = energon.WorkerConfig(rank=rank, world_size=world, num_workers=workers)
        dataset = build(config)
        if workers:
            _utils.worker._worker_info = SimpleNamespace(id=worker, num_workers=workers, seed=0, dataset=dataset)
        config.worker_activate(0)
        try:
            of_workers.append(list(dataset))
        finally:
            config.worker_deactivate()
            _utils.worker._worker_info = None
    turns = range(max(map(len, of_workers)))
    return [batches[turn] for turn in turns for batches in of_workers if turn < len(batches)]


def loader_of(path: Path, rank: int, world: int, workers: int, **arguments: Any) -> Any:
    config = mine.WorkerConfig(rank=rank, world_size=world, num_workers=workers)
    dataset = compat.get_val_dataset(str(path), worker_config=config, **{"split_part": "val", **arguments})
    return mine.get_savable_loader(dataset, start_method="main")  # workers change nothing else


def ours(path: Path, world: int, workers: int, **arguments: Any) -> list[list[Any]]:
    """The batches of each rank that have samples."""

    def work(rank: int) -> list[Any]:
        with loader_of(path, rank, world, workers, **arguments) as loader:
            return [batch for batch in loader if batch is not None and len(batch)]

    return on_ranks(world, work)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tools: Any) -> Path:
    root = tmp_path_factory.mktemp("dealt")
    for name, samples in (("a", 250), ("b", 93)):
        keys = [f"{name}{number:03d}" for number in range(samples)]
        for shard in range(3):
            own = keys[shard * samples // 3 : (shard + 1) * samples // 3]
            write_tar(root / name / f"s{shard}.tar", [(key, {"txt": key.encode()}) for key in own])
        options = ("--split-ratio", "0,1,0", "--sample-type", "TextSample", "--field-map", '{"text": "txt"}')
        tools.energon_prepare(root / name, *options)
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  val:\n    blend:\n"
    (root / "blend.yaml").write_text(head + "      - path: a\n      - path: b\n")
    return root


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("", {"batch_size": None}),
    ("", {"batch_size": 1}),
    ("", {"batch_size": 4}),
    ("groups", {"batch_size": 4}),
    ("groups with their own sizes", {"batch_size": None}),
    ("yields", {"batch_size": None}),
    ("yields", {"batch_size": 1}),
    ("yields", {"batch_size": 4}),
    ("yields groups", {"batch_size": 3}),
    ("several batches", {"batch_size": 4}),
    ("several packs", {"batch_size": 2, "packing_buffer_size": 6}),
    ("packs", {"batch_size": None, "packing_buffer_size": 6}),
    ("packs skip", {"batch_size": 2, "packing_buffer_size": 7}),
    ("packs yields", {"batch_size": 3, "packing_buffer_size": 6}),
    ("packs groups", {"batch_size": 2, "packing_buffer_size": 6}),
    ("packs yields", {"batch_size": 2, "packing_buffer_size": 200}),
]
#: Each kind of hooks on one number of ranks; on the other one at night.
CASES = [(kind, arguments, world) for kind, arguments in KINDS for world in (1, 2)]


@pytest.mark.parametrize(
    ("kind", "arguments", "world"),
    nightly_but({place for place in range(len(CASES)) if place % 4 in (1, 2)}, CASES),
    ids=lambda value: ", ".join(map(str, value.values())) if isinstance(value, dict) else str(value) or "plain",
)
def test_the_batches_of_each_rank_are_those_of_energon(
    data: Path, kind: str, arguments: dict[str, Any], world: int
) -> None:
    for name, workers in (("a", 0), ("a", 2), ("blend.yaml", 1), ("blend.yaml", 3)):

        def build(config: Any, path: Path = data / name) -> Any:
            made = encoder(energon, energon.DefaultTaskEncoder, kind)
            return energon.get_val_dataset(str(path), worker_config=config, task_encoder=made, **arguments)

        wanted = [theirs(build, rank, world, workers) for rank in range(world)]
        made = encoder(mine, DefaultTaskEncoder, kind)
        assert ours(data / name, world, workers, task_encoder=made, **arguments) == wanted, (name, workers)


@pytest.mark.parametrize("kind", ["", "groups", "yields", "packs groups"])
def test_limited_and_repeated_validation_is_that_of_energon(data: Path, kind: str) -> None:
    options: dict[str, Any] = {"batch_size": 4, "packing_buffer_size": 6 if "packs" in kind else None}

    def wrapped(lib: Any, dataset: Any, repeats: bool, length: int) -> Any:
        config = dataset.worker_config
        dataset = lib.RepeatDataset(dataset, worker_config=config) if repeats else dataset
        return lib.LimitDataset(dataset, length=length, worker_config=config, reset_after_epoch=True)

    # With several workers, each of Energon's repeats its own share: their passes end at different times.
    for workers, repeats, length in ((0, True, 150), (1, True, 150), (2, True, 11), (3, False, 11), (2, False, 500)):

        def build(config: Any, repeats: bool = repeats, length: int = length) -> Any:
            made = encoder(energon, energon.DefaultTaskEncoder, kind)
            one = energon.get_val_dataset(str(data / "a"), worker_config=config, task_encoder=made, **options)
            return wrapped(energon, one, repeats, length)

        config = alone(workers)
        made = encoder(mine, DefaultTaskEncoder, kind)
        one = compat.get_val_dataset(str(data / "a"), worker_config=config, task_encoder=made, **options)
        dataset = wrapped(mine, one, repeats, length)
        with mine.get_loader(dataset, start_method="main") as loader:
            wanted = theirs(build, 0, 1, workers)
            assert list(loader) == wanted == list(loader), (workers, repeats)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    content=contents | st.just(Content(batch_size=3)),
    workers=st.integers(1, 3),
    world=st.sampled_from([1, 2]),
    size=st.integers(4, 60),
    cut=st.integers(0, 20),
)
def test_it_goes_on_where_it_was_cut(
    leaf_of: Any, content: Content, workers: int, world: int, size: int, cut: int
) -> None:
    leaf = leaf_of(size, "a")

    def loader(rank: int, each: int = workers) -> Any:
        return loader_of(leaf, rank, world, each, split_part="train", **content.arguments())

    def begin(rank: int) -> Any:
        one = loader(rank)
        return list(islice(one, cut)), json.loads(json.dumps(one.save_state_rank()))

    whole = on_ranks(world, lambda rank: list(loader(rank)))
    begun = on_ranks(world, begin)

    def go_on(rank: int) -> Any:
        one = loader(rank)
        one.restore_state_rank(begun[rank][1])
        return list(one)

    rest = on_ranks(world, go_on)
    for (before, _), behind, every in zip(begun, rest, whole, strict=True):
        if len(before) < len(every):  # else the next pass has begun
            assert list(map(repr, before + behind)) == list(map(repr, every))
    for batch in whole[0]:
        if batch is not None and batch["__key__"]:
            assert repr(loader(0).restore_sample(batch["__restore_key__"])) == repr(batch)
    if whole[0]:
        with pytest.raises(StateMismatchError, match="dealt_to"):
            loader(0, workers + 1).restore_state_rank(begun[0][1])


def test_who_says_what_becomes_of_chunks_is_not_dealt_to(data: Path) -> None:
    made = encoder(mine, DefaultTaskEncoder, "yields")
    common: dict[str, Any] = {"worker_config": alone(2), "batch_size": 4, "task_encoder": made, "chunk_size": 16}
    one, other = (lib.get_val_dataset(str(data / "a"), **common) for lib in (compat, mine))
    assert one.identity.fingerprint == other.identity.fingerprint


# -- where a number of samples is a batch -----------------------------------------------------------------------------


@settings(max_examples=examples(25), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=3),
    batch_size=st.integers(1, 6),
    world=st.integers(1, 4),
    workers=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_shares_are_those_of_energon(
    lengths: list[int], batch_size: int, world: int, workers: int, drop_last: bool
) -> None:
    from megatron.energon.flavors.webdataset.sharder import Sharder

    expected: list[list[tuple[int, int, int]]] = []
    for rank in range(world):
        config = energon.WorkerConfig(rank=rank, world_size=world, num_workers=workers)
        shares: list[list[tuple[int, int, int]]] = [[] for _ in range(workers)]
        for leaf, length in enumerate(lengths):
            begun = sum(lengths[:leaf]) % (world * workers)
            edges = Sharder.split_samples_to_workers(0, length, config, rotation_offset=begun)
            for worker, share in enumerate(shares):
                share += [(leaf, index, 0) for index in range(edges[worker], edges[worker + 1])]
        own = [[share[at : at + batch_size] for at in range(0, len(share), batch_size)] for share in shares]
        own = [[one for one in some if not drop_last or len(one) == batch_size] for some in own]
        turns = range(max(map(len, own)))
        expected += [some[turn] for turn in turns for some in own if turn < len(some)]
    plan = DealtPlan(ConcatOrder(lengths), batch_size, drop_last, shares=Shares(tuple(lengths), world, workers))
    found = [list(batch) for batch in plan.batches([(number,) for number in range(plan.count(0) or 0)])]
    assert sorted(found) == sorted(expected)
    if world == 1:
        assert found == expected
    count = len(found)
    assert plan.batches([(count,), (count + 5,)]) == [[], []]
    assert [list(plan.batches([(number,)])[0]) for number in range(count)] == found
