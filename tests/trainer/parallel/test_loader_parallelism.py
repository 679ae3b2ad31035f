"""The loader on eight ranks, data parallel 2 x pipeline parallel 2 x tensor parallel 2: every way of saving and of
restoring that Energon documents, with plain torch.save and torch.load, and its documentation's layout of ranks.

    rank                    0     1     2     3     4     5     6     7
    data parallel           0     0     -     -     1     1     -     -
    data-parallel group     A     B     -     -     A     B     -     -
    pipeline parallel       0     0     1     1     0     0     1     1
    tensor parallel         0     1     0     1     0     1     0     1
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from energon_lite import SavableDataLoader, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.errors import StateError, StateMismatchError, TopologyError
from energon_lite.trainer import build_mesh

DATA_PARALLEL_RANK = [0, 0, None, None, 1, 1, None, None]
PIPELINE_PARALLEL_RANK = [0, 0, 1, 1, 0, 0, 1, 1]
TENSOR_PARALLEL_RANK = [0, 1, 0, 1, 0, 1, 0, 1]


def _groups(global_rank: int) -> Any:
    """The data-parallel group of this rank. Making a group is a collective: every rank makes every group."""
    group_a, group_b = dist.new_group(ranks=[0, 4]), dist.new_group(ranks=[1, 5])
    return {0: group_a, 4: group_a, 1: group_b, 5: group_b}.get(global_rank)


def _loader(path: str, worker_config: WorkerConfig) -> SavableDataLoader:
    return get_savable_loader(
        get_train_dataset(
            path, batch_size=4, shuffle_buffer_size=100, max_samples_per_sequence=100, worker_config=worker_config
        )
    )


def _keys(loader: SavableDataLoader, count: int) -> list[Any]:
    return [None if batch is None else batch.__key__ for _, batch in zip(range(count), loader, strict=False)]


@pytest.fixture
def blend(tmp_path: Path, leaf_of: Any) -> str:
    text = "splits:\n  train:\n    blend:\n" + "".join(
        f"      - {{path: {leaf_of(count, tag)}, weight: {weight}}}\n"
        for count, tag, weight in [(50, "a", 3), (30, "b", 1)]
    )
    path = tmp_path / "coyo-coco-dataset.yaml"
    path.write_text("__module__: megatron.energon\n__class__: MetadatasetV2\n" + text)
    return str(path)


def test_every_documented_way_of_saving_and_restoring(blend: str, run_ranks: Any, tmp_path: Path) -> None:
    def rank(global_rank: int) -> dict[str, Any]:
        data_parallel_rank = DATA_PARALLEL_RANK[global_rank]
        tensor_parallel_rank = TENSOR_PARALLEL_RANK[global_rank]
        data_parallel_group = _groups(global_rank)
        if data_parallel_rank is None:
            dist.barrier()
            return {}
        assert PIPELINE_PARALLEL_RANK[global_rank] == 0, "Only Pipeline Parallel ranks 0 load data"
        worker_config = WorkerConfig(
            rank=data_parallel_rank,
            world_size=dist.get_world_size(data_parallel_group),
            num_workers=3,
            data_parallel_group=data_parallel_group,
        )
        loader = _loader(blend, worker_config)
        before = _keys(loader, 10)
        if tensor_parallel_rank == 0:
            # Save the state only for the first TP rank: the other TP ranks have a copy of it.
            torch.save(loader.save_state_rank(), tmp_path / f"dataloader_rank{data_parallel_rank}.pt")
            # Alternatively, save once for the whole data-parallel group.
            state = loader.save_state_global(global_dst_rank=0)
            if state is not None:
                torch.save(state, tmp_path / "dataloader.pt")
            assert (state is not None) == (global_rank == 0)
        following = _keys(loader, 7)
        loader.close()
        dist.barrier()

        restored: dict[str, list[Any]] = {}

        def go_on(name: str, restore: Any) -> None:
            with _loader(blend, worker_config) as again:
                restore(again)
                restored[name] = _keys(again, 7)

        # E.g. load from disk as saved above.
        own_file = tmp_path / f"dataloader_rank{data_parallel_rank}.pt"
        go_on("rank", lambda again: again.restore_state_rank(torch.load(own_file)))
        # Alternatively, load the global checkpoint from disk on every data-parallel rank,
        go_on("global", lambda again: again.restore_state_global(torch.load(tmp_path / "dataloader.pt")))
        # or load it only once for each data-parallel group.
        state = torch.load(tmp_path / "dataloader.pt") if data_parallel_rank == 0 else None
        go_on("global from 0", lambda again: again.restore_state_global(state, src_rank=0))
        state = torch.load(tmp_path / "dataloader.pt") if data_parallel_rank == 1 else None
        go_on("global from 1", lambda again: again.restore_state_global(state, src_rank=1))
        return {"before": before, "following": following, "restored": restored}

    results = run_ranks(8, rank)
    for tp0, tp1 in ((0, 1), (4, 5)):
        assert results[tp0]["before"] == results[tp1]["before"]
    assert results[0]["before"] != results[4]["before"]
    for global_rank in (0, 1, 4, 5):
        result = results[global_rank]
        assert len(result["restored"]) == 4
        for name, keys in result["restored"].items():
            assert keys == result["following"], (global_rank, name)


def test_with_a_mesh_each_rank_does_what_its_role_asks_for(blend: str, run_ranks: Any, tmp_path: Path) -> None:
    """Dimensions dp, pp, tp give the same layout of ranks; here every rank makes every call."""

    def rank(global_rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
        worker_config = WorkerConfig.from_mesh(mesh, num_workers=1)
        assert worker_config.loads_data == (DATA_PARALLEL_RANK[global_rank] is not None)
        assert worker_config.saves_state == (global_rank in (0, 4))
        with _loader(blend, worker_config) as loader:
            before = _keys(loader, 5)
            own = loader.save_state_rank()
            whole = loader.save_state_global(global_dst_rank=0)
            following = _keys(loader, 5)
            position = loader.state_dict()["position"]
        assert (own is not None) == worker_config.saves_state
        assert (whole is not None) == (global_rank == 0)
        if whole is not None:
            torch.save(whole, tmp_path / "state.pt")
        dist.barrier()
        after = []
        for state, kwargs in (
            (torch.load(tmp_path / "state.pt"), {}),
            (torch.load(tmp_path / "state.pt") if mesh.get_local_rank("dp") == 0 else None, {"src_rank": 0}),
        ):
            with _loader(blend, worker_config) as loader:
                loader.restore_state_global(state, **kwargs)
                after.append(_keys(loader, 5))
                assert loader.state_dict()["position"] == position
        return {"before": before, "following": following, "after": after, "dp": mesh.get_local_rank("dp")}

    results = run_ranks(8, rank)
    for global_rank, result in enumerate(results):
        if DATA_PARALLEL_RANK[global_rank] is None:
            assert result["before"] == result["following"] == [None] * 5
        else:
            peer = results[0 if result["dp"] == 0 else 4]
            assert result["before"] == peer["before"]
        assert result["after"] == [result["following"]] * 2


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


def test_the_default_config_reads_the_process_group(run_ranks: Any) -> None:
    alone = WorkerConfig.default_worker_config(2)
    assert (alone.rank, alone.world_size, alone.num_workers) == (0, 1, 2)

    def rank(_: int) -> int:
        dist.barrier()  # nobody leaves before all are connected
        return WorkerConfig.default_worker_config(0).rank

    assert run_ranks(3, rank) == [0, 1, 2]
