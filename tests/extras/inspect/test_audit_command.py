"""``energon-lite audit`` of loaders without the trainer, by their traces and states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from energon_lite import TaskEncoder, get_train_dataset, stateless
from energon_lite.batching.digests import set_digest
from energon_lite.errors import UsageError
from energon_lite.extras.inspect.appearances import SampleHistory
from energon_lite.extras.inspect.audit import PlannedSteps, _history_lines
from energon_lite.extras.inspect.audited_run import (
    RecordedStep,
    first_difference,
    missing_steps,
    read_metrics,
    read_traces,
)
from energon_lite.order.hashing import MASK64
from tests.testing import ALONE, command, json_lines, take, train_loader, write_dataset


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    shards = {"a.tar": [(f"t{number:03d}", {"txt": b"text"}) for number in range(30)]}
    return write_dataset(tmp_path / "texts", shards, splits={"train": ["a.tar"]})


def audit(*arguments: object) -> tuple[int, str]:
    return command("audit", *arguments)


def go(texts: Path, trace: Path, world: int, steps: int, state: Any = None, seed: int = 0, save_at: int = 0) -> Any:
    """Some steps of all ranks; returns the state after the last step, or after another one."""
    run: dict[str, Any] = {"world_size": world, "seed_offset": seed, "batch_size": 2, "trace": trace}
    loaders = [train_loader(texts, rank=rank, **run) for rank in range(world)]
    for loader in loaders:
        loader.restore_state_rank(state)
    iterators, saved = [iter(loader) for loader in loaders], None
    for step in range(1, steps + 1):
        for iterator in iterators:
            next(iterator)
        if step == (save_at or steps):
            saved = loaders[0].save_state_rank()
    for loader in loaders:
        loader.close()
    return saved


@pytest.fixture
def run(texts: Path, tmp_path: Path) -> tuple[Path, list[object]]:
    """The trace of 24 steps of one rank, and options with its data and its state."""
    (tmp_path / "state.json").write_text(json.dumps(go(texts, tmp_path / "trace.jsonl", 1, 24)))
    return tmp_path / "trace.jsonl", ["--data", texts, "--state", tmp_path / "state.json"]


def test_traces_of_runs_on_other_ranks_are_compared(texts: Path, tmp_path: Path) -> None:
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    alone = go(texts, one / "trace.jsonl", 1, 24)
    state = go(texts, two / "trace.jsonl", 4, 5, save_at=3)  # two steps are done again
    assert go(texts, two / "trace.jsonl", 2, 6, state) == alone
    go(texts, other / "trace.jsonl", 1, 24, seed=1)
    saved = tmp_path / "state.json"
    saved.write_text(json.dumps(alone))
    mine, theirs = [one / "trace.jsonl"], sorted(two.glob("*.jsonl"))
    assert [path.name for path in theirs] == [f"trace.rank{rank}.jsonl" for rank in range(4)]
    code, said = audit(*theirs, "--against", mine[0])
    assert code == 0 and "the same samples in all 9 steps" in said  # at 4, 8, 12, and then each 2 up to 24
    code, said = audit(*theirs, "--data", texts, "--state", saved)
    assert code == 0 and "9 steps" in said and "exactly the samples" in said
    code, said = audit(mine[0], "--against", other / "trace.jsonl", "--data", texts, "--state", saved)
    assert code == 1 and "different samples first in step 0" in said
    with pytest.raises(UsageError, match="rank 1 of 4 has no trace"):
        read_traces([theirs[0], *theirs[2:]])
    steps, cut = read_traces(theirs), theirs[1].read_text().splitlines(keepends=True)
    theirs[1].write_text("".join(cut[:-1]))
    assert read_traces(theirs) == steps[:-1]  # the last step may be incomplete


def test_a_fault_of_one_sample_is_named(texts: Path, run: tuple[Path, list[object]]) -> None:
    trace, given_data = run
    lines = trace.read_text().splitlines()
    given = get_train_dataset(texts, batch_size=2, worker_config=ALONE)
    plan = PlannedSteps(given).addresses(0, 0, 24)
    own, before, far, stand_in = plan[5][1], plan[4][0], plan[20][0], given.runner().replacement(plan[5][1], 2)
    named = [f"t{one[1]:03d} (sample {one[1]} of texts[train], epoch {one[2]})" for one in (own, before, stand_in)]

    def recorded(changed: range, difference: int) -> None:
        made = [json.loads(line) for line in lines]
        for number in changed:
            made[1 + number]["digest"] = f"{int(made[1 + number]['digest'], 16) + difference & MASK64:016x}"
        trace.write_text("\n".join(map(json.dumps, made)))

    for lost, added, said in (
        ([own], [], f"  {named[0]} was lost"),
        ([], [before], f"  {named[1]} was used once more than planned"),
        ([own], [before], f"  {named[0]} was lost; {named[1]} came instead"),
        ([own], [stand_in], f"  {named[0]} failed or was skipped; in its place came {named[2]}"),
        ([own], [far], "  several samples differ, or a sample that is not planned nearby"),
    ):
        recorded(range(5, 6), set_digest(added) - set_digest(lost))
        code, text = audit(trace, *given_data)
        first = "step 5: not the samples that were planned for micro-batch 5"
        assert (code, text.splitlines()[1:3]) == (1, [first, said]) and "more of them" not in text
    assert [audit(trace, *given_data, "--until", step)[0] for step in (4, 5)] == [0, 1]
    recorded(range(3, 24), 1)
    said_of_many = audit(trace, *given_data)[1]
    assert said_of_many.count("several samples differ") == 20 and "... and more of them" in said_of_many


@pytest.mark.parametrize(
    ("without", "named"), [(slice(7, 9), "es 6 to 7"), (slice(20, None), "es 19 to 23"), (slice(7, 8), " 6")]
)
def test_lines_that_were_lost_are_named(run: tuple[Path, list[object]], without: slice, named: str) -> None:
    trace, given_data = run
    lines = trace.read_text().splitlines(keepends=True)
    del lines[without]
    trace.write_text("".join(lines))
    code, said = audit(trace, *given_data)
    assert code == 1 and f"micro-batch{named} of pass 0: without a line" in said


def test_a_sample_is_looked_up_in_a_state(texts: Path, run: tuple[Path, list[object]]) -> None:
    trace, given_data = run
    saved, seen = given_data[-1], [key for line in json_lines(trace) for key in line.get("keys", ())]
    for key in ("t000", "t017"):
        code, said = audit(saved, "--data", texts, "--key", key, "--json")
        (found,) = json.loads(said)
        assert code == 0 and found["times"] == seen.count(key)
        assert [one["micro_batch"] for one in found["appearances"]] == [n // 2 for n, k in enumerate(seen) if k == key]
    code, said = audit(saved, "--data", texts, "--sample", "0:3")
    assert code == 0 and "t003 (sample 3 of data set 0" in said and "next: pass 0, epoch" in said
    for name in ("", "texts[train]"):
        assert audit(saved, "--data", texts, "--sample", f"{name}:3") == (code, said)
    often = max(seen, key=seen.count)
    code, said = audit(saved, "--data", texts, "--key", often, "--most", 1)
    assert seen.count(often) > 1 and f"... {seen.count(often) - 1:,} more before these" in said
    assert said.count("epoch") == 2
    early = audit(trace, *given_data, "--key", often, "--until", 9, "--json")[1]
    assert json.loads(early)[0]["times"] == seen[:20].count(often)
    for wrong in ("0:x", "7:3", "nobody:3"):
        assert audit(saved, "--data", texts, "--sample", wrong)[0] == 1
    code, said = audit(saved, "--key", "t000")
    assert code == 1 and "is unknown" in said and "--data" in said
    code, said = audit(saved, "--data", texts)
    assert code == 1 and "a state alone does not record steps" in said


def test_appearances_before_a_rebase_are_told_apart() -> None:
    history = SampleHistory("texts", 0, 3, "t003", times=5, left_out=0, before_rebase=2, appearances=(), coming=None)
    assert list(_history_lines(history)) == [
        "t003 (sample 3 of data set 0, texts): trained on 5 times",
        "  2 of these before the blend was changed, in steps of that blend",
        "  ... 3 more before these",
        "  no later appearance is planned",
    ]


class Twice(TaskEncoder):
    @stateless
    def encode_sample(self, sample: Any) -> Any:
        yield sample
        yield sample


def test_runs_whose_hooks_decide_are_compared_and_not_planned(texts: Path, tmp_path: Path) -> None:
    for name, ranks in (("one", 1), ("two", 2)):
        for rank in range(ranks):
            how: dict[str, Any] = {"task_encoder": Twice(), "batch_size": 3, "chunk_size": 6, "lanes": 2}
            how |= {"rank": rank, "world_size": ranks, "trace": tmp_path / f"{name}.jsonl"}
            with train_loader(texts, **how) as loader:
                take(loader, 12 // ranks)
    traces = [tmp_path / "two.rank0.jsonl", tmp_path / "two.rank1.jsonl"]
    code, said = audit(*traces, "--against", tmp_path / "one.jsonl")
    assert code == 0 and "the same samples in all" in said
    with pytest.raises(UsageError, match="hooks decide them"):
        PlannedSteps(loader.dataset)
    digests = [line.get("digest") for line in json_lines(tmp_path / "one.jsonl")][1:]
    assert len(set(digests)) == len(digests)  # both halves of a sample are told apart


def test_lines_of_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines: list[dict[str, Any]] = [{"step": 0, "eval_loss": 1.0}]
    # The third step passes over the data of one step; the last one has what is left of the data.
    spans = [(1, 0, 4), (2, 4, 8), (3, 12, 16), (4, 16, 20), (5, 20, 22)]
    lines += [
        {"step": n, "position": stop, "micro_batches": stop - first, "digest": f"{n:016x}"} for n, first, stop in spans
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "dig')
    found = read_metrics(path)
    assert found == [RecordedStep(n, 0, first, stop, n) for n, first, stop in spans]
    assert missing_steps(found, (0, 24)) == [(0, 8, 12), (0, 22, 24)] and missing_steps(found, (1, 24)) == [(0, 8, 12)]
    later, earlier = [RecordedStep(1, 1, 0, 2, 5)], [RecordedStep(1, 0, 9, 10, 7), RecordedStep(2, 1, 0, 2, 5)]
    assert first_difference(earlier, later) == first_difference(later, earlier) == 1  # from where both have begun
    path.write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(UsageError, match="no line has the digest"):
        read_metrics(path)
