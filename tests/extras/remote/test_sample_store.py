"""A store of samples changes no batch, whatever happens to its disk and its bucket; and spares the work where it can.

Its files are those of ``test_range_cache.py``, where they are damaged and their writers killed.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import TaskEncoder, WorkerConfig, get_train_dataset, stateless
from energon_lite.errors import DatasetError, FatalSampleError, UsageError
from energon_lite.extras.remote import SampleStore, checked_bucket
from energon_lite.extras.remote.sample_store import ComingUses
from energon_lite.order.orders import BlendOrder, ConcatOrder, EpochBlendOrder, Rebase
from energon_lite.order.shuffle import LeafOrder
from tests.accidents import forked
from tests.core.laws import oracle
from tests.core.laws.sources import write_data
from tests.extras.remote.store_runs import LARGE, Encoder, Plain, store_in
from tests.extras.remote.stored_files import files_in, objects, size_of
from tests.testing import ALONE, alone, batches_of, examples, same, val_loader


def test_random_pipelines_are_the_same_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_data(tmp_path / "data")
    make = oracle.get_savable_loader
    store = store_in(tmp_path, checked=7)
    monkeypatch.setattr(oracle, "get_savable_loader", lambda *of, **more: make(*of, sample_store=store, **more))
    count = examples(4)
    for seed in range(300, 300 + count):
        for _ in range(2):
            outcome, why = oracle.outcome_of(seed, root)
            assert outcome != "DIFFERENT", why
    assert files_in(tmp_path / "store")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_epoch_makes_only_what_depends_on_it(
    run: Callable[..., Any], made: Callable[..., int], tmp_path: Path, workers: int
) -> None:
    _, calls = run(None)
    assert calls > 80
    store, config = store_in(tmp_path, checked=0), alone(workers)
    assert made(store, worker_config=config) <= calls - 20 or workers  # workers read ahead
    # The sample that is left out, in each of three epochs, and what is read ahead.
    assert made(store_in(tmp_path, checked=0), worker_config=config) <= 3 + 9 * workers
    draws = sum(number % 4 in (1, 2) or number % 8 == 3 for number in range(32))
    calls = made(store_in(tmp_path, checked=0), worker_config=config, batch_size=5, count=6)
    assert 0 < calls <= draws + 2 + 15 * workers


def test_hits_are_counted(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    how: dict[str, Any] = {"batch_size": 4, "task_encoder": Encoder(tmp_path / "calls")}
    for hits in (0, 31):
        with val_loader(leaf_of(32), sample_store=store_in(tmp_path), **how) as loader:
            assert len(list(loader)) == 8
            assert loader.stats()["cache"]["stored_samples"] == hits


def test_ranks_share_samples_without_messages(tmp_path: Path, leaf_of: Callable[..., Path]) -> None:
    """Each finds in its second epoch what others have made in the first, and no socket is made."""
    leaf, calls = leaf_of(32), tmp_path / "calls"

    def batches(rank: int, count: int, store: SampleStore | None) -> list[Any]:
        arguments: dict[str, Any] = {"worker_config": WorkerConfig(rank, 2), "task_encoder": Plain(calls)}
        return batches_of(get_train_dataset(leaf, batch_size=4, **arguments), count, sample_store=store)

    def made(count: int) -> int:
        """How many samples are made by two ranks at the same time."""
        calls.write_text("")

        def rank_of(rank: int) -> None:
            sys.addaudithook(lambda event, _: os._exit(2) if event.startswith("socket.") else None)
            assert same(batches(rank, count, store_in(tmp_path, checked=0)), expected[rank][:count])

        children = [forked(partial(rank_of, rank)) for rank in range(2)]
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
        return len(calls.read_text().split())

    expected = [batches(rank, 8, None) for rank in range(2)]
    assert made(4) == 32
    assert made(8) == 0


@pytest.mark.parametrize("other", [{"version": "2"}, {}])
def test_other_hooks_have_other_samples(run: Callable[..., Any], tmp_path: Path, other: dict[str, Any]) -> None:
    encoder = Encoder(tmp_path / "calls", salt=0 if other else 5)
    expected, _ = run(None, task_encoder=encoder, count=7)  # less than an epoch
    run(store_in(tmp_path), count=8)
    found, calls = run(store_in(tmp_path, **other), task_encoder=encoder, count=7)
    assert repr(found) == repr(expected) and calls >= 28


class Unsteady(TaskEncoder):
    """Draws from a generator that is not its sample's."""

    def __init__(self) -> None:
        self.own = Random(time.monotonic_ns())

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        return {"__key__": sample.__key__, "drawn": self.own.random()}


