"""The quickstart's moving picture is drawn from its recording."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from tests.house.docs.pages import DOCS
from tests.testing import script


def test_the_picture_is_that_of_the_recording() -> None:
    terminal = script(DOCS / "figures" / "terminal.py")
    cast = terminal.CAST.read_text()
    assert terminal.PICTURE.read_text() == terminal.draw(cast)
    ElementTree.fromstring(terminal.PICTURE.read_text())
    header, *events = map(json.loads, cast.splitlines())
    shown = "".join(text for _, _, text in events)
    assert header["version"] == 2 and [at for at, _, _ in events] == sorted(at for at, _, _ in events)
    assert all(f"$ {command}\r\n" in shown for command in terminal.COMMANDS) and "/tmp/" not in shown
    assert len(cast) + len(terminal.PICTURE.read_text()) < 40_000
    assert "figures/first-minutes.svg" in (DOCS / "quickstart.md").read_text()
