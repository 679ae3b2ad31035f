"""Count the lines, files, names and arrows of the package, and print them beside their limits.

    python tools/count_house.py

A *code line* holds at least one token that is neither a comment nor part of a docstring. A part of the package is the
first of its folders that :data:`PARTS` names; whatever is named nowhere is core. Imports under ``TYPE_CHECKING`` count
like all others, and so do those of a package's stub, by which the package exports names. The exit status is 0 whatever
the counts are: the table is to be read.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = "energon_lite"
#: Folders of the package that are not core.
PARTS = ("trainer", "extras")
#: First words of a docstring that does not name its thing.
RELATIVE_WORDS = re.compile(r"(Which|What|Who|Whose|Whether|How|Where|When)\b")
#: A short file has fewer lines than this; a long one more than :data:`LONG`.
SHORT = 60
LONG = 400
#: Statements of a newcomer's first script, in a fresh process.
FIRST_USE = "from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset"
#: Processes in which these statements are timed.
FIRST_USES = 5
#: Nodes that may have a docstring.
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
#: Tokens that make no code line.
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Row(NamedTuple):
    """One line of the table: what is counted, how many, and the most there may be."""

    name: str
    count: float
    limit: float | None = None


class Module(NamedTuple):
    """A source file, parsed."""

    name: str
    lines: int
    code: int
    tree: ast.Module

    @property
    def part(self) -> str:
        inside = self.name.split(".")[1:]
        return next((part for part in PARTS if part in inside[:1]), "core")

    def docstrings(self) -> Iterator[str]:
        """Docstrings of the module, its classes and its functions."""
        for node in ast.walk(self.tree):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text:
                yield text

    def imports(self, known: set[str]) -> set[str]:
        """Modules of the package that this one imports, anywhere in it."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                # Only stubs have relative imports, and a stub is part of its package.
                module = resolve_name("." * node.level + node.module, self.name)
                found |= {f"{module}.{alias.name}" for alias in node.names} & known or {module}
        return {name for name in found if name.split(".")[0] == PACKAGE and name != self.name}


def code_lines(source: str) -> int:
    """Lines of a file with code in them."""
    tree = ast.parse(source)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            text = node.body[0]
            docstrings.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def modules_of(folder: Path) -> list[Module]:
    """All source files below a folder."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        source, stub = path.read_text(), path.with_suffix(".pyi")
        tree = ast.parse(source)
        if stub.exists():
            tree.body += ast.parse(stub.read_text()).body
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, source.count("\n"), code_lines(source), tree))
    return found


def public_names() -> int:
    """Names that the package exports at its top."""
    done = _run("import energon_lite; print(len(energon_lite.__all__))")
    return int(done)


def first_use() -> tuple[int, float]:
    """Modules of ours that a first script imports, and their time as a share of torch's: CPU seconds, the median of
    several fresh processes, with the bytecode that Python keeps from the first import on."""
    count = _run(f"import sys; {FIRST_USE}; print(sum(name.split('.')[0] == '{PACKAGE}' for name in sys.modules))")
    clock = "from time import process_time as now; start = now(); import torch; middle = now(); "
    shares = [float(_run(f"{clock}{FIRST_USE}; print((now() - middle) / (middle - start))")) for _ in range(FIRST_USES)]
    return int(count), median(shares)


def _run(code: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=kept, check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


def rows() -> Iterator[Row]:
    """The whole table."""
    modules = modules_of(ROOT / PACKAGE)
    known = {module.name for module in modules}
    code, files = Counter[str](), Counter[str]()
    importers: dict[str, set[str]] = defaultdict(set)
    outward = 0
    part_of = {module.name: module.part for module in modules}
    for module in modules:
        code[module.part] += module.code
        files[module.part] += 1
        for name in module.imports(known):
            importers[name].add(module.name)
            outward += module.part == "core" and part_of.get(name, "core") != "core"
    yield Row("code lines of the core", code["core"], 14_000)
    yield Row("files of the core", files["core"], 150)
    yield Row("code lines of the trainer", code["trainer"], 7_500)
    yield Row("code lines of the extras", code["extras"])
    yield Row("code lines in all", sum(code.values()), 40_000)
    yield Row("files in all", len(modules), 330)
    yield Row("imports from the core into extras or the trainer", outward, 0)
    yield Row(f"files under {SHORT} lines", sum(module.lines < SHORT for module in modules))
    yield Row(f"files over {LONG} lines", sum(module.lines > LONG for module in modules), 0)
    yield Row("modules with one importer", sum(len(those) == 1 for those in importers.values()))
    yield Row("public names at the top", public_names(), 45)
    count, share = first_use()
    yield Row("modules that a first script imports", count, 120)
    yield Row("their time, as a share of torch's", round(share, 2), 0.15)
    texts = [text for module in modules for text in module.docstrings()]
    yield Row("docstrings that begin with Which, What, Who ...", sum(bool(RELATIVE_WORDS.match(t)) for t in texts), 0)
    pages = (ROOT / "docs").rglob("*.md")
    yield Row("words of the documentation", sum(len(page.read_text().split()) for page in pages), 50_000)
    yield Row("code lines of the tests", sum(module.code for module in modules_of(ROOT / "tests")), 38_000)


def main() -> None:
    print(f"{'':52}{'now':>9}{'at most':>9}")
    for row in rows():
        limit = "" if row.limit is None else f"{row.limit:,}"
        over = row.limit is not None and row.count > row.limit
        print(f"{row.name:52}{row.count:>9,}{limit:>9}{'  over' if over else ''}")


if __name__ == "__main__":
    main()
