"""Check of the tests: put faults into the code, one at a time, and report those that no test notices.

    python tools/mutation_check.py --faults 40 --seed 0
    python tools/mutation_check.py --part core --faults 10
    python tools/mutation_check.py --module energon_lite/order --faults 10

A fault is a small change of one expression or statement: a comparison that is off by its border or turned round, a
number or an index off by one, a condition that always or never holds, two operands exchanged, a statement that is left
out. Types, messages and what is only shown are left alone. Faults are drawn at random from the files of a part of the
package: the core, the trainer, the extras. Each is tried in a copy of the project, with the test files that are nearest
to it, until the first test fails: files that use the names defined around the fault come first, then those that name
its module, then those that use a module that imports it. That test must pass again without the fault. A fault that all
these tests pass is shown with its line: either a test is missing, or it is further away (``--files``), or the change
makes no difference (a cache that is dropped, a bound that is never reached), which a reader has to decide.

It takes half a minute a fault and core, several minutes if no test notices. The exit status is the number of faults
that were not caught.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import hypothesis  # noqa: F401  # the imports that are slow, for the forks
import pytest
import torch.distributed.checkpoint
import torch.distributed.tensor
import torch.utils.data  # noqa: F401

ROOT = Path(__file__).parents[1]


PACKAGE = ROOT / "energon_lite"
#: Folders of the parts of the package; the core is everything else.
PARTS = {"core": "", "extras": "energon_lite/extras", "trainer": "energon_lite/trainer"}
#: Seconds after which all tests, or a single one, count as hanging.
_SECONDS, _HANGS = 600.0, 180
#: Test files with slow tests are tried up to this place among the nearest.
_SLOW_FILES = 4

#: Of these functions and calls people read the result.
_SHOWN = {"__repr__", "__str__"}
_TELLING = re.compile(r"(logger|warnings)\.|(print|warn)\(")

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_EXCHANGED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


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

    def describe(self, source: bytes) -> str:
        first = self.change.start[0]
        was = source.split(b"\n")[first - 1].decode().strip()
        now = self.applied(source).split(b"\n")[first - 1].decode().strip()
        return f"{self.path}:{first}\n    - {was}\n    + {now}"


def changes(tree: ast.AST) -> Iterator[Change]:
    """The faults that can be put into a module."""
    for old, text in _replacements(tree):
        assert old.end_lineno is not None and old.end_col_offset is not None
        yield Change((old.lineno, old.col_offset), (old.end_lineno, old.end_col_offset), text)
    for child in ast.iter_child_nodes(tree):
        if not _is_telling(child) and child not in (getattr(tree, "annotation", None), getattr(tree, "returns", None)):
            yield from changes(child)


def _is_telling(node: ast.AST) -> bool:
    """Whether a node only says something to people."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call) and _TELLING.match(ast.unparse(node)) is not None
    if isinstance(node, ast.FunctionDef):
        return node.name in _SHOWN
    return isinstance(node, (ast.Raise, ast.JoinedStr))


