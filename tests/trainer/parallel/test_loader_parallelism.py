"""The loader on eight ranks, data parallel 2 x pipeline parallel 2 x tensor parallel 2: every way of saving and of
restoring that Energon documents, with plain torch.save and torch.load, and its documentation's layout of ranks.

    rank                    0     1     2     3     4     5     6     7
    data parallel           0     0     -     -     1     1     -     -
    data-parallel group     A     B     -     -     A     B     -     -
    pipeline parallel       0     0     1     1     0     0     1     1
    tensor parallel         0     1     0     1     0     1     0     1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from energon_lite import (
    SavableDataLoader,
    TaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    pack_sequences,
    pad_sequences,
)
from energon_lite.batching import TokenSequence, count_loss_tokens
from energon_lite.errors import StateError, StateMismatchError, TopologyError
from energon_lite.trainer import build_mesh
from tests.conftest import blend_yaml
from tests.core.laws.token_data import dataset_of, length_of, tokens_of

DATA_PARALLEL_RANK = [0, 0, None, None, 1, 1, None, None]
TENSOR_PARALLEL_RANK = [0, 1, 0, 1, 0, 1, 0, 1]


def _by_groups(global_rank: int) -> WorkerConfig | None:
    """Only the first pipeline stage loads data. Making a group is a collective: every rank makes every group."""
    group_a, group_b = dist.new_group(ranks=[0, 4]), dist.new_group(ranks=[1, 5])
    group = {0: group_a, 4: group_a, 1: group_b, 5: group_b}.get(global_rank)
    rank = DATA_PARALLEL_RANK[global_rank]
    if rank is None:
        return None
    return WorkerConfig(rank=rank, world_size=2, num_workers=3, data_parallel_group=group)


def _by_mesh(global_rank: int) -> WorkerConfig:
    """Dimensions dp, pp, tp give the same layout of ranks; here every rank makes every call."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    config = WorkerConfig.from_mesh(mesh, num_workers=1)
    assert config.loads_data == (DATA_PARALLEL_RANK[global_rank] is not None)
    assert config.saves_state == (global_rank in (0, 4))
    return config


def _loader(path: str, worker_config: WorkerConfig) -> SavableDataLoader:
    given: Any = {"batch_size": 4, "shuffle_buffer_size": 100, "max_samples_per_sequence": 100}
    return get_savable_loader(get_train_dataset(path, worker_config=worker_config, **given))


def _keys(loader: SavableDataLoader, count: int) -> list[Any]:
    return [None if batch is None else batch.__key__ for _, batch in zip(range(count), loader, strict=False)]


@pytest.fixture
def blend(tmp_path: Path, leaf_of: Any) -> str:
    return str(blend_yaml(tmp_path / "coyo-coco-dataset.yaml", [(leaf_of(50, "a"), 3), (leaf_of(30, "b"), 1)]))


@pytest.mark.parametrize("config_of", [_by_groups, _by_mesh])
def test_every_documented_way_of_saving_and_restoring(
    blend: str, run_ranks: Any, tmp_path: Path, config_of: Callable[[int], WorkerConfig | None]
) -> None:
    def rank(global_rank: int) -> list[Any]:
        worker_config = config_of(global_rank)
        if worker_config is None:
            dist.barrier()
            return []
        data_rank, loads = worker_config.rank, worker_config.loads_data
        with _loader(blend, worker_config) as loader:
            before = _keys(loader, 10)
            # Save the state only for the first TP rank: the other TP ranks have a copy of it.
            if config_of is _by_mesh or TENSOR_PARALLEL_RANK[global_rank] == 0:
                own = loader.save_state_rank()
                assert (own is not None) == (global_rank in (0, 4))
                if own is not None:
                    torch.save(own, tmp_path / f"dataloader_rank{data_rank}.pt")
                # Alternatively, save once for the whole data-parallel group.
                state = loader.save_state_global(global_dst_rank=0)
                assert (state is not None) == (global_rank == 0)
                if state is not None:
                    torch.save(state, tmp_path / "dataloader.pt")
            following, position = _keys(loader, 7), loader.state_dict()["position"]
        dist.barrier()
        own, state = (torch.load(tmp_path / f"dataloader{name}.pt") for name in (f"_rank{data_rank}", ""))
        ways: dict[str, Callable[[SavableDataLoader], None]] = {
            # E.g. load from disk as saved above.
            "rank": lambda again: again.restore_state_rank(own),
            # Alternatively, load the global checkpoint from disk on every data-parallel rank,
            "global": lambda again: again.restore_state_global(state),
            # or load it only once for each data-parallel group.
            "from 0": lambda again: again.restore_state_global(state if data_rank == 0 else None, src_rank=0),
            "from 1": lambda again: again.restore_state_global(state if data_rank == 1 else None, src_rank=1),
        }
        for name, restore in ways.items():
            with _loader(blend, worker_config) as again:
                restore(again)
                assert _keys(again, 7) == following, (global_rank, name)
                assert again.state_dict()["position"] == position
        assert loads or before + following == [None] * 17
        return before

    results = run_ranks(8, rank)
    assert results[0] == results[1] != results[4] == results[5]


