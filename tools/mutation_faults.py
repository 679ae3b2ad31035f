"""Faults that can be put into the code, for ``mutation_check.py``: small changes of one expression or statement."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "energon_lite"
#: Folders of the parts of the package; the core is everything else.
PARTS = {"core": "", "extras": "energon_lite/extras", "trainer": "energon_lite/trainer"}

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
