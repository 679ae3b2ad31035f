"""Megatron-LM's loop, toy size, on CPU: killed and resumed on other ranks, each sees what one alone would have seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite.errors import TopologyError, UsageError
from energon_lite.extras.frameworks.megatron import data_iterators, worker_config
from tests.extras.frameworks.toy_megatron import LENGTH, Arguments, Layout, on_cpu, pretrain, seen
from tests.trainer.parallel.rank_processes import RankFailure, run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what is not installed beside it
    pytest.importorskip("megatron.core.parallel_state", reason="megatron-core is not installed", exc_type=ImportError)
    pytest.importorskip("megatron.core.models.gpt", exc_type=ImportError)  # once, for all forked ranks


class Tokens(TaskEncoder):
    """The bytes of a text, as what a GPT takes."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        data = torch.tensor(list(sample.text.encode()))[: LENGTH + 1] % 32
        data = torch.nn.functional.pad(data, (0, LENGTH + 1 - len(data)))
        fields = {"tokens": data[:-1], "labels": data[1:], "position_ids": torch.arange(LENGTH)}
        return {"__key__": sample.__key__, **fields}


class Packs(Tokens):
    """Two texts a pack: so hooks decide how many batches there are."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[at : at + 2] for at in range(0, len(samples), 2)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return {**samples[0], "__key__": "+".join(sample["__key__"] for sample in samples)}


Data = Callable[[Arguments, WorkerConfig], tuple[Any, Any]]


def fixed(leaf: Path, encoder: TaskEncoder, **options: Any) -> Data:
    """Training data, and validation data of which each evaluation is one pass."""

    def make(args: Arguments, config: WorkerConfig) -> tuple[Any, Any]:
        size = args.micro_batch_size
        train = get_train_dataset(leaf, batch_size=size, task_encoder=encoder, worker_config=config, **options)
        limit = args.eval_iters * args.micro_batches
        return train, get_val_dataset(leaf, batch_size=size, task_encoder=Tokens(), worker_config=config, limit=limit)

    return make


def run(make: Data, args: Arguments, **roles: Any) -> None:
    """``pretrain`` on the ranks of the layout."""

    def provider(samples: Sequence[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        config = worker_config(num_workers=args.num_workers, seed_offset=3, **roles)
        train, valid = make(args, config)
        return data_iterators(
            train, valid, micro_batch_size=args.micro_batch_size, progress=args, states=args.dataloader_save
        )

    provider.is_distributed = True  # type: ignore[attr-defined]
    run_ranks(args.layout.world, lambda rank: pretrain(provider, args), 120, folder=args.log)


def expected(make: Data, args: Arguments, count: int) -> list[list[str]]:
    """The keys of the first micro-batches, of one rank that has all of them to itself."""
    train, _ = make(replace(args, layout=Layout()), WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=3))
    with get_savable_loader(train) as loader:
        return [batch["__key__"] for _, batch in zip(range(count), loader, strict=False)]


def check(args: Arguments, micro_batches: Sequence[list[str]], iterations: range) -> None:
    """Every rank that takes batches has taken those of its data-parallel rank, each in its iteration."""
    layout, per_step = args.layout, args.global_batch_size // args.micro_batch_size
    lines = [line for line in seen(args.log) if line.kind == "train"]
    for rank in {(line.tp, line.cp, line.pp) for line in lines}:
        for dp in range(layout.dp):
            own = [line for line in lines if (line.tp, line.cp, line.pp) == rank and line.dp == dp]
            places = [
                (iteration, iteration * per_step + micro * layout.dp + dp)
                for iteration in iterations
                for micro in range(args.micro_batches)
            ]
            assert [(line.iteration, line.keys) for line in own] == [
                (iteration, micro_batches[number]) for iteration, number in places
            ], (rank, dp)
    ends = min(layout.pp * layout.vp, 2)
    assert len({(line.tp, line.cp, line.pp) for line in lines}) == layout.tp * layout.cp * ends


def folders(tmp_path: Path, layout: Layout, name: str, **options: Any) -> Arguments:
    log = tmp_path / name
    log.mkdir(parents=True)
    return Arguments(save=tmp_path, log=log, layout=layout, **options)


def cases() -> Iterator[Any]:
    """Layouts before and after, workers, and whether the state is saved; else the consumed samples say it all."""
    yield Layout(dp=2), Layout(dp=3), 0, True
    yield Layout(tp=2, pp=2), Layout(dp=2), 0, False
    yield Layout(dp=2, cp=2), Layout(pp=2), 1, True
    yield Layout(pp=2, vp=2), Layout(dp=3, pp=2, vp=2), 0, False
    for before, after in [
        (Layout(dp=2, tp=2, pp=2), Layout(dp=3, pp=3)),
        (Layout(dp=6), Layout(tp=2, pp=2, cp=2)),
        (Layout(dp=3, tp=2), Layout(dp=2, cp=2)),
    ]:
        for workers, saved in [(0, True), (2, False)]:
            yield pytest.param(before, after, workers, saved, marks=pytest.mark.slow)


@pytest.mark.parametrize(("before", "after", "workers", "saved"), [*cases()])
def test_killed_and_resumed_on_other_ranks(
    before: Layout, after: Layout, workers: int, saved: bool, tmp_path: Path, leaf_of: Callable[..., Path]
) -> None:
    make = fixed(leaf_of(31), Tokens())
    data = {"dataloader_save": tmp_path / "data" if saved else None, "num_workers": workers}
    first = folders(tmp_path, before, "first", die_at=5, **data)
    with pytest.raises(RankFailure, match="died without a word"):
        run(make, first)
    reference = expected(make, first, 36)
    check(first, reference, range(5))

    second = folders(tmp_path, after, "second", **data)
    run(make, second, **({"last_stage_fields": ["labels"]} if after.vp > 1 else {}))
    check(second, reference, range(4, 6))  # the newest checkpoint was that of iteration 4


def test_packs_go_on_on_other_ranks_from_the_saved_states(tmp_path: Path, leaf_of: Callable[..., Path]) -> None:
    make = fixed(leaf_of(31), Packs(), packing_buffer_size=6)
    data = {"dataloader_save": tmp_path / "data"}
    stale = tmp_path / "data/iter_0000004/mp_rank_00/train_dataloader_dprank005.pt"  # of another run, cut short
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"PK\x03\x04")
    first = folders(tmp_path, Layout(dp=2), "first", die_at=5, **data)
    with pytest.raises(RankFailure, match="died without a word"):
        run(make, first)
    reference = expected(make, first, 36)
    check(first, reference, range(5))
    second = folders(tmp_path, Layout(dp=1, pp=2), "second", **data)
    run(make, second)
    check(second, reference, range(4, 6))

    third = folders(tmp_path, Layout(dp=2), "third", train_iters=8)
    with pytest.raises(RankFailure, match="restore a state that was saved there"):
        run(make, third)


def test_validation_is_the_same_each_time_or_goes_on(tmp_path: Path, leaf_of: Callable[..., Path]) -> None:
    def rolling(args: Arguments, config: WorkerConfig) -> tuple[Any, Any]:
        options = {"batch_size": 2, "task_encoder": Tokens(), "worker_config": config}
        return get_train_dataset(leaf_of(31), **options), get_val_dataset(leaf_of(48), **options)

    def validated(make: Data, name: str, **options: Any) -> list[list[str]]:
        args = folders(tmp_path / name, Layout(dp=2), "log", **options)
        with pytest.raises(RankFailure):
            run(make, replace(args, die_at=5))
        run(make, replace(args, layout=Layout(dp=1)))
        lines = sorted((line for line in seen(args.log) if line.kind == "valid"), key=lambda line: line.iteration)
        return [sorted(key for line in lines if line.iteration == at for key in line.keys) for at in (3, 6)]

    each, other = validated(fixed(leaf_of(48), Tokens()), "fixed")
    assert each == other == sorted(f"a-{number}" for number in range(12))
    each, other = validated(rolling, "rolling")
    assert [each, other] == [sorted(f"a-{number}" for number in numbers) for numbers in (range(12), range(12, 24))]


ROLES = {
    "first": ("ends", False, {(0, 0, 0), (0, 1, 0), (2, 0, 0), (2, 1, 0)}),
    "all": ("all", True, {(pp, cp, tp) for pp in range(3) for cp in range(2) for tp in range(2)}),
}


@pytest.mark.parametrize("who", ROLES)
def test_ranks_without_data_get_none(who: str, tmp_path: Path, leaf_of: Callable[..., Path]) -> None:
    stages, all_ranks, loading = ROLES[who]
    layout = Layout(tp=2, pp=3, cp=2)

    def job(rank: int) -> Any:
        with on_cpu(layout) as groups:
            config = worker_config(num_workers=0, stages=stages, all_tensor_ranks=all_ranks, seed_offset=9)  # type: ignore[arg-type]
            data = get_train_dataset(leaf_of(31), batch_size=2, worker_config=config)
            train, valid, test = data_iterators(data, [data, data], data, micro_batch_size=2)
            assert [valid is None, test is None] == [False, train is None]
            assert [one is None for one in valid] == [train is None] * 2
            assert config.seed_offset == 9
            place = groups.get_pipeline_model_parallel_rank(), groups.get_context_parallel_rank()
            return (*place, groups.get_tensor_model_parallel_rank()), train is not None, config.saves_state

    found = run_ranks(layout.world, job, 60, folder=tmp_path)
    assert {place for place, loads, _ in found if loads} == loading
    assert [place for place, _, saves in found if saves] == [(0, 0, 0)]


def test_wrong_calls_are_named() -> None:
    with pytest.raises(UsageError, match="stages is 'last'"):
        worker_config(stages="last")  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match="not there yet"):
        worker_config()
