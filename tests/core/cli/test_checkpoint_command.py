"""``energon-lite checkpoint``: info, merge, redist, rebase on files as users have them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import TaskEncoder
from energon_lite.extras.energon.commands import _numbered_names
from energon_lite.loading.saved_states import merged, redistributed
from tests.conftest import blend_yaml
from tests.testing import invoke, output_of, refusal_of, take, train_loader


class Pairs(TaskEncoder):
    """Packs two samples each."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[first : first + 2] for first in range(0, len(samples), 2)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return {"__key__": [sample.__key__ for sample in samples]}

    def batch(self, samples: list[Any]) -> Any:
        return {"__key__": [key for sample in samples for key in sample["__key__"]]}


done, refused = partial(output_of, "checkpoint"), partial(refusal_of, "checkpoint")


def packed(leaf: Any, **arguments: Any) -> Any:
    return train_loader(leaf, batch_size=2, packing_buffer_size=8, chunk_size=8, task_encoder=Pairs(), **arguments)


def state_after(loader: Any, steps: int) -> Any:
    take(loader, steps)
    return loader.save_state_rank()


def saved_by_ranks(folder: Path, leaf: Any, world: int, steps: int, suffix: str = ".pt") -> list[str]:
    """Files of all ranks."""
    folder.mkdir()
    paths = [folder / f"rank{rank}{suffix}" for rank in range(world)]
    for rank, path in enumerate(paths):
        state = state_after(packed(leaf, rank=rank, world_size=world, lanes=world), steps)
        torch.save(state, path) if suffix == ".pt" else path.write_text(json.dumps(state))
    return [*map(str, paths)]


def planned(path: Any, **arguments: Any) -> Any:
    return train_loader(path, **{"batch_size": 4, "seed_offset": 7, **arguments})


def planned_state(path: Any, steps: int, **arguments: Any) -> Any:
    return state_after(planned(path, **arguments), steps)


