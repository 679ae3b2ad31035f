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
import ast
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
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import NamedTuple

import hypothesis  # noqa: F401  # the imports that are slow, for the forks
import pytest
import torch.distributed.checkpoint
import torch.distributed.tensor
import torch.utils.data  # noqa: F401
from executed_blocks import COUNT, HIT, HITS, SECONDS, Probes, number_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "energon_lite"
#: Folders of the parts of the package; the core is everything else.
PARTS = {"core": "", "extras": "energon_lite/extras", "trainer": "energon_lite/trainer"}
#: Seconds after which all tests, or a single one, count as hanging.
_SECONDS, _HANGS = 600.0, 90
#: Bytes of memory that a process of a test may have: a fault can fill it without end.
_MEMORY = 8 << 30
#: Number of test files that are collected at first.
_FIRST_FILES = 4

#: Of these functions and calls people read the result.
_SHOWN = {"__repr__", "__str__"}
_TELLING = re.compile(r"(logger|warnings)\.|(print|warn)\(")
#: A constant that says how long, how much or which version, by the first words above it or its unit; and arguments
#: that do.
_TUNED = re.compile(
    r"^(#: (The )?(Seconds|Share|Threads|Bound|Upper bound|Largest|Smallest|Least|Fewest|Most|Version of)\b.*\n"
    r"(#:.*\n)*\w.*)"
    r"|^_[A-Z_]+ = \d+ << [123]0$",
    re.I | re.M,
)
_TUNED_ARGUMENTS = {"timeout", "maxsize", "stacklevel", "max_workers", "buffering", "indent"}
_PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
_PAIRS += [(ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)]
#: Another operator for each.
_EXCHANGED = {ast.Mod: ast.FloorDiv} | {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}


class Change(NamedTuple):
    """Other text for a stretch of a file."""

    start: tuple[int, int]  # line, from 1, and byte in it
    stop: tuple[int, int]
    text: str


@dataclass(frozen=True)
class Fault:
    """A change of a file."""

    path: str
    change: Change

    def applied(self, source: bytes) -> bytes:
        lines = source.split(b"\n")
        (first, begin), (last, end) = self.change.start, self.change.stop
        head, tail = lines[first - 1][:begin], lines[last - 1][end:]
        return b"\n".join([*lines[: first - 1], head + self.change.text.encode() + tail, *lines[last:]])

    def lines(self, source: bytes) -> str:
        """Its first line without and with the change."""
        first = self.change.start[0] - 1
        was, now = (text.split(b"\n")[first].decode().strip() for text in (source, self.applied(source)))
        return f"    - {was}\n    + {now}"

    def describe(self, source: bytes) -> str:
        return f"{self.path}:{self.change.start[0]}\n{self.lines(source)}"


def changes(tree: ast.AST, told: Collection[str] = ()) -> Iterator[Change]:
    """The faults that can be put into a module; ``told``: names of what only says something to people."""
    if isinstance(tree, (ast.Module, ast.FunctionDef)):
        told = {*told, *_only_told(tree)}
    for old, text in _replacements(tree):
        assert old.end_lineno is not None and old.end_col_offset is not None
        yield Change((old.lineno, old.col_offset), (old.end_lineno, old.end_col_offset), text)
    for child in ast.iter_child_nodes(tree):
        types = (getattr(tree, "annotation", None), getattr(tree, "returns", None))
        if child not in types and not _is_telling(child, told):
            yield from changes(child, told)


def _is_telling(node: ast.AST, told: Collection[str] = ()) -> bool:
    """Whether a node only says something to people, or how long or how much."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call) and _TELLING.match(ast.unparse(node)) is not None
    if isinstance(node, ast.FunctionDef):
        return node.name in _SHOWN or node.name in told
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id in told for target in node.targets)
    return isinstance(node, (ast.Raise, ast.JoinedStr)) or getattr(node, "arg", "") in _TUNED_ARGUMENTS


def _only_told(tree: ast.Module | ast.FunctionDef) -> set[str]:
    """Private names of a module, or names in a function, that are read, and only by what says something to people."""
    read: dict[str, bool] = {}

    def look(node: ast.AST, telling: bool) -> None:
        telling |= _is_telling(node)
        name = getattr(node, "id", getattr(node, "attr", ""))
        if name and isinstance(getattr(node, "ctx", None), ast.Load):
            read[name] = telling and read.get(name, True)
        for child in ast.iter_child_nodes(node):
            look(child, telling)

    look(tree, False)
    return {name for name, told in read.items() if told and (name[0] == "_" or isinstance(tree, ast.FunctionDef))}


def _replacements(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, f"({ast.unparse(ast.Compare(node.left, [_EXCHANGED[type(node.ops[0])]()], node.comparators))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _EXCHANGED:
        yield node, f"({ast.unparse(ast.BinOp(node.left, _EXCHANGED[type(node.op)](), node.right))})"
    elif isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1 << 10:
        yield node, f"({node.value + 1})"
    elif isinstance(node, ast.BoolOp):
        yield node, f"({ast.unparse(node.values[0])})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"bool({ast.unparse(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield node.test, "True"
    elif isinstance(node, ast.If) and not _is_import_guard(node):
        yield node.test, "False"
    elif isinstance(node, (ast.AugAssign, ast.Continue, ast.Break)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield node, "pass"


def _is_import_guard(node: ast.If) -> bool:
    return "TYPE_CHECKING" in ast.unparse(node.test) or "__name__" in ast.unparse(node.test)


def possible(part: str, below: str = "") -> list[Fault]:
    """All faults of a part, one of each change of text; ``below``: only of this file, or of files in this folder."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if _part_of(name) == part and f"{name}/".startswith(f"{below.rstrip('/')}/" if below else ""):
            source, drawn = path.read_text(), dict.fromkeys(changes(ast.parse(path.read_bytes())))
            tuned = {source.count("\n", 0, match.end()) + 1 for match in _TUNED.finditer(source)}
            found += [Fault(name, change) for change in drawn if change.start[0] not in tuned]
    return found


def drawn(faults: Sequence[Fault], seed: int) -> list[Fault]:
    """Faults in a random order. The place of each depends only on its lines, and on how many of the same precede it."""
    seen: Counter[str] = Counter()
    places = {}
    for path, group in groupby(faults, key=lambda fault: fault.path):
        source = (ROOT / path).read_bytes()
        for fault in group:
            text = f"{path} {fault.lines(source)}"
            seen[text] += 1
            places[fault] = blake2b(f"{seed} {seen[text]} {text}".encode()).digest()
    return sorted(faults, key=places.__getitem__)


def _part_of(name: str) -> str:
    return next((part for part, folder in PARTS.items() if folder and name.startswith(f"{folder}/")), "core")


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