@pytest.mark.parametrize(
    ("sizes", "names"), [((4,), ("dp",)), ((2, 2), ("pp", "tp")), ((2, 2), ("cp", "tp")), ((2, 2), ("dp", "cp"))]
)
def test_meshes_without_some_dimensions(run_ranks: Any, sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    def rank(global_rank: int) -> tuple[int, int, bool, bool]:
        config = WorkerConfig.from_mesh(init_device_mesh("cpu", sizes, mesh_dim_names=names), num_workers=0)
        ours = build_mesh(**dict(zip(names, sizes, strict=True)), order="-".join(reversed(names)))
        same = WorkerConfig.from_mesh(ours, num_workers=0)
        for name in ("rank", "world_size", "loads_data", "saves_state"):
            assert getattr(same, name) == getattr(config, name), "the trainer's mesh means the same"
        return config.rank, config.world_size, config.loads_data, config.saves_state

    expected = {
        ("dp",): [(rank, 4, True, True) for rank in range(4)],
        ("pp", "tp"): [(0, 1, True, True), (0, 1, True, False), (0, 1, False, False), (0, 1, False, False)],
        ("cp", "tp"): [(0, 1, True, True)] + [(0, 1, True, False)] * 3,
        ("dp", "cp"): [(0, 2, True, True), (0, 2, True, False), (1, 2, True, True), (1, 2, True, False)],
    }
    assert run_ranks(4, rank) == expected[names]


def test_a_mesh_of_one_process_is_one_rank() -> None:
    assert WorkerConfig.from_mesh(build_mesh(), num_workers=2, seed_offset=5) == WorkerConfig(0, 1, 2, seed_offset=5)
    alone = WorkerConfig.default_worker_config(2)
    assert (alone.rank, alone.world_size, alone.num_workers) == (0, 1, 2)


def test_wrong_meshes_and_ranks_out_of_step_are_named(blend: str, run_ranks: Any) -> None:
    def rank(global_rank: int) -> list[str]:
        messages = []
        for names in (("dp", "expert"), None):
            with pytest.raises(TopologyError, match="mesh with dimensions") as caught:
                WorkerConfig.from_mesh(init_device_mesh("cpu", (1, 2), mesh_dim_names=names))
            messages.append(str(caught.value))
        config = WorkerConfig.default_worker_config(0)
        assert (config.rank, config.world_size) == (global_rank, 2)
        loader = _loader(blend, config)
        _keys(loader, 2 + global_rank)
        with pytest.raises(
            StateMismatchError, match="rank 0: pass 0, micro-batch 4\n    rank 1: pass 0, micro-batch 6"
        ):
            loader.save_state_global(global_dst_rank=0)
        with pytest.raises(TopologyError, match="src_rank 5 in a group of 2"):
            loader.restore_state_global(None, src_rank=5)
        # What is wrong on the one rank that has the state is told by all of them, and nobody waits.
        for wrong in (None, "state", [None], {"model": {1, 2}}):
            with pytest.raises(StateError, match="rank 0 of the group has no state to restore"):
                loader.restore_state_global(wrong if global_rank == 0 else None, src_rank=0)
        with pytest.raises(StateError, match="not a loader state"):
            loader.restore_state_global({"model": 1} if global_rank == 0 else None, src_rank=0)
        return messages

    for messages in run_ranks(2, rank):
        assert "pp, dp, cp, tp" in messages[0] and "without names" in messages[1]


def test_ranks_end_a_pass_together(run_ranks: Any, leaf_of: Callable[[int], Any]) -> None:
    """Lanes end at different steps: the ranks agree on each step by one small exchange, and nobody hangs."""
    path = leaf_of(50)

    def walk(rank: int) -> list[list[int]]:
        config = WorkerConfig(rank=rank, world_size=3, num_workers=0)
        return tokens_of(get_savable_loader(dataset_of(path, config, length_column=None, chunk_size=7, repeat=False)))

    found = run_ranks(3, walk)
    assert len({len(batches) for batches in found}) == 1
    assert any(not batch for batches in found for batch in batches)  # some rank has run out before the others
    tokens = sorted(token for batches in found for batch in batches for token in batch)
    assert tokens == [1000 * index + token for index in range(50) for token in range(length_of(index))]


class NoEmptyBatch(TaskEncoder):
    """How many samples there are is known when they are made; a rank that has none fails."""

    def encode_sample(self, sample: Any) -> Iterator[Any]:
        yield sample

    def empty_batch(self, like: Any, rows: int) -> Any:
        raise ValueError("not without samples")


@pytest.mark.parametrize("limit", [None, 2])
def test_a_rank_that_fails_in_the_last_step_of_a_pass(
    run_ranks: Any, leaf_of: Callable[[int], Any], limit: int | None
) -> None:
    """With a limit the other rank knows that this is the last step, and asks for nothing after it."""
    path = leaf_of(5)

    def walk(rank: int) -> str:
        config = WorkerConfig(rank=rank, world_size=2, num_workers=0)
        given: Any = {"worker_config": config, "task_encoder": NoEmptyBatch(), "batch_size": 2, "chunk_size": 2}
        try:
            return str(len(list(get_savable_loader(get_val_dataset(path, limit=limit, **given)))))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    first, second = run_ranks(2, walk)
    assert "not without samples" in second
    assert first == "2" if limit else "another rank of the data-parallel group failed" in first


# -- the loss tokens of a step, over micro-batches and ranks -----------------------------------------------------------


def sequence(length: int) -> TokenSequence:
    """So many tokens, of which the first does not count."""
    tokens, mask = torch.arange(length), torch.ones(length)
    mask[0] = 0.0
    return TokenSequence(__key__="", __restore_key__=(), tokens=tokens, labels=tokens, loss_mask=mask)


def test_loss_tokens_alone() -> None:
    batches = [pack_sequences([sequence(4), sequence(2)], pad=0), pad_sequences([sequence(7)], pad=0, multiple=4)]
    assert all(batch.global_loss_tokens is None for batch in batches)
    assert count_loss_tokens(batches) == 3 + 1 + 6
    assert [batch.global_loss_tokens for batch in batches] == [10.0, 10.0]
    assert count_loss_tokens([]) == 0


def test_the_same_gradient_on_any_number_of_ranks(run_ranks: Any) -> None:
    """A weight per position: the summed gradient of three ranks, one of which has nothing, is that of one."""
    lengths = [[2, 9], [5], []]

    def gradient(mine: list[int]) -> tuple[float, torch.Tensor]:
        weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
        batches = [pack_sequences([sequence(length)], pad=0) for length in mine]
        count_loss_tokens(batches)
        for batch in batches:
            losses = weight * batch.labels.double()
            ((losses * batch.loss_mask).sum() / batch.global_loss_tokens).backward()
        return batches[0].global_loss_tokens or 0.0 if batches else 0.0, (
            torch.zeros(1, dtype=torch.float64) if weight.grad is None else weight.grad
        )

    def rank(number: int) -> tuple[float, float]:
        count, grad = gradient(lengths[number])
        dist.all_reduce(grad)
        return count, grad.item()

    count, grad = gradient([length for mine in lengths for length in mine])
    found = run_ranks(3, rank)
    assert [one for one, _ in found] == [count, count, 0.0] and count == 1 + 8 + 4
    assert all(abs(one - grad.item()) < 1e-12 for _, one in found)
