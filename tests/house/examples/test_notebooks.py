"""The notebooks run, and print what they were saved with."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import matplotlib
import pytest

from tests.house.examples.notebooks import printed, run, stored

ROOT = Path(__file__).parents[3]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_was_saved_with(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("Agg")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    outputs = run(path, tmp_path)
    assert printed(outputs) == printed(stored(path)), (
        f"run python tests/house/examples/notebooks.py {path.relative_to(ROOT)}"
    )
    kinds = [[one["output_type"] for one in cell] for cell in outputs]
    assert kinds == [[one["output_type"] for one in cell] for cell in stored(path)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_links_lead_somewhere(path: Path) -> None:
    text = "".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert links and [link for link in links if not (path.parent / link).exists()] == []


def test_a_cell_that_fails_is_named(tmp_path: Path) -> None:
    notebook = tmp_path / "bad.ipynb"
    cells = [{"cell_type": "markdown", "source": ["x"]}, {"cell_type": "code", "source": ["1 / 0"], "outputs": []}]
    notebook.write_text(json.dumps({"cells": cells}))
    with pytest.raises(ZeroDivisionError) as error:
        run(notebook, tmp_path)
    assert "bad.ipynb:0" in str(error.traceback[-1].path)
    assert Path.cwd() != tmp_path