def test_hooks_that_change_are_noticed(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    dataset = get_train_dataset(leaf_of(8), worker_config=ALONE, batch_size=4, task_encoder=Unsteady())
    with pytest.raises(FatalSampleError, match="another sample than the hooks make now"):
        batches_of(dataset, 8, sample_store=store_in(tmp_path, checked=5))


def test_a_full_folder_keeps_what_comes_next(
    made: Callable[..., int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path, max_bytes=4000, checked=0)
    assert made(store)
    kept = files_in(tmp_path / "store")
    assert len(kept) > 3 and size_of(kept) <= 4000
    for stray in (f".{kept[0].name}.1.2.3.tmp", ".nfs0001"):  # of a writer that was killed, of a machine that reads
        kept[0].with_name(stray).touch()
    assert made(store) < 80 and size_of(files_in(tmp_path / "store")) <= 4000
    assert caplog.text.count("is full; what is needed last is made each time") == 2  # once a loader
    # Samples of other hooks, which nobody uses any more, give way.
    assert made(store_in(tmp_path, max_bytes=4000, version="2"))
    assert not {*kept} <= {*files_in(tmp_path / "store")}


@pytest.mark.parametrize(("copies", "most"), [(1, 0.9), (-1, 0.7)])
def test_a_small_store_finds_what_comes_soon(
    run: Callable[..., Any], made: Callable[..., int], tmp_path: Path, copies: int, most: float
) -> None:
    """A store of 15 % that kept the first samples would find 13 % of all. If samples are drawn, more can be found."""
    encoder, count = Plain(tmp_path / "calls"), 8 * 128
    arguments: dict[str, Any] = {"task_encoder": encoder, "batch_size": 1, "samples": 128, "count": count}
    arguments["shuffle_over_epochs_multiplier"] = copies
    run(store_in(tmp_path), **arguments)
    whole = size_of(files_in(tmp_path / "store"))
    shutil.rmtree(tmp_path / "store")
    assert made(store_in(tmp_path, max_bytes=int(0.15 * whole), checked=0), **arguments) < most * count


def test_a_bucket_is_a_store(run: Callable[..., Any], made: Callable[..., int], memory: Any, bucket: str) -> None:
    _, most = run(None, count=8)
    store = SampleStore(bucket, max_bytes=LARGE, checked=2)
    assert made(store, count=8)
    there = objects()
    assert len(there) == 31  # one is left out
    assert made(store, count=8) <= 1 + 16 and objects() == there
    for name, contents in there.items():
        memory.pipe_file(name, contents[:-1] + bytes([contents[-1] ^ 1]))
    assert 32 <= made(store, count=8) <= most  # threads may have written some that are needed twice
    assert objects() == there


class Nothing(TaskEncoder):
    decoder = None


class Several(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        yield sample
        yield sample


@pytest.mark.parametrize(
    ("encoder", "why"), [(Nothing(), "makes anything of the samples"), (Several(), "any number of samples")]
)
def test_it_is_said_where_it_has_no_effect(
    run: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, encoder: TaskEncoder, why: str
) -> None:
    assert repr(run(store_in(tmp_path), task_encoder=encoder, count=4)) == repr(
        run(None, task_encoder=encoder, count=4)
    )
    assert why in caplog.text and not files_in(tmp_path / "store")


class Odd(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        return {"__key__": sample.__key__, "more": np.array([object()])}

    def batch(self, samples: list[Any]) -> Any:
        return samples


def test_samples_that_cannot_be_stored_are_made(
    run: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches, _ = run(store_in(tmp_path), task_encoder=Odd(), count=4)
    assert [sample["__key__"] for sample in batches[0]] == [
        sample["__key__"] for sample in run(None, task_encoder=Odd(), count=4)[0][0]
    ]
    assert caplog.text.count("are not stored: an array of object is not sent") == 1


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_bytes is 0"):
        store_in(tmp_path, max_bytes=0)
    with pytest.raises(UsageError, match="checked is -1"):
        store_in(tmp_path, checked=-1)


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_bucket_that_fails_is_told_once(
    made: Callable[..., int], bucket: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = checked_bucket.put_bytes

    def full(url: str, name: str, data: bytes) -> None:
        if data:
            raise DatasetError("no space is left there", where=url)
        put(url, name, data)

    monkeypatch.setattr(checked_bucket, "put_bytes", full)
    assert made(SampleStore(bucket, max_bytes=LARGE))
    assert caplog.text.count("no space is left there") == 1
    with pytest.raises(UsageError, match="nothing can be written"):
        made(SampleStore("http://127.0.0.1:9/samples", max_bytes=LARGE))


def test_a_full_disk_is_told_once(
    made: Callable[..., int], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert made(store_in(tmp_path))
    assert caplog.text.count("No space left on device") == 1
    assert not files_in(tmp_path / "store")


def test_a_disk_that_is_full_indeed(made: Callable[..., int], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk of 64 KiB, which root can make of memory: what it had room for is found."""
    (disk := tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root, and a system that lets it mount")
    try:
        arguments: dict[str, Any] = {"task_encoder": Plain(tmp_path / "calls"), "samples": 64, "count": 32}
        store = SampleStore(str(disk / "store"), max_bytes=LARGE, checked=0)
        first = made(store, **arguments)
        assert caplog.text.count("No space left on device") == 1
        assert 0 < made(store, **arguments) < first
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# -- what comes next ---------------------------------------------------------------------------------------------------


def orders() -> st.SearchStrategy[tuple[Any, list[int]]]:
    """Orders of all kinds, and the samples of their leaves."""
    lengths = st.lists(st.integers(1, 9), min_size=1, max_size=3)

    def made(lengths: list[int], kind: int, copies: int | None, key: int) -> tuple[Any, list[int]]:
        leaves = [LeafOrder(length, key + number, copies) for number, length in enumerate(lengths)]
        shares = [1.0 + number for number in range(len(lengths))]
        order: Any = ConcatOrder(lengths)
        if kind == 1:
            order = BlendOrder(leaves, shares, key)
        if kind == 2:
            order = EpochBlendOrder(leaves, shares, key)
        if kind == 3:
            order = BlendOrder(leaves, shares, key).rebased(
                Rebase(100, tuple(7 * number for number in range(len(leaves))))
            )
        return order, lengths

    return st.builds(made, lengths, st.integers(0, 3), st.sampled_from([1, 2, None]), st.integers(0, 99))


@settings(max_examples=examples(200))
@given(made=orders(), at=st.integers(0, 20_000), steps=st.lists(st.integers(0, 60), max_size=5))
def test_next_uses_are_those_of_the_order(made: tuple[Any, list[int]], at: int, steps: list[int]) -> None:
    order, lengths = made
    uses = ComingUses(order, lengths)
    end = order.bounds(0)[1] if isinstance(order, ConcatOrder) else sys.maxsize
    at = at % end if end < sys.maxsize else at + (100 if order.rebase else 0)
    for position in np.cumsum([at, *steps]):
        coming = order.lookup((position + np.arange(6 * sum(lengths))) % end)
        rows = list(zip(coming.leaf.tolist(), coming.index.tolist(), strict=True))
        far = uses.after(*coming.rows()[0])
        assert far == (rows.index(rows[0], 1) if far < math.inf else far)
        assert far < math.inf or rows[0] not in rows[1 : 2 * sum(lengths)]
        every = [(leaf, index) for leaf, length in enumerate(lengths) for index in range(length)]
        leaf, index = np.array(every).T
        epochs = np.array([coming.epoch[rows.index(sample)] if sample in rows else 0 for sample in every])
        expected = uses.of(leaf, index, np.full(len(leaf), -1))
        assert uses.of(leaf, index, epochs).tolist() == expected.tolist()
        assert set(uses.of(leaf, index, epochs + 1).tolist()) == {math.inf}
        for sample, distance in zip(every, expected.tolist(), strict=True):
            assert distance == (rows.index(sample) if distance < math.inf else distance)
            assert distance < math.inf or sample not in rows[: 2 * sum(lengths)]
