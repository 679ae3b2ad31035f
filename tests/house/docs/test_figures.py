"""Pictures that are cheap to draw are what their scripts draw now."""

from __future__ import annotations

import importlib
import json
import sys
from xml.etree import ElementTree

import pytest

from tests.house.docs.pages import DOCS
from tests.testing import script

FIGURES = DOCS / "figures"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["machines", "packing", "resume"])
def test_moving_pictures_are_fresh(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FIGURES)
    drawn = importlib.import_module(name).draw()
    assert (FIGURES / f"{name}.svg").read_text() == drawn, f"run python docs/figures/{name}.py"
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched
    sys.modules.pop(name, None)


def test_the_picture_of_the_quickstart_is_that_of_its_recording() -> None:
    terminal = script(FIGURES / "terminal.py")
    cast = terminal.CAST.read_text()
    assert terminal.PICTURE.read_text() == terminal.draw(cast)
    ElementTree.fromstring(terminal.PICTURE.read_text())
    header, *events = map(json.loads, cast.splitlines())
    shown = "".join(text for _, _, text in events)
    assert header["version"] == 2 and [at for at, _, _ in events] == sorted(at for at, _, _ in events)
    assert all(f"$ {command}\r\n" in shown for command in terminal.COMMANDS) and "/tmp/" not in shown
    assert len(cast) + len(terminal.PICTURE.read_text()) < 40_000
    assert "figures/first-minutes.svg" in (DOCS / "quickstart.md").read_text()
