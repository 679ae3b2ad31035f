"""Record of the blocks of code that each test executes, for ``tools/mutation_check.py``.

A copy of the project gets a probe at the start of each block in a function: ``if PROBES[7]: hit(7)``. A probe that is
reached writes its number and that of the test into a file, once a test and process, and is then off until the next
test. So forked workers, and programs that a test starts, are recorded as well, and code in loops stays fast.

This file lies in the copy, too: probes import it, and pytest loads it as a plugin.
"""

from __future__ import annotations

import ast
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
#: Files in the copy: the number of probes, the hits, the seconds of the tests.
COUNT, HITS, SECONDS = _HERE / "probes.txt", _HERE / "hits.bin", _HERE / "seconds.txt"
#: Numbers of a test and of a probe.
HIT = struct.Struct("<II")

#: One byte of each probe: whether it writes its next hit.
PROBES = bytearray(b"\1") * int(COUNT.read_text() if COUNT.exists() else 0)
_file = os.open(HITS, os.O_APPEND | os.O_CREAT | os.O_WRONLY) if PROBES else -1
_test = int(os.environ.get("RECORDED_TEST", 0))


def hit(probe: int) -> None:
    PROBES[probe] = 0
    with suppress(OSError):  # a daemon has closed all its files
        os.write(_file, HIT.pack(_test, probe))


def number_of(test: str) -> int:
    """The number of a test in the record."""
    return zlib.crc32(test.encode())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run quick tests first, so that a record that is cut off has them."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _test
    _test = number_of(item.nodeid)
    os.environ["RECORDED_TEST"] = str(_test)
    PROBES[:] = b"\1" * len(PROBES)
    start = time.monotonic()
    done = yield
    with SECONDS.open("a") as file:
        file.write(f"{time.monotonic() - start:.3f} {item.nodeid}\n")
    return done


class Probes:
    """The probes of all files of a copy; ``blocks``: first line, last line and probe of each block."""

    def __init__(self) -> None:
        self.count = 0
        self.blocks: dict[str, list[tuple[int, int, int]]] = {}

    def put_into(self, path: Path, name: str) -> None:
        """Put probes into a file."""
        tree, blocks = ast.parse(path.read_bytes()), self.blocks.setdefault(name, [])
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for node in dict.fromkeys(chain.from_iterable(map(ast.walk, functions))):
            for field in ("body", "orelse", "finalbody"):
                body = getattr(node, field, None)
                if isinstance(body, list) and body and not isinstance(node, ast.ClassDef):
                    blocks.append((body[0].lineno, body[-1].end_lineno or 0, self.count))
                    at = int(_is_text(body[0]))
                    body[at:at] = ast.parse(f"if _PROBES[{self.count}]: _hit({self.count})").body
                    self.count += 1
        head = sum(_is_text(node) or getattr(node, "module", "") == "__future__" for node in tree.body[:2])
        tree.body[head:head] = ast.parse("from executed_blocks import PROBES as _PROBES, hit as _hit").body
        path.write_text(ast.unparse(tree))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
