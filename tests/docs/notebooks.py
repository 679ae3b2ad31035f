"""Notebooks: their cells are run, and what they print is written into them, or compared with what is written there.

    python tests/docs/notebooks.py      # runs the notebooks in examples/notebooks, and writes what they print

There is no need of Jupyter for that: cells are Python, and lines of the shell that begin with ``!``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
#: A line of the shell, with those that go on behind a backslash.
_SHELL = re.compile(r"^!((?:.*\\\n)*.*)$", re.M)


def code_cells(path: Path) -> Iterator[dict[str, Any]]:
    """The cells of a notebook that are run."""
    yield from (cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code")


def printed(path: Path, folder: Path) -> list[str]:
    """What each cell prints when the notebook is run in a folder."""
    module = types.ModuleType(f"notebook_{path.stem}")
    module.__dict__["_shell"] = _shell
    before, found = os.getcwd(), []
    sys.modules[module.__name__] = module
    os.chdir(folder)
    try:
        for number, cell in enumerate(code_cells(path), 1):
            source = _SHELL.sub(lambda line: f"_shell({line[1]!r})", "".join(cell["source"]))
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(source, f"{path.name}[{number}]", "exec"), module.__dict__)
            found.append(output.getvalue())
    finally:
        os.chdir(before)
        del sys.modules[module.__name__]
    return found


def written(path: Path) -> list[str]:
    """What each cell is said to print."""
    return ["".join(text for output in cell["outputs"] for text in output["text"]) for cell in code_cells(path)]


def _shell(command: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, shell=True, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    print(done.stdout, end="")


def _write(path: Path) -> None:
    notebook = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        texts = printed(path, Path(folder))
    for number, (cell, text) in enumerate(
        zip([one for one in notebook["cells"] if one["cell_type"] == "code"], texts, strict=True), 1
    ):
        lines = text.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        cell["execution_count"] = number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for notebook in sorted(FOLDER.glob("*.ipynb")):
        _write(notebook)
