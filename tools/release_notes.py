"""Print what the changelog says of a version, if all is as it has to be for its release.

    python tools/release_notes.py 0.1.0

The package has this version, the changelog has a section ``## 0.1.0 - 2026-12-01`` and nothing left under
``Unreleased``, and ``tests/house/released/0.1.0`` has its data sets and states. It needs nothing but Python.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def release_notes(root: Path, version: str) -> str:
    """The section of a version.

    Raises:
        SystemExit: something is missing; says what.
    """
    found = re.search(r'^__version__ = "(.*)"$', (root / "energon_lite/__init__.py").read_text(), re.M)
    if found is None or found[1] != version:
        raise SystemExit(f"energon_lite.__version__ is {found and found[1]}, and the tag says {version}")
    if not (root / "tests/house/released" / version / "states.json").exists():
        raise SystemExit(f"tests/house/released/{version} is missing: run python tools/keep_release.py, and commit it")
    sections = re.split(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), flags=re.M)
    notes = dict(zip(sections[1::2], map(str.strip, sections[2::2]), strict=True))
    if notes.get("Unreleased"):
        raise SystemExit(f"CHANGELOG.md has changes under Unreleased: they belong under '## {version} - DATE'")
    for title, text in notes.items():
        if re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", title) and text:
            return text
    raise SystemExit(f"CHANGELOG.md has no section '## {version} - YYYY-MM-DD'")


if __name__ == "__main__":
    print(release_notes(ROOT, sys.argv[1]))
