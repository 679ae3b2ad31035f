"""Check of the tests: put faults into the code, one at a time, and report those that no test notices.

    python tools/mutation_check.py --faults 40 --seed 0
    python tools/mutation_check.py --part core --faults 10
    python tools/mutation_check.py --module energon_lite/order --faults 10

A fault is a small change of one expression or statement: a comparison that is off by its border or turned round, a
number or an index off by one, a condition that always or never holds, two operands exchanged, a statement that is left
out. Types, messages, what is only shown, and constants that say how long, how much or which version are left alone.
Faults are drawn at random from the files of a part of the package: the core, the trainer, the extras. An edit elsewhere
draws no others, so that trees can be compared. Each is tried in a copy of the project, with the tests that execute its
block of code, until the first fails: quick tests come first, and those that execute little else. That test must pass
again without the fault. A fault that all these tests pass is shown with its line: either a test is missing, or the
change makes no difference (a cache that is dropped, a bound that is never reached), which a reader has to decide.

The blocks that each test executes are recorded by one run of all tests, at the first use after a commit, and kept in
``build/``. Then it takes half a minute a fault and core, several minutes if no test notices. The exit status is the
number of faults that were not caught.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import Path

import hypothesis  # noqa: F401  # the imports that are slow, for the forks
import pytest
import torch.distributed.checkpoint
import torch.distributed.tensor
import torch.utils.data  # noqa: F401
from executed_blocks import COUNT, HIT, HITS, SECONDS, Probes, number_of
from mutation_faults import PACKAGE, PARTS, ROOT, Fault, drawn, possible

#: Seconds after which all tests, or a single one, count as hanging.
_SECONDS, _HANGS = 600.0, 90
#: Bytes of memory that a process of a test may have: a fault can fill it without end.
_MEMORY = 8 << 30
#: Number of test files that are collected at first.
_FIRST_FILES = 4


def caught_by(fault: Fault, copy: Path, tests: Sequence[str]) -> str:
    """The first test that fails or hangs with the fault in a copy of the project, twice, and not without it; empty if
    none does."""
    path = copy / fault.path
    whole = path.read_bytes()

    def failing(tests: Sequence[str]) -> str:
        path.write_bytes(fault.applied(whole))
        try:
            return _failing(tests, copy)
        finally:
            path.write_bytes(whole)

    while failed := failing([test for test in tests if test not in _unsteady]):
        if not _failing([failed], copy) and failing([failed]):
            return failed
        print(f"left out: {failed} fails without any fault, too, or not each time", flush=True)
        _unsteady.add(failed)
        tests = tests[tests.index(failed) + 1 :]  # those before it pass
    return ""


#: Tests that fail here without any fault, or not each time.
_unsteady: set[str] = set()


class Record:
    """The blocks that each quick or slow test executes, and its seconds: from one run of all tests, kept by commit."""

    def __init__(self) -> None:
        commit = _git("rev-parse", "HEAD").strip()
        folder = ROOT / "build" / "executed" / commit
        if not folder.exists():
            _record(folder)
        self._blocks = json.loads((folder / "blocks.json").read_text())
        took = (line.split(" ", 1) for line in (folder / SECONDS.name).read_text().splitlines())
        self._tests = {number_of(test): (float(seconds), test) for seconds, test in took}
        self._executing: defaultdict[int, set[int]] = defaultdict(set)
        for test, probe in HIT.iter_unpack((folder / HITS.name).read_bytes()):
            self._executing[probe].add(test)
        self._all = Counter(chain.from_iterable(self._executing.values()))

    def executing(self, fault: Fault, seconds: float) -> list[str]:
        """Tests that execute the block of a fault, else its file, else what imports it, of so many seconds together:
        quick ones come first, and those that execute little else."""
        line = fault.change.start[0]
        around = [(first, probe) for first, last, probe in self._blocks[fault.path] if first <= line <= last]
        module = fault.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        users = [name for name in self._blocks if re.search(rf"\b{module}\b", (ROOT / name).read_text())]
        own = self._counted(fault.path) or sum(map(self._counted, users), Counter())
        tests = self._executing[max(around, default=(0, -1))[1]] or own
        costs = {test: self._tests[test][0] * self._all[test] / own[test] for test in tests if test in self._tests}
        ranked = [self._tests[test] for test in sorted(costs, key=costs.__getitem__)]
        count = 1 + bisect(list(accumulate(took for took, _ in ranked)), seconds)
        chosen = [test for _, test in ranked[:count]]
        files = {file: place for place, file in enumerate(dict.fromkeys(map(_file_of, chosen)))}
        return sorted(chosen, key=lambda test: files[_file_of(test)])

    def _counted(self, path: str) -> Counter[int]:
        """The tests that execute blocks of a file: how many each."""
        return Counter(test for *_, probe in self._blocks[path] for test in self._executing[probe])


def _record(folder: Path) -> None:
    """Run all tests once in a copy that has probes: as long as all tests take."""
    with tempfile.TemporaryDirectory() as place:
        copy = _copied(Path(place))
        shutil.copy(Path(__file__).with_name("executed_blocks.py"), copy)
        probes = Probes()
        for path in sorted((copy / PACKAGE.name).rglob("*.py")):
            probes.put_into(path, str(path.relative_to(copy)))
        (copy / COUNT.name).write_text(str(probes.count))
        command = [sys.executable, "-m", "pytest", "-q", f"-n{os.cpu_count()}", "-p", "executed_blocks"]
        command += ["-p", "no:cacheprovider", "--ignore=tests/house", "-m", "not nightly and not gpu"]
        subprocess.run(command, cwd=copy, env={**os.environ, "PYTHONPATH": place, "HYPOTHESIS_PROFILE": "check"})
        folder.mkdir(parents=True)
        for file in (HITS, SECONDS):
            shutil.copy(copy / file.name, folder)
        (folder / "blocks.json").write_text(json.dumps(probes.blocks))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _failing(tests: Sequence[str], copy: Path) -> str:
    """The first of some tests that fails or hangs, empty if none does: few files are collected at first, then more."""
    options = ["-x", "-n0", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={_HANGS}"]
    files = list(dict.fromkeys(map(_file_of, tests)))
    for part in (files[:_FIRST_FILES], files[_FIRST_FILES : 4 * _FIRST_FILES], files[4 * _FIRST_FILES :]):
        plugin = _Chosen([test for test in tests if _file_of(test) in part], copy / "begun.txt")
        code = _run_tests([*options, *part], copy, plugin) if part else 0
        if code in (3, 4):  # not what a failing test gives
            raise RuntimeError((copy / "output.txt").read_text(errors="replace")[-4000:])
        if code not in (0, 5):  # 5: no test has one of these names
            return plugin.file.read_text() or next(test for test in tests if _file_of(test) in part)
    return ""


def _file_of(test: str) -> str:
    return test.partition("::")[0]


class _Chosen:
    """A plugin of pytest that runs some tests alone, in their order, and writes down the last that was begun."""

    def __init__(self, tests: Sequence[str], file: Path):
        self.file, self._places = file, {test: place for place, test in enumerate(tests)}
        file.write_text("")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._places]
        items.sort(key=lambda item: self._places[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.file.write_text(nodeid)


def _run_tests(options: Sequence[str], copy: Path, plugin: _Chosen) -> int | None:
    """The exit status of pytest in a copy of the project; None: it took too long.

    It runs in a fork of this process, which has imported what takes long and is no part of the project.
    """
    child = os.fork()
    if not child:
        code = 3
        try:
            os.setsid()
            file = os.open(copy / "output.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.chdir(copy)
            sys.path.insert(0, str(copy))
            sys.argv[:] = ["pytest"]
            os.environ |= {"PYTHONPATH": str(copy), "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / ".hypothesis")}
            os.environ["HYPOTHESIS_PROFILE"] = "check"
            resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
            code = int(pytest.main([*options], [plugin]))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + _SECONDS
    pid = status = 0
    while not pid and time.monotonic() < end:
        time.sleep(0.1)
        pid, status = os.waitpid(child, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also the processes that tests have left behind
    if not pid:
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(status)


def _copied(into: Path) -> Path:
    for name in _git("ls-files").splitlines():
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return into


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="default: all, in turn")
    parser.add_argument("--module", default="", help="only faults of this file, or of the files in this folder")
    parser.add_argument("--faults", type=int, default=40, help="of each part")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them, to continue a run")
    parser.add_argument("--seconds", type=float, default=300, help="of tests that are tried for a fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    faults: list[Fault] = []
    for part in options.part or sorted(PARTS):
        faults += drawn(possible(part, options.module), options.seed)[options.first : options.faults]
    record = Record()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as threads:
        copies = [_copied(Path(folder, str(number))) for number in range(options.processes)]

        def tried(fault: Fault) -> str:
            copy = copies.pop()
            try:
                return caught_by(fault, copy, record.executing(fault, options.seconds))
            finally:
                copies.append(copy)

        missed = 0
        lines = [fault.describe((ROOT / fault.path).read_bytes()) for fault in faults]  # before anyone edits them
        for shown, test in zip(lines, threads.map(tried, faults), strict=True):
            missed += not test
            print(f"caught {shown}\n    by {test}" if test else f"MISSED {shown}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults were caught")
    return missed


if __name__ == "__main__":
    sys.exit(main())
