"""Laws of a job over units: however many ranks and processes do it, wherever it is killed, whatever changes between;
and its helper processes, on shards that are scanned."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.entry_points import UnitRunner
from energon_lite.errors import DatasetError, EnergonLiteError, UsageError, WorkerError
from energon_lite.storage import sharded_job
from energon_lite.storage import sharded_work as helpers
from energon_lite.storage.dataset_scan import Shards
from energon_lite.storage.sharded_job import Ranks, Runner, ShardedJob
from energon_lite.storage.sharded_work import Outcome, run_units
from energon_lite.storage.tar_scan import ShardScan
from tests.accidents import killed_at_every_step
from tests.number_units import Squares, done, write_inputs
from tests.testing import in_time, is_alive, until, write_members


def job_of(root: Path, units: int, ranks: Ranks | None = None, workers: int = 1, **more: object) -> ShardedJob:
    return ShardedJob(Squares(str(root)), range(units), ranks=ranks, workers=workers, where=str(root), **more)


def results(job: ShardedJob) -> list[int]:
    return [job.read(unit) for unit in job.units]


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A folder that :func:`begin` empties for each example."""
    return tmp_path / "job"


def begin(root: Path, texts: Sequence[str]) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    write_inputs(root, list(texts))


@pytest.fixture
def helpers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process leaves all units to its helpers."""
    monkeypatch.setattr(helpers, "_WORK_HERE", False)


@given(st.data())
def test_ranks_in_any_order_killed_anywhere(fresh: Path, data: st.DataObject) -> None:
    """The same results, nothing is lost, and a unit with a result is not begun again."""
    units, world = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    texts = [str(number * 7) for number in range(units)]
    begin(fresh, texts)
    runs = [*data.draw(st.lists(st.integers(0, world - 1), max_size=8)), *range(world - 1, -1, -1)]
    for turn, rank in enumerate(runs):
        had = set(Squares(str(fresh)).find(range(units)))
        last = turn >= len(runs) - world
        stop = None if last else data.draw(st.sampled_from([None, *range(units)]))
        if stop is not None:
            (fresh / str(stop)).write_text("interrupt")
        job = job_of(fresh, units, Ranks(rank, world, timeout=0.0))
        with suppress(KeyboardInterrupt):
            job.do_share()
            if last and not rank:
                job.gather()
        if stop is not None:
            (fresh / str(stop)).write_text(texts[stop])
        begun = done(fresh)
        assert max(Counter(begun).values(), default=0) <= 1
        assert not (had - {stop}) & set(begun) and set(begun) <= set(Ranks(rank, world).share(range(units)))
        assert had - {stop} <= set(Squares(str(fresh)).find(range(units)))
    assert results(job) == [(number * 7) ** 2 for number in range(units)] and not job.errors


@given(
    texts=st.lists(st.sampled_from(["3", "12", "no", "x"]), min_size=1, max_size=9),
    world=st.integers(1, 4),
    changed=st.sets(st.integers(0, 8)),
)
def test_errors_and_changed_inputs(fresh: Path, texts: list[str], world: int, changed: set[int]) -> None:
    """A unit that cannot be done costs itself alone; what has changed is done again, and what failed, nothing else."""
    begin(fresh, texts)
    wrong = {unit for unit, text in enumerate(texts) if not text.isdecimal()}
    shares = [job_of(fresh, len(texts), Ranks(rank, world)) for rank in range(world)]
    for share in shares[::-1]:
        share.do_share()
    assert sorted(done(fresh)) == list(range(len(texts)))
    # Rank 0 does not wait for what others could not do, but tries it itself, so that it knows the errors.
    shares[0].gather()
    assert set(done(fresh)) == {unit for unit in wrong if unit % world}
    assert shares[0].errors.keys() == wrong
    if wrong:
        with pytest.raises(EnergonLiteError, match="is no number") as caught:
            shares[0].raise_errors(DatasetError, "be squared", "write numbers")
        assert len(wrong) == 1 or all(f"number {unit}: " in str(caught.value) for unit in wrong)
    for unit in (changed | wrong) & set(range(len(texts))):
        (fresh / str(unit)).write_text("100")
    again = job_of(fresh, len(texts))
    again.do_share()
    assert sorted(done(fresh)) == sorted((changed | wrong) & set(range(len(texts))))
    expected = [100 if unit in changed | wrong else int(text) for unit, text in enumerate(texts)]
    assert results(again) == [number**2 for number in expected]


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_any_number_of_processes(fresh: Path, monkeypatch: pytest.MonkeyPatch, workers: int, here: bool) -> None:
    monkeypatch.setattr(helpers, "_WORK_HERE", here)
    begin(fresh, [str(number) for number in range(7)] + ["no"])
    told: list[tuple[int, bool]] = []
    job = job_of(fresh, 8, workers=workers, tick=lambda unit, table, *_: told.append((unit, table is None)))
    job.do_share()
    assert sorted(told) == [(unit, unit == 7) for unit in range(8)] and sorted(job.made) == list(range(7))
    assert [job.read(unit) for unit in range(7)] == [number**2 for number in range(7)]
    assert sorted(done(fresh)) == list(range(8)) and list(job.errors) == [7]


@pytest.mark.usefixtures("helpers_alone")
def test_a_helper_that_is_killed_costs_one_unit_and_the_next_run_does_it(fresh: Path) -> None:
    begin(fresh, ["1", "die", "3", "die", "5"])
    job = job_of(fresh, 5, workers=2)
    job.do_share()
    assert sorted(job.made) == [0, 2, 4] and sorted(job.errors) == [1, 3]
    assert isinstance(job.errors[1], WorkerError) and "what is done is kept" in str(job.errors[1])
    assert "number 1 died (exit code -9)" in job.errors[1].what
    with pytest.raises(DatasetError, match=r"2 of 5 shards cannot be squared:[\s\S]*number 1: .*died[\s\S]*number 3"):
        job.raise_errors(DatasetError, "be squared", "")
    write_inputs(fresh, ["1", "2", "3", "4", "5"])
    done(fresh)
    again = job_of(fresh, 5, workers=2)
    again.do_share()
    assert sorted(done(fresh)) == [1, 3] and results(again) == [1, 4, 9, 16, 25]


@pytest.mark.usefixtures("quick_disk")
def test_killed_at_every_step(fresh: Path) -> None:
    """After each kill: what is there is right, and the next run does exactly what is not there."""
    kills = 0

    def work() -> None:
        job = job_of(fresh, 4)
        job.do_share()
        job.gather()

    for killed in killed_at_every_step(work, lambda: begin(fresh, ["1", "2", "3", "4"])):
        kills += killed
        there = set(Squares(str(fresh)).find(range(4)))
        done(fresh)
        again = job_of(fresh, 4)
        again.do_share()
        assert set(done(fresh)) == set(range(4)) - there and results(again) == [1, 4, 9, 16]
    assert kills >= 5


def test_rank_0_waits_and_says_for_whom(fresh: Path) -> None:
    begin(fresh, [str(number) for number in range(10)])
    first = job_of(fresh, 10, Ranks(0, 3, timeout=300.0))
    first.do_share()
    thread = threading.Thread(target=first.gather)
    thread.start()
    for rank in (2, 1):
        assert thread.is_alive()
        job_of(fresh, 10, Ranks(rank, 3)).do_share()
    thread.join(300)
    assert not thread.is_alive() and results(first) == [number**2 for number in range(10)]
    for unit in (1, 4, 7, 8):
        Path(Squares(str(fresh)).path(unit)).unlink()
    late = job_of(fresh, 10, Ranks(0, 3, timeout=0.1))
    late.do_share()
    with pytest.raises(DatasetError) as caught:
        in_time(late.gather)
    assert "no result for 4 of 10 shards after 0.1 s" in caught.value.what
    assert "(rank 1: number 1, number 4, number 7; rank 2: number 8)" in caught.value.what


def test_what_is_wrong_with_the_call_ends_it(fresh: Path) -> None:
    begin(fresh, ["1", "2", "3"])

    class Refusal(Squares):
        def do(self, unit: int) -> int:
            raise UsageError("this cannot work")

    job = ShardedJob(Refusal(str(fresh)), range(3), workers=1)
    with pytest.raises(UsageError, match="cannot work"):
        job.do_share()


def test_results_worth_another_try(fresh: Path) -> None:
    begin(fresh, ["1", "5", "4"])
    job_of(fresh, 3).do_share()
    done(fresh)
    job = job_of(fresh, 3, known=[0], again=lambda table: table.get("digits") == 2)
    job.do_share()
    assert done(fresh) == [1, 2] and job.done[0] == {}


def test_a_result_that_goes_after_it_was_found(fresh: Path) -> None:
    begin(fresh, ["1"])
    job = job_of(fresh, 1)
    job.do_share()
    job.work.remove()
    with pytest.raises(DatasetError, match=r"result of number 0 was damaged or removed[\s\S]*run again"):
        job.read(0)


def _in_a_copy(run: Runner[int], place: str, units: Sequence[int]) -> Generator[tuple[int, Outcome], None, None]:
    """Do units last first, each by a copy of the runner, as another process would."""
    assert place == "there"
    for unit in reversed(units):
        yield from pickle.loads(pickle.dumps(run))([unit])


def test_units_are_done_elsewhere(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(fresh, ["3", "no", "12"])
    far = {"far": UnitRunner(f"{__name__}:_in_a_copy", "", "")}
    monkeypatch.setattr(sharded_job, "unit_runners", lambda: far)
    job = job_of(fresh, 3, Ranks(elsewhere=("far", "there")), workers=4)
    job.run()
    assert done(fresh) == [2, 1, 0]
    assert [*job.errors] == [1] and [job.read(unit) for unit in (0, 2)] == [9, 144]


# -- helper processes, on shards that are scanned


NAMES = [f"{number:02d}.tar" for number in range(12)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES):
        write_members(tmp_path / f"d/{name}", [(f"{number}-{i}.txt", b"x") for i in range(number + 1)])
    return tmp_path / "d"


def scan(folder: Path) -> list[ShardScan | EnergonLiteError]:
    """What is found in each shard, or why nothing is."""
    shards = Shards(str(folder))
    outcomes: dict[str, Outcome] = dict(run_units(shards, NAMES, workers=2))
    return [one if isinstance(one, EnergonLiteError) else shards.read(name) for name, one in sorted(outcomes.items())]


def boot_with(text: str) -> str:
    """A helper that does something before it serves."""
    return helpers._BOOT.replace("serve()", f"{text}; serve()")


#: A helper that calls ``before(name)`` for each shard that it scans.
PATCHED = (
    "import energon_lite.storage.dataset_scan as s, os, time; scan = s.scan_shard; "
    "s.scan_shard = lambda r, n: (before(n), scan(r, n))[1]"
)


@pytest.mark.usefixtures("helpers_alone")
def test_an_unexpected_error_costs_one_unit_and_has_its_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "_BOOT", boot_with(f"{PATCHED}; before = lambda n: n == '05.tar' and 1 / 0"))
    results = scan(folder)
    assert [type(result) for result in results].count(ShardScan) == 11
    assert isinstance(results[5], WorkerError) and "05.tar failed: ZeroDivisionError" in results[5].what
    assert "Traceback" in results[5].what


SCRIPT = """
import sys
from energon_lite.storage.dataset_scan import Shards
from energon_lite.storage import sharded_work as helpers
helpers._WORK_HERE = False
folder = sys.argv[1]
names = [f"{i:02d}.tar" for i in range(12)]
done = dict(helpers.run_units(Shards(folder), names, workers=2))
print(sum(Shards(folder).read(name).samples for name in names))
"""


def test_a_script_without_a_main_guard(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    output = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(folder)], capture_output=True, text=True, timeout=300
    )
    assert (output.stdout, output.stderr) == ("78\n", "")


@pytest.mark.usefixtures("helpers_alone")
def test_helpers_do_not_import_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    witness = tmp_path / "modules"
    boot = helpers._BOOT + f"; open({str(witness)!r}, 'w').write(' '.join(sys.modules))"
    monkeypatch.setattr(helpers, "_BOOT", boot)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: None)  # let them end by the end of their input
    scan(folder)
    modules = witness.read_text().split()
    assert "numpy" in modules and "torch" not in modules


def test_no_helper_outlives_a_caller_that_is_killed(folder: Path, tmp_path: Path) -> None:
    slow = f"{PATCHED}; before = lambda n: time.sleep(1); serve()"
    script = SCRIPT.replace("folder =", f"helpers._BOOT = helpers._BOOT.replace('serve()', {slow!r})\nfolder =")
    (tmp_path / "script.py").write_text(script)
    caller = subprocess.Popen([sys.executable, str(tmp_path / "script.py"), str(folder)], stdout=subprocess.DEVNULL)
    assert until(lambda: len(children(caller.pid)) == 2)
    started = children(caller.pid)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    assert len(started) == 2
    assert until(lambda: not any(map(is_alive, started)))


def children(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(status.parent.name))
    return found


@pytest.mark.usefixtures("helpers_alone")
def test_an_answer_that_cannot_be_read_costs_one_unit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in the thread that asks: the unit has an error, and nobody waits for its result."""
    stranger = "import sys; sys.stdout.buffer.write(b'cnowhere\\nNothing\\n.'); sys.stdout.flush(); sys.stdin.read()"
    monkeypatch.setattr(helpers, "_BOOT", stranger)
    results = in_time(lambda: scan(folder), 300)
    assert len(results) == 12
    assert all(isinstance(result, WorkerError) and "nowhere" in result.what for result in results)


@pytest.mark.usefixtures("helpers_alone")
def test_why_there_is_no_helper_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(folder / "no python"))
    results = in_time(lambda: scan(folder))
    assert all(isinstance(result, WorkerError) and "No such file" in result.what for result in results)


@pytest.mark.usefixtures("helpers_alone")
def test_who_stops_listening_leaves_no_helper(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C, which comes while one waits for a unit."""
    monkeypatch.setattr(helpers, "_BOOT", boot_with(f"{PATCHED}; before = lambda n: n > '01.tar' and time.sleep(600)"))
    before = set(children(os.getpid()))  # such as the fork server of earlier tests
    outcomes = run_units(Shards(str(folder)), NAMES, workers=3)
    next(outcomes)
    assert until(lambda: len(set(children(os.getpid())) - before) == 3)
    started = set(children(os.getpid())) - before
    in_time(outcomes.close)
    assert not [pid for pid in started if is_alive(pid)]
