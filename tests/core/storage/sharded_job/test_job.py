"""Laws of a job over units: however many ranks and processes do it, wherever it is killed, whatever changes between."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.entry_points import UnitRunner
from energon_lite.errors import DatasetError, EnergonLiteError, UsageError
from energon_lite.storage import sharded_job
from energon_lite.storage import sharded_work as helpers
from energon_lite.storage.sharded_job import Ranks, Runner, ShardedJob
from energon_lite.storage.sharded_work import Outcome
from tests.number_units import Squares, done, write_inputs
from tests.testing import in_time, killed_at_every_step


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


def test_a_helper_that_is_killed_costs_one_unit_and_the_next_run_does_it(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "_WORK_HERE", False)
    begin(fresh, ["1", "die", "3", "die", "5"])
    job = job_of(fresh, 5, workers=2)
    job.do_share()
    assert sorted(job.made) == [0, 2, 4] and sorted(job.errors) == [1, 3]
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
