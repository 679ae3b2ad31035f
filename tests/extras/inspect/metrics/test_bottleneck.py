"""What a run waits for, where it is known beforehand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from energon_lite.extras.inspect.bottleneck import Bottleneck, LoaderSetup, Stretch, bottleneck
from energon_lite.loading.executors.executor import WorkSeconds, WorkSum
from energon_lite.loading.makers.observers import Times
from tests import staged_limits
from tests.staged_limits import CASES, Case, run, staged_loader


@pytest.fixture(scope="module")
def texts(leaf_of: Any) -> Path:
    path: Path = leaf_of(200, "limits")
    return path


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_limit_of_staged_cases(case: Case, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    for scale in (1, 4, 16):  # a machine on which others work may stand still for longer than all of it takes
        monkeypatch.setattr(staged_limits, "SLOW", 2e-3 * scale)
        with staged_loader(case, texts) as loader:
            found = run(case._replace(step=case.step * scale), loader)["bottleneck"]
        limits.append(found and found["limit"])
        if limits[-1] == case.limit:
            return
    raise AssertionError(f"{case}: {limits}")


def stretch(waited: float, *, cpu: float = 1.0, busy: float = 10.0, received: float = 0.0, **stages: float) -> Stretch:
    """Ten seconds, of which so many were waited; of the work that was timed, the shares of stages."""
    shares = np.array([stages.get(name, 0.0) for name in ("read", "decode", "hooks", "batch", "other")])
    return Stretch(100, 10.0, waited, WorkSum(busy, 1.0, cpu, shares, stages.get("sent", 0.0), received))


def test_what_is_waited_for_little_is_not_the_limit() -> None:
    found = bottleneck(stretch(0.5, decode=1.0), LoaderSetup(0))
    assert found is not None and found["limit"] == "trainer" and str(found["advice"]).startswith("nothing")
    assert found["waited"] == 0.05 and found["shares"]["decoding"] == 1.0  # type: ignore[index]


def test_nothing_is_said_before_anything_is_known() -> None:
    assert bottleneck(Stretch(4, 10.0, 9.0, WorkSum()), LoaderSetup(0)) is None
    assert bottleneck(Stretch(100, 10.0, 9.0, WorkSum()), LoaderSetup(2)) is None


@pytest.mark.parametrize(
    ("setup", "given", "limit", "advice"),
    [
        (LoaderSetup(0, cores=8), stretch(9.0, decode=0.9), "decoding", "num_workers: 0 -> 2"),
        (LoaderSetup(2, cores=8), stretch(9.0, busy=20, decode=0.9), "decoding", "more workers: 2 -> 4"),
        # Half of the time is the trainer's: workers for 1.1 times their work in the other half are enough.
        (LoaderSetup(2, cores=8), stretch(5.0, busy=12, hooks=0.9), "hooks", "more workers: 2 -> 3"),
        (LoaderSetup(2, cores=2), stretch(9.0, busy=20, decode=0.9), "decoding", "or more cores: all 2 are busy"),
        (LoaderSetup(2, cores=2), stretch(9.0, busy=20, cpu=0.1, hooks=0.9), "hooks", "more workers: 2 -> 4"),
        (LoaderSetup(2, cores=8, can_read_ahead=True), stretch(9.0, read=0.9), "storage", "read_ahead=ReadAhead()"),
        (LoaderSetup(2, cores=8, reads_ahead=True), stretch(9.0, read=0.9), "storage", "ReadAhead(folder=...)"),
        (LoaderSetup(2, "thread", 8), stretch(9.0, hooks=0.9), "hooks", "start_method='fork'"),
        (LoaderSetup(2, "thread", 8, seeded=True), stretch(9.0, hooks=0.9), "hooks", "restore_seeds=False"),
        (LoaderSetup(2, cores=8), stretch(9.0, sent=9.0, busy=2.0, decode=0.9), "transport", "start_method='thread'"),
        # What the trainer's process does keeps both workers waiting.
        (LoaderSetup(2, cores=8), stretch(9.0, received=6.0, decode=0.9), "transport", "smaller batches"),
        (LoaderSetup(0, cores=8), stretch(9.0, batch=0.9), "transport", "num_workers: 0 -> 1"),
        (LoaderSetup(2, cores=8, own_batch=True), stretch(9.0, busy=20, batch=0.9), "hooks", "more workers: 2 -> 4"),
    ],
)
def test_what_to_turn(setup: LoaderSetup, given: Stretch, limit: str, advice: str) -> None:
    found = bottleneck(given, setup)
    assert found is not None and found["limit"] == limit and advice in str(found["advice"]), found


def test_a_run_is_judged_by_its_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("energon_lite.extras.inspect.bottleneck.setup_of", lambda observed: LoaderSetup(0, cores=8))
    work, waited = WorkSeconds(), 50.0  # for the first batch, which opens files
    observer: Any = Bottleneck(None, SimpleNamespace(work=work))  # type: ignore[arg-type]
    found = []
    for number in range(1, 151):  # a batch a second; the later half is waited for little
        observer.on_batch(SimpleNamespace(delivered=1000.0 + number, batches=number, wait_seconds=waited))
        found.append(observer.stats())
        if number < 50:  # later, no job is timed
            work.add(Times(1.0, [("hooks", "texts", 1.0)], 1.0))
        work.busy += 1.0
        waited += 1.0 if number < 75 else 0.25
    assert found[4] is None, "four batches since the first one"
    assert found[5]["limit"] == "hooks" and found[5]["waited"] == 1.0
    assert found[-1]["waited"] == 0.25 and found[-1]["shares"]["hooks"] == 1.0
