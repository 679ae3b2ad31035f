"""Checkpoints that are killed while they are saved, or damaged since: a run goes on from one that is whole and says so,
or ends and names each; what is no checkpoint is not taken for one."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from energon_lite.errors import StateError
from energon_lite.trainer import Trainer, find_checkpoint, find_weights, latest_checkpoint, read_state
from energon_lite.trainer.checkpointing.checkpoint import save_checkpoint
from energon_lite.trainer.checkpointing.files import CheckpointFiles
from tests.accidents import die_at
from tests.testing import examples, nightly_but
from tests.trainer.parallel.copying_store import CopyingStore
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.small_runs import SmallRuns, heard
from tests.trainer.parallel.test_parity import Layout
from tests.trainer.parallel.training_part import Part, die_before_publishing

# -- killed ------------------------------------------------------------------------------------------------------------


def values(part: Part) -> list[torch.Tensor]:
    """All that is saved."""
    part.optimizer.wait_parameters()
    tensors = [tensor for shard in part.optimizer.shards() for tensor in shard.tensors.values()]
    return [*(p.detach() for p in part.model.parameters()), *tensors]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "url"), nightly_but({0, 1}, [(0, "{}"), (1, "{}"), (0, CopyingStore.protocol + "://{}")])
)
@pytest.mark.usefixtures("quick_disk")
def test_a_rank_killed_at_every_step_of_saving_loses_no_whole_checkpoint(
    run_ranks: RunRanks, tmp_path: Path, victim: int, url: str
) -> None:
    """The third of three, of which two are kept: it writes, and removes the first."""
    root = url.format(tmp_path / "run")

    def save(rank: int, numbers: tuple[int, ...], step: int | None = None) -> None:
        part = Part(Layout(dp=2), seed=99, num_layers=1)
        for number in numbers:
            for value in values(part):
                value.fill_(number)
            dist.barrier()
            if step is not None and rank == victim:
                die_at(step)
            save_checkpoint(root, number, part.model, part.optimizer, part.mesh, {"step": number}, keep=2)

    def load(rank: int) -> int:
        part = Part(Layout(), num_layers=1)
        path = find_checkpoint(root, part.mesh)
        assert path is not None
        step, state = part.load(path)
        assert state == {"step": step}
        assert all(bool((value == step).all()) for value in values(part)), f"not all of step {step} is in it"
        return step

    run_ranks(2, lambda rank: save(rank, (1, 2)))
    (tmp_path / "run").rename(tmp_path / "two")
    found = []
    for step in itertools.count():
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "two", tmp_path / "run")
        try:
            run_ranks(2, lambda rank, step=step: save(rank, (3,), step))
        except RankFailure as failure:
            assert "died without a word" in failure.by_rank[victim], failure
        else:
            break
        files = CheckpointFiles(root)
        assert all(files.damage(name) is None for name in files.names())
        found += run_ranks(1, load)
    assert found == sorted(found) and found[0] == 2 and (victim or found[-1] == 3), found


def test_a_crash_while_a_checkpoint_is_replaced_leaves_the_one_before_it(run_ranks: RunRanks, tmp_path: Path) -> None:
    def die(rank: int) -> None:
        part, rename = Part(Layout()), Path.rename
        part.save(tmp_path, 1)
        part.save(tmp_path, 2)

        def dying(folder: Path, target: Path) -> Any:
            rename(folder, target)
            if target.name == ".replaced-step-00000002":
                os.kill(os.getpid(), signal.SIGKILL)

        Path.rename = dying  # type: ignore[method-assign]
        part.save(tmp_path, 2)

    with pytest.raises(RankFailure, match="died without a word"):
        run_ranks(1, die)
    assert (tmp_path / ".replaced-step-00000002").exists() and not (tmp_path / "step-00000002").exists()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"


def test_without_latest_the_newest_finished_one_counts(tmp_path: Path) -> None:
    for name in ("step-00000001", "step-00000002", "step-00000004", ".saving-00000003", ".deleted-step-00000009"):
        (tmp_path / name).mkdir()
        if name != "step-00000004":
            (tmp_path / name / "manifest.json").write_text('{"files": {}}')
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000002"
    (tmp_path / "latest").write_text("step-00000001\n")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    (tmp_path / "latest").write_text("step-00000007\n")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000002"


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    # A pickle: the result of ``posix.mkdir`` with this text.
    (tmp_path / ".metadata").write_text(f"cposix\nmkdir\n(V{tmp_path / 'exploded'}\ntR.")
    with pytest.raises(StateError, match=r"posix\.mkdir does not belong"):
        read_state(tmp_path)
    assert not (tmp_path / "exploded").exists() and (tmp_path / ".metadata").exists()


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="not a readable checkpoint"):
        read_state(tmp_path)


# -- damaged -----------------------------------------------------------------------------------------------------------

NAMES = ["step-00000002", "step-00000004", "step-00000006"]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


#: What is done to a checkpoint, or what a file holds instead, and what is then said of it.
DAMAGES: dict[str, tuple[str, Callable[[Path], None] | bytes, str]] = {
    "cut": ("__0_0.distcp", cut, r"__0_0\.distcp has \d+ bytes instead of \d+"),
    "lost": ("__0_0.distcp", Path.unlink, r"__0_0\.distcp is missing"),
    "flipped": ("__0_0.distcp", flip, r"__0_0\.distcp is damaged: its checksum differs"),
    "index cut": (".metadata", cut, r"\.metadata has \d+ bytes instead of \d+"),
    "index lost": (".metadata", Path.unlink, r"\.metadata is missing"),
    "manifest empty": ("manifest.json", b"", "the manifest of {name} is damaged"),
    "manifest cut": ("manifest.json", cut, "the manifest of {name} is damaged"),
    "manifest lost": ("manifest.json", Path.unlink, "{name} has no manifest.json"),
    "manifest garbage": ("manifest.json", b"\x80\x00garbage", "the manifest of {name} is damaged"),
    "manifest of nothing": ("manifest.json", b'{"files": {}}', "the manifest of {name} is damaged"),
    "manifest without numbers": (
        *("manifest.json", b'{"files": {"__0_0.distcp": 3}}', "the manifest of {name} is damaged"),
    ),
}
LATEST = {"right": None, "garbage": b"\x00\xff?", "another": f"{NAMES[1]}\n".encode(), "lost": b""}


def damage(root: Path, name: str, how: str) -> str:
    """Damage a checkpoint; what is to be said of it."""
    file, work, said = DAMAGES[how]
    path = root / name / file
    path.write_bytes(work) if isinstance(work, bytes) else work(path)
    return said.format(name=name)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def finished(runs: SmallRuns) -> Path:
    """The folder of a run of two ranks with three checkpoints."""
    assert runs.train(2, name="finished", keep=3, async_save=False) == [6, 6]
    return runs.folder / "finished"


@pytest.mark.slow
@settings(max_examples=examples(30), phases=[Phase.generate])  # a rank is a process: shrinking takes minutes
@given(data=st.data())
def test_no_run_begins_again_in_silence(runs: SmallRuns, finished: Path, data: st.DataObject) -> None:
    output = runs.folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    shutil.copytree(finished, output)
    root = output / "checkpoints"
    hows = [data.draw(st.sampled_from(["none", *DAMAGES]), label=name) for name in NAMES]
    latest = data.draw(st.sampled_from([*LATEST]), label="latest")
    if (text := LATEST[latest]) is not None:
        (root / "latest").write_bytes(text) if text else (root / "latest").unlink()
    said = {name: damage(root, name, how) for name, how in zip(NAMES, hows, strict=True) if how != "none"}
    before, world = contents(output), data.draw(st.sampled_from([1, 2]), label="ranks")
    whole = [name for name in NAMES if name not in said]
    expected = NAMES[1] if latest == "another" and NAMES[1] in whole else whole[-1] if whole else None
    config = runs.config(keep=3)

    def begin(rank: int) -> tuple[int | str, list[str]]:
        with heard(of="energon_lite") as warnings:
            try:
                with Trainer(config) as trainer:
                    return trainer.resume(), warnings
            except StateError as error:
                return str(error), warnings

    found = runs.run_ranks(world, begin)
    assert contents(output) == before
    assert len({outcome for outcome, _ in found}) == 1, "all ranks the same"
    outcome, text = found[0][0], "\n".join(found[0][1])
    about = [line for _, lines in found for line in lines if "checkpoint" in line or "step-" in line]
    if expected is None:
        assert isinstance(outcome, str), f"the run begins at step {outcome}"
        assert all(re.search(words, outcome) for words in said.values()), outcome
        assert str(root) in outcome
        return
    assert outcome == int(expected[5:])
    over = [name for name in NAMES if name > expected or (latest == "another" and name == NAMES[1] != expected)]
    if not over:
        assert about == []
        return
    assert len(about) == 1, "once, on one rank"
    assert f"{expected} is used" in text
    for name in over:
        assert re.search(said.get(name, name), text), f"nothing is said of {name}: {text}"


@pytest.mark.slow
def test_the_advice_ends_the_trouble_and_nothing_of_the_former_run_is_lost(runs: SmallRuns, finished: Path) -> None:
    """One that is copied there again; another folder for checkpoints; the folder moved away."""
    root = finished / "checkpoints"
    shutil.copytree(root / NAMES[1], runs.folder / "copy")
    for name in NAMES:
        damage(root, name, "cut")
    (finished / "profile").mkdir()
    (finished / "profile" / "kernels-rank000.json").write_text("a trace")
    config = runs.config("finished", profile=[1, 1], wandb=None)
    before = contents(finished)

    def begin(rank: int, **changes: object) -> int:
        with (
            heard(of="energon_lite") as said,
            Trainer(dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))) as t,
        ):
            done = t.resume()
            t._newest = None
            t.config = dataclasses.replace(t.config, train=dataclasses.replace(t.config.train, steps=max(1, done)))
            t.run()
            assert done or any("former-1" in line for line in said)
        return done

    with pytest.raises(AssertionError, match="none of them is complete") as caught:
        runs.run_ranks(1, begin)
    advice = str(caught.value)
    assert "copy a complete one" in advice and "train.checkpoints" in advice and "move" in advice
    assert runs.run_ranks(1, lambda rank: begin(rank, checkpoints=str(runs.folder / "elsewhere"))) == [0]
    after = contents(finished)
    kept = {name.removeprefix("former-1/"): data for name, data in after.items() if name.startswith("former-1/")}
    assert kept == {name: data for name, data in before.items() if not name.startswith("checkpoints")}
    assert {name: data for name, data in after.items() if name.startswith("checkpoints")} == {
        name: data for name, data in before.items() if name.startswith("checkpoints")
    }
    assert [json.loads(line)["step"] for line in (finished / "metrics.jsonl").read_text().splitlines()] == [1]
    shutil.rmtree(root / NAMES[1])
    shutil.copytree(runs.folder / "copy", root / NAMES[1])
    assert runs.run_ranks(1, begin) == [4]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(
    run_ranks: RunRanks, tmp_path: Path, keep: int
) -> None:
    """Its number is higher than that of the next one that is saved."""
    root = tmp_path / "run"

    def save(rank: int) -> None:
        part = Part(Layout())
        for step in (1, 5):
            part.save(root, step)
        flip(root / "step-00000005" / "__0_0.distcp")
        for step in (2, 3):
            part.save(root, step, keep=keep)

    run_ranks(1, save)
    expected = [f"step-{step:08d}" for step in (2, 3)[-keep:]]
    assert [path.name for path in sorted(root.glob("step-*"))] == [*expected, "step-00000005"]
    assert Path(run_ranks(1, lambda rank: find_checkpoint(root, Part(Layout()).mesh))[0]).name == expected[-1]


def test_who_looks_for_the_latest_or_for_weights_is_told_too(run_ranks: RunRanks, tmp_path: Path) -> None:
    root = tmp_path / "run"
    run_ranks(1, lambda rank: [str(Part(Layout()).save(root, step)) for step in (1, 2)])
    cut(root / "step-00000002" / "__0_0.distcp")
    with heard(of="energon_lite") as said:
        assert latest_checkpoint(root) == root / "step-00000001"
    assert len(said) == 1 and "bytes instead of" in said[0] and "step-00000001 is used" in said[0]
    for whole in (True, False):  # another model would be taken
        with pytest.raises(StateError, match="bytes instead of"):
            find_weights(root, whole=whole)
    cut(root / "step-00000001" / "__0_0.distcp")
    with pytest.raises(StateError, match="none of them is complete"):
        latest_checkpoint(root)
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_in_a_store_a_save_that_was_killed_is_no_checkpoint_and_one_without_manifest_is(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    """There both have no manifest: a run that was killed in its first save may begin again, the other one may not."""
    root = f"{CopyingStore.protocol}://{tmp_path}/run"

    def killed(rank: int) -> None:
        die_before_publishing()
        Part(Layout()).save(root, 2)

    with pytest.raises(RankFailure, match="died without a word"):
        run_ranks(1, killed)
    assert latest_checkpoint(root) is None
    run_ranks(1, lambda rank: [str(Part(Layout()).save(root, step, keep=1)) for step in (2, 3)])
    assert str(latest_checkpoint(root)).endswith("step-00000003")
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000003"]
    (tmp_path / "run/step-00000003/manifest.json").unlink()
    with pytest.raises(StateError, match=r"step-00000003 has no manifest\.json"):
        latest_checkpoint(root)


def test_what_stands_in_the_place_of_a_checkpoint_is_replaced(run_ranks: RunRanks, tmp_path: Path) -> None:
    """A link to another disk, one that leads nowhere, a file; a link goes, and not what it leads to."""
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    places = [root / f"step-{step:08d}" for step in (1, 2, 3)]

    def save(rank: int) -> list[str]:
        part = Part(Layout())
        part.save(root, 1, keep=9)
        places[0].rename(elsewhere)
        places[0].symlink_to(elsewhere)
        places[1].symlink_to(tmp_path / "nowhere")
        places[2].write_text("")
        for step in (1, 2, 3):
            part.save(root, step, keep=9)
        assert all(place.is_dir() and not place.is_symlink() for place in places)
        shutil.rmtree(places[0])
        places[0].symlink_to(elsewhere)
        part.save(root, 4, keep=1)
        return sorted(path.name for path in root.iterdir())

    assert run_ranks(1, save) == [["latest", "step-00000004"]]
    assert (elsewhere / "manifest.json").exists()