def _replacements(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        turned = _TURNED[type(node.ops[0])]
        yield node, f"({ast.unparse(ast.Compare(node.left, [turned()], node.comparators))})"
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
            found += [Fault(name, change) for change in dict.fromkeys(changes(ast.parse(path.read_bytes())))]
    return found


def _part_of(name: str) -> str:
    return next((part for part, folder in PARTS.items() if folder and name.startswith(f"{folder}/")), "core")


def caught_by(fault: Fault, copy: Path, tests: Sequence[str]) -> str:
    """The test that fails, or hangs, with the fault in a copy of the project, and only with it; empty if none does."""
    path = copy / fault.path
    whole = path.read_bytes()
    while True:
        path.write_bytes(fault.applied(whole))
        try:
            failed = _failing(tests, copy)
        finally:
            path.write_bytes(whole)
        if failed in _good or not failed or not _failing([failed], copy):
            _good.add(failed)
            return failed
        print(f"left out: {failed} fails without any fault, too", flush=True)
        _bad.append(failed)


#: Tests that pass without any fault, and those that fail here without any.
_good: set[str] = set()
_bad: list[str] = []


class Nearness:
    """How near test files are to a place in the code, by the names that both use; rare names count more."""

    def __init__(self) -> None:
        files = sorted((ROOT / "tests").rglob("test_*.py"))
        texts = {str(file.relative_to(ROOT)): file.read_text() for file in files}
        self._tests = {name: (text, set(re.findall(r"\w+", text)), _words(name)) for name, text in texts.items()}
        self._users = Counter(word for _, words, _ in self._tests.values() for word in words)
        self._places = Counter(word for *_, place in self._tests.values() for word in place)
        self._modules = {str(path.relative_to(ROOT)): path.read_text() for path in PACKAGE.rglob("*.py")}

    def nearest(self, fault: Fault, count: int) -> list[str]:
        """The ``count`` nearest test files, nearest first."""
        module = fault.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        named = re.compile(rf"\b{re.escape(module)}\b")
        tree = ast.parse(self._modules[fault.path])
        around, own = set(_around(tree, fault.change.start[0])), _public(tree)
        users = {name for name, text in self._modules.items() if named.search(text) and name != fault.path}
        indirect = set().union(*(_public(ast.parse(self._modules[name])) for name in users), set())

        def nearness(name: str) -> tuple[float, int]:
            text, words, place = self._tests[name]
            names = 4 * self._weight(around & words) + self._weight(own & words) + 0.5 * self._weight(indirect & words)
            places = sum(2 / self._places[word] ** 0.5 for word in place & _words(fault.path))
            return names + 4 * bool(named.search(text)) + places, -len(text)

        return sorted(self._tests, key=nearness, reverse=True)[:count]

    def _weight(self, names: Collection[str]) -> float:
        return min(sum(4 / (3 + self._users[name]) for name in names), 3.0)


def _words(path: str) -> set[str]:
    """The words in the folders and the name of a file."""
    return set(re.split(r"[/_.]", path)) - {"energon", "lite", "tests", "test", "py"}


def _around(tree: ast.AST, line: int) -> Iterator[str]:
    """Names of the functions and classes that a line is in."""
    for node in ast.walk(tree):
        is_definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if is_definition and node.lineno <= line <= (node.end_lineno or line) and not node.name.startswith("__"):
            yield node.name


def _public(tree: ast.Module) -> set[str]:
    """Names of the functions and classes that a module defines for others."""
    nodes = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    return {node.name for node in nodes if not node.name.startswith("_")}


def _failing(tests: Sequence[str], copy: Path) -> str:
    """The first of some tests that fails or hangs, empty if none does: the quick ones come first, with few examples."""
    return _failing_of("not slow", "check", tests, copy) or _failing_of("slow", "default", tests[:_SLOW_FILES], copy)


def _failing_of(mark: str, profile: str, tests: Sequence[str], copy: Path) -> str:
    options = ["-x", "-n0", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={_HANGS}"]
    options += ["-m", f"{mark} and not nightly and not gpu", *(f"--deselect={test}" for test in _bad), *tests]
    begun = _Begun(copy / "begun.txt")
    code = _run_tests(options, copy, profile, begun)
    if code in (0, 5):  # 5: no test has the mark
        return ""
    if code in (3, 4):  # not what a failing test gives
        raise RuntimeError((copy / "output.txt").read_text(errors="replace")[-4000:])
    return begun.file.read_text() or tests[0]


class _Begun:
    """A plugin of pytest that writes down the last test that was begun."""

    def __init__(self, file: Path):
        self.file = file
        file.write_text("")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.file.write_text(nodeid)


def _run_tests(options: Sequence[str], copy: Path, profile: str, plugin: _Begun) -> int | None:
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
            os.environ["HYPOTHESIS_PROFILE"] = profile
            code = int(pytest.main([*options], [plugin]))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _copied(into: Path) -> Path:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.splitlines():
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
    parser.add_argument("--files", type=int, default=12, help="test files that are tried for a fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    drawn: list[Fault] = []
    for part in options.part or sorted(PARTS):  # the same of a part, whichever others there are
        faults = possible(part, options.module)
        random.Random(f"{options.seed} {part}").shuffle(faults)
        drawn += faults[options.first : options.faults]
    near = Nearness()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as threads:
        copies = [_copied(Path(folder, str(number))) for number in range(options.processes)]

        def tried(fault: Fault) -> str:
            copy = copies.pop()
            try:
                return caught_by(fault, copy, near.nearest(fault, options.files))
            finally:
                copies.append(copy)

        missed = 0
        lines = [fault.describe((ROOT / fault.path).read_bytes()) for fault in drawn]  # before anyone edits them
        for shown, test in zip(lines, threads.map(tried, drawn), strict=True):
            missed += not test
            print(f"caught {shown}\n    by {test}" if test else f"MISSED {shown}", flush=True)
    print(f"{len(drawn) - missed} of {len(drawn)} faults were caught")
    return missed


if __name__ == "__main__":
    sys.exit(main())
