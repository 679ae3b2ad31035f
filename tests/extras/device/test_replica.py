"""Batches between the ranks of a model replica: loaded by one of them, or by each for itself."""

from __future__ import annotations

import itertools
import os
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from energon_lite import TaskEncoder, TextSample, WorkerConfig, get_savable_loader, get_train_dataset, stateless
from energon_lite.errors import TopologyError, UsageError, WorkerError
from energon_lite.extras.device.replica import batch_checksum, select_fields
from tests.testing import examples, take
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks


class Lengths(TaskEncoder):
    """A batch with tensors, an array, nested objects and plain fields; reports the process that made it."""

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        return {"__key__": sample.__key__, "tokens": torch.tensor(list(sample.text.encode())), "who": os.getpid()}

    @stateless
    def batch(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        collated = super().batch(samples)
        labels = [torch.roll(row, -1) for row in collated["tokens"]]
        return {**collated, "labels": labels, "array": np.arange(3), "note": ("text", None), "__restore_key__": ()}


def _loader(
    path: Path,
    mesh_shape: tuple[int, ...],
    encoder: Any,
    options: Any = None,
    check_peers: bool = True,
    skip_steps: Any = (),
    **roles: Any,
) -> Any:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("pp", "dp", "cp", "tp"))
    config = WorkerConfig.from_mesh(mesh, num_workers=0, **roles)
    order: dict[str, Any] = {"shuffle_buffer_size": None, "max_samples_per_sequence": None}
    dataset = get_train_dataset(
        path, batch_size=2, worker_config=config, task_encoder=encoder, **order | (options or {})
    )
    return get_savable_loader(dataset, check_peers=check_peers, skip_steps=skip_steps)


def _plain(batch: Any) -> Any:
    if batch is None:
        return None
    texts = [row.tolist() for row in batch["tokens"]] if "tokens" in batch else None
    return {**batch, "tokens": texts, "labels": [row.tolist() for row in batch["labels"]], "array": None}


