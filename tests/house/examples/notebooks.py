"""Run a notebook without Jupyter: its code cells in order, in one namespace, in a folder of its own.

    python tests/house/examples/notebooks.py examples/notebooks/NAME.ipynb  # runs it, and writes its output into it

Cells are plain Python, and lines of the shell that begin with ``!``. What they print is kept as text, and each
``plt.show()`` as a picture.
"""

from __future__ import annotations

import base64
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

Output = dict[str, Any]
#: A line of the shell, with those that go on behind a backslash.
_SHELL = re.compile(r"^!((?:.*\\\n)*.*)$", re.M)


def run(path: Path, folder: Path) -> list[list[Output]]:
    """Run a notebook in a folder.

    Args:
        path: of the ``.ipynb`` file.
        folder: the current one while it runs; the notebook's own lies in front of Python's path, as in Jupyter.

    Returns:
        The outputs of each code cell, in the notebook's own form.
    """
    import matplotlib.pyplot as plt

    module = types.ModuleType(f"notebook_{path.stem}")
    module.__dict__["_shell"] = _shell
    sys.modules[module.__name__] = module  # classes made in it travel between workers and this process
    outputs: list[list[Output]] = []
    before = Path.cwd()
    os.chdir(folder)
    show = plt.show
    try:
        for number, cell in enumerate(code_cells(path)):
            source = _SHELL.sub(lambda line: f"_shell({line[1]!r})", cell)
            found: list[Output] = []
            plt.show = lambda found=found: found.append(_picture())
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(source, f"{path.name}:{number}", "exec"), module.__dict__)
            if printed.getvalue():
                found.insert(0, {"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
            outputs.append(found)
    finally:
        plt.show = show
        os.chdir(before)
        del sys.modules[module.__name__]
    return outputs


def _shell(command: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, shell=True, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    print(done.stdout, end="")


def code_cells(path: Path) -> Iterator[str]:
    """The code of each code cell."""
    return ("".join(cell["source"]) for cell in _cells(path) if cell["cell_type"] == "code")


def stored(path: Path) -> list[list[Output]]:
    """The outputs that a notebook was saved with."""
    return [cell["outputs"] for cell in _cells(path) if cell["cell_type"] == "code"]


def printed(outputs: list[list[Output]]) -> list[str]:
    """What each cell printed."""
    return ["".join("".join(one["text"]) for one in cell if one["output_type"] == "stream") for cell in outputs]


def _cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return cells


def _picture() -> Output:
    """The current figure, which is closed."""
    import matplotlib.pyplot as plt

    data, figure = io.BytesIO(), plt.gcf()
    said = figure.get_label() or "a figure"
    figure.savefig(data, format="png", dpi=90, metadata={"Software": None})
    plt.close(figure)
    content = {"image/png": base64.b64encode(data.getvalue()).decode(), "text/plain": [str(said)]}
    return {"data": content, "metadata": {}, "output_type": "display_data"}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _write(path: Path) -> None:
    """Run a notebook, and save what came out."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = iter(run(path.resolve(), Path(folder)))
    document = json.loads(path.read_text())
    number = 0
    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell |= {"outputs": next(outputs), "execution_count": number}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    import matplotlib

    matplotlib.use("Agg")
    _write(Path(sys.argv[1]))
