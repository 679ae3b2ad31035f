"""Helper processes, on shards that are scanned: results, errors, deaths, interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from energon_lite.errors import EnergonLiteError, ShardFormatError, WorkerError
from energon_lite.storage import sharded_work as helpers
from energon_lite.storage.dataset_scan import Shards
from energon_lite.storage.sharded_work import Outcome, run_units
from energon_lite.storage.tar_scan import ShardScan
from tests.testing import in_time, until


@pytest.fixture
def folder(make_tar: Callable[..., Path], tmp_path: Path) -> Path:
    for number in range(12):
        make_tar(f"d/{number:02d}.tar", [(f"{number}-{i}.txt", b"x") for i in range(number + 1)])
    return tmp_path / "d"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.tar"))


@pytest.fixture
def helpers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process leaves all units to its helpers."""
    monkeypatch.setattr(helpers, "_WORK_HERE", False)


def scan(folder: Path, workers: int, units: Sequence[str] | None = None) -> dict[str, ShardScan | EnergonLiteError]:
    """What is found in each shard, or why nothing is."""
    shards = Shards(str(folder))
    done: dict[str, Outcome] = dict(run_units(shards, units or names(folder), workers=workers))
    return {
        name: found if isinstance(found, EnergonLiteError) else shards.read(name)
        for name, found in sorted(done.items())
    }


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("here", [True, False])
def test_each_unit_has_its_result_or_its_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, here: bool, workers: int
) -> None:
    monkeypatch.setattr(helpers, "_WORK_HERE", here)
    os.truncate(folder / "03.tar", 700)
    (folder / "07.tar").write_bytes(b"")
    results = list(scan(folder, workers).values())
    assert isinstance(results[3], ShardFormatError) and "truncated" in results[3].what
    assert isinstance(results[7], ShardFormatError) and "empty file" in results[7].what
    assert [r.samples for r in results if isinstance(r, ShardScan)] == [1, 2, 3, 5, 6, 7, 9, 10, 11, 12]
    assert sorted(path.stem for path in folder.glob("*.idx")) == [
        n for n in names(folder) if n not in ("03.tar", "07.tar")
    ]


def boot_with(text: str) -> str:
    """A helper that does something before it serves."""
    return helpers._BOOT.replace("serve()", f"{text}; serve()")


#: A helper that calls ``before(name)`` for each shard that it scans.
PATCHED = (
    "import energon_lite.storage.dataset_scan as s, os, time; scan = s.scan_shard; "
    "s.scan_shard = lambda r, n: (before(n), scan(r, n))[1]"
)


@pytest.mark.usefixtures("helpers_alone")
def test_a_helper_that_dies_costs_one_unit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill = "before = lambda n: n == '05.tar' and os.kill(os.getpid(), 9)"
    monkeypatch.setattr(helpers, "_BOOT", boot_with(f"{PATCHED}; {kill}"))
    results = list(scan(folder, 2).values())
    assert [type(result) for result in results].count(ShardScan) == 11
    assert isinstance(results[5], WorkerError)
    assert "05.tar died (exit code -9)" in results[5].what and "what is done is kept" in str(results[5])


@pytest.mark.usefixtures("helpers_alone")
def test_an_unexpected_error_costs_one_unit_and_has_its_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "_BOOT", boot_with(f"{PATCHED}; before = lambda n: n == '05.tar' and 1 / 0"))
    results = list(scan(folder, 2).values())
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
    scan(folder, 2)
    modules = witness.read_text().split()
    assert "numpy" in modules and "torch" not in modules


def test_no_helper_outlives_a_caller_that_is_killed(folder: Path, tmp_path: Path) -> None:
    slow = f"{PATCHED}; before = lambda n: time.sleep(1); serve()"
    script = SCRIPT.replace("folder =", f"helpers._BOOT = helpers._BOOT.replace('serve()', {slow!r})\nfolder =")
    (tmp_path / "script.py").write_text(script)
    caller = subprocess.Popen([sys.executable, str(tmp_path / "script.py"), str(folder)], stdout=subprocess.DEVNULL)
    assert until(lambda: len(children(caller.pid)) == 2)
    helpers = children(caller.pid)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    assert len(helpers) == 2
    assert until(lambda: not any(map(is_running, helpers)))


def children(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            if int(status.rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("helpers_alone")
def test_an_answer_that_cannot_be_read_costs_one_unit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in the thread that asks: the unit has an error, and nobody waits for its result."""
    stranger = "import sys; sys.stdout.buffer.write(b'cnowhere\\nNothing\\n.'); sys.stdout.flush(); sys.stdin.read()"
    monkeypatch.setattr(helpers, "_BOOT", stranger)
    results = in_time(lambda: scan(folder, 2), 300)
    assert len(results) == 12
    for result in results.values():
        assert isinstance(result, WorkerError) and "nowhere" in result.what


@pytest.mark.usefixtures("helpers_alone")
def test_why_there_is_no_helper_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(folder / "no python"))
    results = in_time(lambda: scan(folder, 2))
    assert all(isinstance(result, WorkerError) and "No such file" in result.what for result in results.values())


@pytest.mark.usefixtures("helpers_alone")
def test_who_stops_listening_leaves_no_helper(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C, which comes while one waits for a unit."""
    monkeypatch.setattr(helpers, "_BOOT", boot_with(f"{PATCHED}; before = lambda n: n > '01.tar' and time.sleep(600)"))
    before = set(children(os.getpid()))  # such as the fork server of earlier tests
    outcomes = run_units(Shards(str(folder)), names(folder), workers=3)
    next(outcomes)
    assert until(lambda: len(set(children(os.getpid())) - before) == 3)
    started = set(children(os.getpid())) - before
    in_time(outcomes.close)
    assert not [pid for pid in started if is_running(pid)]
