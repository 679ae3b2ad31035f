"""Pictures that are cheap to draw are what their scripts draw now."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.house.docs.pages import DOCS

FIGURES = DOCS / "figures"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["machines", "packing", "resume"])
def test_moving_pictures_are_fresh(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FIGURES)
    drawn = importlib.import_module(name).draw()
    assert (FIGURES / f"{name}.svg").read_text() == drawn, f"run python docs/figures/{name}.py"
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched
    sys.modules.pop(name, None)