SHAPES = [(1, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (2, 1, 1, 2), (2, 1, 2, 1), (3, 1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_broadcast_batches_are_those_that_each_rank_would_load(
    shape: tuple[int, ...], leaf_of: Any, run_ranks: RunRanks
) -> None:
    pp, _, cp, tp = shape
    world = int(np.prod(shape))
    leaf = leaf_of(9, "share")

    def rank_main(rank: int) -> Any:
        batches: dict[str, list[Any]] = {}
        for stages, share in itertools.product(["first", "ends", "all"], ["load", "broadcast"]):
            with _loader(leaf, shape, Lengths(), share=share, stages=stages) as loader:
                batches.setdefault(stages, []).append([_plain(b) for _, b in zip(range(6), loader, strict=False)])
        return os.getpid(), batches

    results = run_ranks(world, rank_main)
    per_stage, replica = world // pp, cp * tp
    for stages, fed in {"first": {0}, "ends": {0, pp - 1}, "all": set(range(pp))}.items():
        for rank, (pid, batches) in enumerate(results):
            loaded, received = batches[stages]
            if rank // per_stage not in fed:
                assert loaded == received == [None] * 6
                continue
            assert {batch["who"][0] for batch in loaded} == {pid}
            first_of_replica = rank % per_stage // replica * replica
            assert {batch["who"][0] for batch in received} == {results[first_of_replica][0]}, "one rank loads for all"
            for own, sent in zip(loaded, received, strict=True):
                assert {**own, "who": None} == {**sent, "who": None}


class Packs(Lengths):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [[sample] for sample in samples]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples[0]


def test_the_last_stage_gets_the_fields_it_needs(leaf_of: Any, run_ranks: RunRanks) -> None:
    """Also of packed samples."""
    packed: dict[str, Any] = {"packing_buffer_size": 4, "repeat": False}
    ways = [("load", Lengths(), {}), ("broadcast", Lengths(), {}), ("broadcast", Packs(), packed)]

    def rank_main(rank: int) -> Any:
        found = []
        for (share, encoder, options), check_peers in itertools.product(ways, (True, False)):
            roles = {"share": share, "stages": "ends", "last_stage_fields": ["labels"]}
            with _loader(leaf_of(9, "share"), (2, 1, 1, 1), encoder, options, check_peers, **roles) as loader:
                found += [sorted(batch) for batch in (loader if options else take(loader, 4))]
        return found

    first, last = run_ranks(2, rank_main)
    assert len(first) == len(last) >= 24
    assert all(names == ["__key__", "__restore_key__", "array", "labels", "note", "tokens", "who"] for names in first)
    assert all(names == ["__key__", "__restore_key__", "labels"] for names in last)


@pytest.mark.parametrize(("repeat", "epoch", "skip"), [(True, 0, ()), (False, 0, ()), (True, 6, [1, 4, 5, 7, 12])])
def test_ranks_that_only_receive_are_at_the_same_step(
    leaf_of: Any, repeat: bool, epoch: int, skip: list[int], run_ranks: RunRanks
) -> None:
    packed: dict[str, Any] = {"packing_buffer_size": 1, "repeat": repeat, "virtual_epoch_length": epoch}

    def rank_main(rank: int) -> Any:
        with _loader(leaf_of(9, "share"), (1, 2, 1, 2), Packs(), packed, skip_steps=skip, share="broadcast") as loader:
            steps = [loader.state_dict() for _ in range(3) for _, _ in zip(range(7), loader, strict=False)]
        return [[state[name] for name in ("pass_number", "position", "loop_start")] for state in steps]

    reads, *others = run_ranks(4, rank_main)
    assert others == [reads] * 3 and len(reads) == (13 if epoch else 21 if repeat else 15)


class FailsOnThird(Lengths):
    failure_tolerance = 1

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        if self.current_batch_index == 2:
            raise ValueError("no third batch")
        return batch


def test_an_error_of_the_loading_rank_ends_the_peers_too(leaf_of: Any, run_ranks: RunRanks) -> None:
    def rank_main(rank: int) -> Any:
        with _loader(leaf_of(9, "share"), (1, 1, 1, 3), FailsOnThird(), share="broadcast") as loader:
            with pytest.raises(Exception) as error:
                list(zip(range(6), loader, strict=False))
        return error.errisinstance(WorkerError), "".join(traceback.format_exception(error.value))

    (is_peer, text), *peers = run_ranks(3, rank_main)
    assert not is_peer and "no third batch" in text
    assert [is_peer for is_peer, _ in peers] == [True, True], "they saw a WorkerError, and did not hang"


def test_an_unknown_field_for_the_last_stage_is_named(leaf_of: Any, run_ranks: RunRanks) -> None:
    def rank_main(rank: int) -> Any:
        roles = {"share": "load", "stages": "ends", "last_stage_fields": ["label"]}
        with _loader(leaf_of(9, "share"), (2, 1, 1, 1), Lengths(), **roles) as loader:
            next(iter(loader))

    with pytest.raises(RankFailure, match=r"last_stage_fields names 'label'.*\n.*labels"):
        run_ranks(2, rank_main)


class DependsOnRank(Lengths):
    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        made = super().encode_sample(sample)
        return {**made, "tokens": made["tokens"] + torch.distributed.get_rank()}


def test_peers_that_load_different_batches_are_found(leaf_of: Any, run_ranks: RunRanks) -> None:
    def rank_main(rank: int) -> Any:
        with _loader(leaf_of(9, "share"), (1, 1, 1, 2), DependsOnRank()) as loader:
            next(iter(loader))

    with pytest.raises(RankFailure, match="peers along tp have different batches"):
        run_ranks(2, rank_main)


@pytest.mark.parametrize("argument", ["share", "stages"])
def test_unknown_roles_are_refused(argument: str, run_ranks: RunRanks) -> None:
    def rank_main(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(UsageError, match=f"{argument} is 'some'"):
            WorkerConfig.from_mesh(mesh, **{argument: "some"})

    run_ranks(2, rank_main)


@settings(max_examples=examples(30))
@given(st.lists(st.integers(0, 255), min_size=1, max_size=20), st.data())
def test_the_checksum_sees_every_change(values: list[int], data: st.DataObject) -> None:
    batch = {"x": torch.tensor(values), "rest": [torch.zeros(2)]}
    place = data.draw(st.integers(0, len(values) - 1))
    changed = {**batch, "x": batch["x"].clone()}
    changed["x"][place] += 1
    assert batch_checksum(batch) == batch_checksum({**batch, "x": batch["x"].clone()})
    assert batch_checksum(batch) != batch_checksum(changed)
    assert batch_checksum(batch) != batch_checksum({**batch, "x": batch["x"].reshape(1, -1)})
    assert batch_checksum(batch) != batch_checksum({**batch, "x": batch["x"].int()})
    assert batch_checksum(batch) != batch_checksum({**batch, "__restore_key__": (1,)})


def test_fields_of_a_batch_without_fields() -> None:
    with pytest.raises(TopologyError, match="make batches dicts"):
        select_fields([torch.ones(1)], ("labels",))
