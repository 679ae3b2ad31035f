from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from in_time import in_time

from energon_lite.errors import DatasetError, ShardFormatError
from energon_lite.storage.prepare import scan_pool
from energon_lite.storage.prepare.scan_pool import scan_shards
from energon_lite.storage.tar.tar_scan import ShardScan


@pytest.fixture
def folder(make_tar: Callable[..., Path], tmp_path: Path) -> Path:
    for number in range(12):
        make_tar(f"d/{number:02d}.tar", [(f"{number}-{i}.txt", b"x") for i in range(number + 1)])
    return tmp_path / "d"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.tar"))


@pytest.fixture(params=["alone", "helpers"])
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "helpers":
        monkeypatch.setattr(scan_pool, "_ALONE", 0.0)


@pytest.mark.usefixtures("alone")
def test_results_come_in_order_and_with_their_errors(folder: Path) -> None:
    os.truncate(folder / "03.tar", 700)
    (folder / "07.tar").write_bytes(b"")
    ticks: list[str] = []
    results = scan_shards(str(folder), names(folder), workers=2, progress=ticks.append)
    assert sorted(ticks) == names(folder)
    assert [type(result) for result in results].count(ShardScan) == 10
    assert isinstance(results[3], ShardFormatError) and "truncated" in results[3].what
    assert isinstance(results[7], ShardFormatError) and "empty file" in results[7].what
    assert [r.samples for r in results if isinstance(r, ShardScan)] == [1, 2, 3, 5, 6, 7, 9, 10, 11, 12]
    assert sorted(path.stem for path in folder.glob("*.idx")) == [
        n for n in names(folder) if n not in ("03.tar", "07.tar")
    ]


def test_helpers_find_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = scan_shards(str(folder), names(folder), workers=1, write_indexes=False)
    assert not list(folder.glob("*.idx"))
    monkeypatch.setattr(scan_pool, "_ALONE", 0.0)
    helped = scan_shards(str(folder), names(folder), workers=3, write_indexes=False)
    for one, other in zip(alone, helped, strict=True):
        assert isinstance(one, ShardScan) and isinstance(other, ShardScan)
        assert one.name == other.name and one.keys == other.keys and one.parts.tolist() == other.parts.tolist()


def test_a_helper_that_dies_costs_one_shard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_pool, "_ALONE", 0.0)
    # A helper that kills itself as soon as it is asked for shard 05.
    boot = scan_pool._BOOT.replace(
        "serve()",
        "import energon_lite.storage.prepare.scan_pool as p, os; scan = p._scan; "
        "p._scan = lambda r, n, w: os.kill(os.getpid(), 9) if n == '05.tar' else scan(r, n, w); serve()",
    )
    monkeypatch.setattr(scan_pool, "_BOOT", boot)
    results = scan_shards(str(folder), names(folder), workers=2)
    assert [type(result) for result in results].count(ShardScan) == 11
    assert isinstance(results[5], DatasetError)
    assert "died (exit code -9)" in results[5].what and "05.tar" in str(results[5])


SCRIPT = """
import sys
from energon_lite.storage.prepare import scan_pool
scan_pool._ALONE = 0.0
folder = sys.argv[1]
found = scan_pool.scan_shards(folder, [f"{i:02d}.tar" for i in range(12)], workers=2)
print(sum(scan.samples for scan in found))
"""


def test_a_script_without_a_main_guard(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    output = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(folder)], capture_output=True, text=True, timeout=60
    )
    assert (output.stdout, output.stderr) == ("78\n", "")


def test_helpers_do_not_import_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scan_pool, "_ALONE", 0.0)
    witness = tmp_path / "modules"
    boot = scan_pool._BOOT + f"; open({str(witness)!r}, 'w').write(' '.join(sys.modules))"
    monkeypatch.setattr(scan_pool, "_BOOT", boot)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: None)  # let them end by the end of their input
    scan_shards(str(folder), names(folder), workers=2)
    modules = witness.read_text().split()
    assert "numpy" in modules and "torch" not in modules


def test_no_helper_outlives_a_caller_that_is_killed(folder: Path, tmp_path: Path) -> None:
    slow = "import time; from energon_lite.storage.prepare import scan_pool as p; scan = p._scan; "
    slow += "p._scan = lambda *a: (time.sleep(1), scan(*a))[1]; serve()"
    script = SCRIPT.replace("folder =", f"scan_pool._BOOT = scan_pool._BOOT.replace('serve()', {slow!r})\nfolder =")
    (tmp_path / "script.py").write_text(script)
    caller = subprocess.Popen([sys.executable, str(tmp_path / "script.py"), str(folder)], stdout=subprocess.DEVNULL)
    helpers = wait_for(lambda: children(caller.pid) if len(children(caller.pid)) == 2 else [])
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    assert len(helpers) == 2
    assert wait_for(lambda: not any(map(is_running, helpers)))


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


def wait_for(condition: Callable[[], object]) -> object:
    for _ in range(200):
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    return condition()


def test_an_answer_that_cannot_be_read_costs_one_shard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in the thread that asks: the shard has an error, and nobody waits for its result."""
    monkeypatch.setattr(scan_pool, "_ALONE", 0.0)
    stranger = "import sys; sys.stdout.buffer.write(b'cnowhere\\nNothing\\n.'); sys.stdout.flush(); sys.stdin.read()"
    monkeypatch.setattr(scan_pool, "_BOOT", stranger)
    results = in_time(lambda: scan_shards(str(folder), names(folder), workers=2, write_indexes=False), 60)
    assert len(results) == 12
    for result in results:
        assert isinstance(result, DatasetError) and "nowhere" in result.what


def test_why_there_is_no_helper_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_pool, "_ALONE", 0.0)
    monkeypatch.setattr(sys, "executable", str(folder / "no python"))
    results = in_time(lambda: scan_shards(str(folder), names(folder), workers=2, write_indexes=False), 60)
    assert all(isinstance(result, DatasetError) and "No such file" in result.what for result in results)