def test_info_of_a_planned_run_in_a_checkpoint(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    state = planned_state(leaf_of(50), 6)
    torch.save({"step": 6, "model": {"w": torch.zeros(4)}, "loader": state}, tmp_path / "c.pt")
    output = " ".join(done("info", tmp_path / "c.pt").split())
    for words in (
        f"{tmp_path}/c.pt['loader']",
        "planned batches (format version 1)",
        "pass 0, micro-batch 6 over all ranks",
        "6 micro-batches, 24 samples",
        "world sizes any",
        "batch sizes 1, 2, 3, 4, 6, 8, 12, 24",
        "1, with 50 samples",
        state["identity"]["fingerprint"],
        "seed: 7",
    ):
        assert words in output
    (found,) = json.loads(done("info", "--json", tmp_path / "c.pt"))["runs"]
    assert found["samples_delivered"] == 24 and found["world_sizes"] is None and found["settings"]["batch_size"] == 4


def test_info_of_a_run_of_single_samples(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    torch.save(planned_state(leaf_of(50), 6, batch_size=None), tmp_path / "c.pt")
    (found,) = json.loads(done("info", "--json", tmp_path / "c.pt"))["runs"]
    assert found["batches_delivered"] == found["samples_delivered"] == 6


def test_ranks_are_merged_and_dealt_again(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    leaf = leaf_of(50)
    paths = saved_by_ranks(tmp_path / "six", leaf, 6, 3)
    output = done("info", *paths)
    assert "and 5 more" in output and "1, 2, 3, 6\n" in output and "18 micro-batches" in output
    assert done("info", tmp_path / "six").splitlines()[1:] == output.splitlines()[1:]
    assert "the states of other ranks have 5 of them: 0, 1, 3, 4, 5" in done("info", paths[2])

    assert "6 states at pass 0, micro-batch 18" in done("merge", *paths, "-o", tmp_path / "all.msgpack")
    done("redist", tmp_path / "all.msgpack", "--ranks", 2, "-o", tmp_path / "two")
    assert sorted(os.listdir(tmp_path / "two")) == ["loader_rank0.msgpack", "loader_rank1.msgpack"]
    done("redist", *paths, tmp_path / "again", "--new-world-size", 3)  # as Energon has it
    assert sorted(os.listdir(tmp_path / "again")) == ["rank0.pt", "rank1.pt", "rank2.pt"]
    asked = invoke("checkpoint", "redist", *paths, tmp_path / "asked", answers="0\n1\n")
    assert not asked.exit_code and "The state was saved on 6 ranks." in asked.output
    assert os.listdir(tmp_path / "asked") == ["rank0.pt"]
    assert "there are no states" in refused("redist", tmp_path / "asked", "--ranks", 2)
    done("redist", tmp_path / "six", "--ranks", 3, "-o", tmp_path / "three", "--suffix", ".json")

    whole = merged([torch.load(path) for path in paths])
    three = [json.loads((tmp_path / "three" / f"loader_rank{rank}.json").read_text()) for rank in range(3)]
    assert three == json.loads(json.dumps(redistributed(whole, 3)))

    output = refused("redist", tmp_path / "all.msgpack", "--ranks", 4, "-o", tmp_path / "four")
    assert "6 lanes cannot be divided among 4" in output and "use 1, 2, 3, 6 ranks" in output
    assert not (tmp_path / "four").exists()
    output = refused("redist", tmp_path / "all.msgpack", "--ranks", 2, "-o", tmp_path / "three")
    assert "the folder is not empty" in output

    again = tmp_path / "again"  # has three files of the same states: they are replaced
    done("redist", *paths, again, "--ranks", 2)
    assert sorted(os.listdir(again)) == ["rank0.pt", "rank1.pt"]
    assert sorted(row[0] for rank in range(2) for row in torch.load(again / f"rank{rank}.pt")["cursors"]) == [*range(6)]
    later = torch.load(again / "rank1.pt")
    torch.save(later | {"position": later["position"] + 6}, again / "rank1.pt")
    for folder in (again, tmp_path / "six"):  # of another step; the states themselves
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert "the folder is not empty" in refused("redist", *paths, folder, "--ranks", 3)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_names_of_redistributed_states() -> None:
    assert _numbered_names(("a/s_7_r08.pt", "b/s_7_r09.pt/"), 2, ".x") == ["s_7_r00.x", "s_7_r01.x"]
    for states in (("r1.pt", "r1x2.pt"), ("r1s1", "r2s2"), ("a1", "b1"), ("a1",)):
        assert _numbered_names(states, 11, ".x")[9:] == ["loader_rank09.x", "loader_rank10.x"]


def test_states_that_do_not_go_together_are_named(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    three = saved_by_ranks(tmp_path / "three", leaf_of(50), 2, 3, ".json")
    assert "1 of 2 lanes are in none of the 1 state: 1" in refused("merge", three[0], "-o", tmp_path / "out.json")
    state = json.loads(Path(three[1]).read_text())
    state["identity"]["settings"]["seed"] = 5
    state["identity"]["fingerprint"] = "0" * 16
    (tmp_path / "other.json").write_text(json.dumps(state))
    for words in (["merge", "-o", tmp_path / "out.json"], ["info"]):
        output = refused(*words, *three, three[0], tmp_path / "other.json")
        assert f"{tmp_path}/other.json: fingerprint {'0' * 16}; seed: 5, elsewhere 0" in output
    output = refused("info", "--json", three[0], tmp_path / "other.json")
    found = json.loads(output[: output.rindex("}") + 1])
    assert "fingerprint" in found["problem"] and [len(run["files"]) for run in found["runs"]] == [1, 1]
    Path(three[1]).write_text(Path(three[1]).read_text()[:100])
    output = refused("info", *three)
    assert "damaged" in output and three[1] in output
    assert not (tmp_path / "out.json").exists()


def test_rebase_to_another_batch_size(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    path = leaf_of(50)
    (tmp_path / "run.json").write_text(json.dumps(planned_state(path, 3)))
    assert "neither --to nor --batch-size" in refused("rebase", tmp_path / "run.json", "--from", path)
    output = refused("rebase", tmp_path / "run.json", "--from", path, "--batch-size", 8)
    assert "no batch of 8 begins at micro-batch 3" in output and "to micro-batch 4" in output
    for size in (8, 6):
        output = done("rebase", tmp_path / "run.json", "--from", path, "--batch-size", size, "--give-up")
        if size == 8:
            assert "batch_size 4 becomes 8 at sample 16" in output and "passed over: 4 samples" in output
        loader = planned(path, batch_size=size)
        loader.restore_state_rank(json.loads((tmp_path / "run.rebased.json").read_text()))
        assert loader.save_state_rank()["position"] == 2 and "rebase" not in loader.save_state_rank()


def test_rebase(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    a, b, c = leaf_of(50, "a"), leaf_of(7, "b"), leaf_of(120, "c")
    old, new = blend_yaml(tmp_path / "old.yaml", [(a, 1), (b, 1)]), blend_yaml(tmp_path / "new.yaml", [(c, 3), (a, 1)])
    arguments = {"shuffle_buffer_size": 10, "max_samples_per_sequence": 3}
    state = planned_state(old, 10, **arguments)
    torch.save({"loader": state}, tmp_path / "run.pt")
    output = done("rebase", tmp_path / "run.pt", "--from", old, "--to", new)
    assert "begins at sample 40 of the run" in output and f"{c}: new, starts at zero" in output
    assert f"{b}: goes" in output and f"{a}: goes on" in output
    rebased = torch.load(tmp_path / "run.rebased.pt", weights_only=True)
    loader = planned(new, **arguments)
    loader.restore_state_rank(rebased)
    assert loader.save_state_rank() == rebased and rebased["position"] == 10
    assert "changed at sample 40; 1 data set went on" in done("info", tmp_path / "run.rebased.pt")
    output = refused("rebase", tmp_path / "run.pt", "--from", new, "--to", old)
    assert "belongs to another run" in output and "--from" in output
    validation = state["identity"] | {"settings": state["identity"]["settings"] | {"kind": "val"}}
    (tmp_path / "val.json").write_text(json.dumps(state | {"identity": validation}))
    assert "of validation" in refused("rebase", tmp_path / "val.json", "--from", old, "--to", new)


def test_rebase_of_packs(leaf_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = leaf_of(50, "a"), leaf_of(7, "b")
    old, new = blend_yaml(tmp_path / "old.yaml", [(a, 1), (b, 1)]), blend_yaml(tmp_path / "new.yaml", [(a, 1)])
    (tmp_path / "hooks.py").write_text(f"from {__name__} import Pairs\n")
    monkeypatch.chdir(tmp_path)
    torch.save(state_after(packed(old, lanes=2), 3), "run.pt")
    arguments = ("rebase", "run.pt", "--from", old, "--to", new, "--task-encoder", "hooks:Pairs", "-o", "new.json")
    output = refused(*arguments[:-4], "-o", "new.json")
    assert "give --task-encoder MODULE:CLASS" in output and "select_samples_to_pack" not in output
    output = refused(*arguments)
    assert "up to" in output and "were not delivered yet" in output
    output = done(*arguments, "--give-up")
    assert "passed over: up to 8 samples" in output, output
    loader = packed(new, lanes=2)
    loader.restore_state_rank(json.loads(Path("new.json").read_text()))
    assert len(next(iter(loader))["__key__"]) == 4


def test_checkpoint_folders(leaf_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the trainer are read by its own reader; others are refused, and damaged ones too."""
    import torch.distributed.checkpoint as dcp

    import energon_lite.trainer as trainer

    dcp.save({"w": torch.zeros(2)}, checkpoint_id=str(tmp_path / "foreign"))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / ".metadata").write_bytes(b"no pickle")
    for name in ("foreign", "damaged"):
        output = refused("info", tmp_path / name)
        assert name in output and "Error" in output and "Traceback" not in output
    state = planned_state(leaf_of(50), 3)
    monkeypatch.setattr(trainer, "read_state", lambda folder: {"loader": state, "config": {}})
    output = done("info", tmp_path / "foreign")
    assert "['loader']" in output and "3 micro-batches, 12 samples" in output
