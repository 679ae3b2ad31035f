"""Check of the tests: put faults into the code, one at a time, and report those that no test notices.

    python tools/mutation_check.py --faults 40 --seed 0
    python tools/mutation_check.py --room order --faults 10

A fault is a small change of one expression or statement: a comparison that is off by its border or turned round, a
number or an index off by one, a condition that always or never holds, two operands exchanged, a statement that is left
out. Types, messages and what is only shown are left alone. Faults are drawn at random from the rooms below, and each is
tried in a copy of the project, with the tests of its room, until the first of them fails: first those that name the
faulty module. That test must pass again without the fault. A fault that all tests pass is shown with its line: either a
test is missing, or the change makes no difference (a cache that is dropped, a bound that is never reached), which a
reader has to decide.

It takes a minute a fault and core, several if no test notices. The exit status is the number of faults that were not
caught.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


def _laws(*names: str) -> list[str]:
    return [f"tests/core/laws/test_{name}.py" for name in names]


#: Where faults are put, and the tests that should find them, those that are quick first.
ROOMS: dict[str, tuple[list[str], list[str]]] = {
    "order": (
        ["energon_lite/order"],
        ["tests/core/order", "tests/core/laws/test_windows.py", "tests/core/laws/test_oracle.py"],
    ),
    "plan": (
        ["energon_lite/batching", "energon_lite/extras/balance"],
        [
            "tests/core/batching",
            "tests/core/recipes/test_doors.py",
            "tests/extras/balance/test_profile_command.py",
            *_laws("token_batches", "token_steps", "token_epochs", "encoded_token_batches", "cost_batches"),
            *_laws("steps", "oracle"),
        ],
    ),
    "cursor": (
        ["energon_lite/loading/iterators", "energon_lite/loading/states"],
        ["tests/core/loading/states", "tests/core/laws", "tests/core/loading/test_interrupts.py"],
    ),
    "reader": (
        ["energon_lite/storage/read", "energon_lite/storage/samples", "energon_lite/extras/energon/joins"],
        [
            "tests/core/storage",
            "tests/core/loading/makers",
            "tests/extras/energon/compat/test_jsonl_files.py",
            "tests/core/recipes/test_doors.py",
            "tests/extras/energon/test_joins.py",
            *_laws("windows", "no_code"),
        ],
    ),
}
#: Seconds after which all tests, or a single one, count as hanging.
_SECONDS, _HANGS = 1800.0, 180

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
    """A change of a file, and the tests that should notice it."""

    path: str
    change: Change
    tests: tuple[str, ...]

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


def possible(room: str) -> list[Fault]:
    """All faults of a room, one of each change of text."""
    folders, tests = ROOMS[room]
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_bytes())
            name = str(path.relative_to(ROOT))
            found += [Fault(name, change, tuple(tests)) for change in dict.fromkeys(changes(tree))]
    return found


def caught_by(fault: Fault, copy: Path) -> str:
    """The test that fails, or hangs, with the fault in a copy of the project, and only with it; empty if none does."""
    path = copy / fault.path
    whole = path.read_bytes()
    path.write_bytes(fault.applied(whole))
    try:
        failed = _failing(_nearest_first(fault, copy), copy)
    finally:
        path.write_bytes(whole)
    if failed and _failing([failed], copy):
        raise RuntimeError(f"{failed} fails without any fault, too")
    return failed


def _nearest_first(fault: Fault, copy: Path) -> list[str]:
    """The files of a fault's tests, those that name its module first."""
    files: list[Path] = []
    for test in fault.tests:
        files += sorted((copy / test).rglob("test_*.py")) if (copy / test).is_dir() else [copy / test]
    module = re.compile(rf"\b{re.escape(Path(fault.path).stem)}\b")
    files = sorted(dict.fromkeys(files), key=lambda file: module.search(file.stem + " " + file.read_text()) is None)
    return [str(file.relative_to(copy)) for file in files]


def _failing(tests: Sequence[str], copy: Path) -> str:
    """The first of some tests that fails or hangs, empty if none does: the quick ones come first, with few examples."""
    return _failing_of("not slow", "check", tests, copy) or _failing_of("not gpu", "default", tests, copy)


def _failing_of(mark: str, profile: str, tests: Sequence[str], copy: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy), "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / ".hypothesis")}
    environment["PYTHONUNBUFFERED"] = "1"  # else the names of tests are lost where one ends the process
    environment["HYPOTHESIS_PROFILE"] = profile
    options = ["-v", "-x", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={_HANGS}"]
    options += ["-m", f"{mark} and not nightly and not gpu"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as hangs:
        return _last_test(hangs.stdout.decode() if hangs.stdout else "") or tests[0]
    if done.returncode in (0, 5):  # 5: no test has the mark
        return ""
    if done.returncode in (3, 4):  # not what a failing test gives
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    named = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return named[-1] if named else _last_test(done.stdout) or tests[0]


def _last_test(output: str) -> str:
    """The last test that was begun."""
    begun = re.findall(r"^(tests/\S+::\S+)", output, re.MULTILINE)
    return begun[-1] if begun else ""


def _copied(into: Path) -> Path:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.splitlines():
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return into


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--room", action="append", choices=sorted(ROOMS), help="default: all, in turn")
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    rooms = options.room or sorted(ROOMS)
    drawn: list[Fault] = []
    for place, room in enumerate(rooms):  # the same of a room, whichever others there are
        count = len(range(place, options.faults, len(rooms)))
        drawn += random.Random(f"{options.seed} {room}").sample(possible(room), count)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as threads:
        copies = [_copied(Path(folder, str(number))) for number in range(options.processes)]

        def tried(fault: Fault) -> str:
            copy = copies.pop()
            try:
                return caught_by(fault, copy)
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
