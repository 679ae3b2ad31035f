"""Picture of the rooms: core and trainer by the import contracts of ``pyproject.toml``, extras by their folders.

    python docs/figures/rooms.py            # writes docs/figures/rooms.svg

Needs matplotlib. No room is named here: the picture has each room of a contract and each folder of ``extras``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
#: Text stays text, and the same contracts give the same bytes.
plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "rooms", "font.family": "sans-serif"})
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00")
#: Widths and heights in units of the picture. A line that is wider than ``WIDEST`` continues in a second row.
HEIGHT, GAP, WIDEST = 0.5, 0.16, 8.6
COLUMN, INCHES = WIDEST + 0.9, 0.57

Line = tuple[list[str], bool]


def contracts() -> list[dict[str, Any]]:
    """Return the contracts with layers, and one that has all extras on a line.

    Extras have no layers among them: the contracts only forbid circles and imports from the core.
    """
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = [one for one in document["tool"]["importlinter"]["contracts"] if one["type"] == "layers"]
    extras = sorted(path.parent.name for path in (ROOT / "energon_lite" / "extras").glob("*/__init__.py"))
    return [*found, {"containers": ["energon_lite.extras"], "layers": [" : ".join(extras)]}]


def lines_of(contract: dict[str, Any]) -> list[Line]:
    """Return the lines of a contract from top to bottom: the rooms of each, and whether they may use each other."""
    return [
        ([name.strip(" ()") for name in text.replace("|", ":").split(":")], ":" in text) for text in contract["layers"]
    ]


def draw(axes: Any, contract: dict[str, Any], left: float, top: float, colour: str) -> float:
    """Draw a contract as a column of lines; return the height at which it ends."""
    (container,) = contract["containers"]
    axes.text(left, top, container.replace(".", " / "), weight="bold", fontsize=11, color=colour)
    top -= 0.3
    for names, together in lines_of(contract):
        rows = wrapped(names)
        height = len(rows) * (HEIGHT + GAP) - GAP
        if together:
            width = max(sum(_width(name) + GAP for name in row) for row in rows)
            frame = (left - GAP / 2, top - height - GAP / 2)
            axes.add_patch(_box(frame, width, height + GAP, facecolor="0.92", edgecolor="none"))
        for number, row in enumerate(rows):
            x, y = left, top - number * (HEIGHT + GAP) - HEIGHT
            for name in row:
                axes.add_patch(_box((x, y), _width(name), HEIGHT, facecolor="white", edgecolor=colour))
                axes.text(x + _width(name) / 2, y + HEIGHT / 2, name, ha="center", va="center", fontsize=8)
                x += _width(name) + GAP
        top -= height + 2 * GAP
    return top


def wrapped(names: list[str]) -> list[list[str]]:
    """Return the rooms of a line in rows of at most ``WIDEST``."""
    rows: list[list[str]] = [[]]
    for name in names:
        if sum(_width(other) + GAP for other in rows[-1]) + _width(name) > WIDEST:
            rows.append([])
        rows[-1].append(name)
    return rows


def _width(name: str) -> float:
    return 0.55 + 0.14 * len(name)


def _box(corner: tuple[float, float], width: float, height: float, **style: Any) -> FancyBboxPatch:
    return FancyBboxPatch(corner, width, height, boxstyle="round,pad=0,rounding_size=0.06", linewidth=1.1, **style)


def main() -> None:
    figure, axes = plt.subplots()
    tops = [0.0, 0.0]
    for number, contract in enumerate(contracts()):  # each goes into the column that has more space left
        column = tops.index(max(tops))
        tops[column] = draw(axes, contract, column * COLUMN, tops[column], COLOURS[number % len(COLOURS)]) - 0.4
    note = "a room may use the rooms on the lines below its own; rooms on one grey line may use each other, too"
    axes.text(0, min(tops) - 0.2, note, fontsize=9, color="0.35")
    width, height = 2 * COLUMN, 0.9 - min(tops)
    figure.set_size_inches(width * INCHES, height * INCHES)
    axes.set_position((0, 0, 1, 1))
    axes.set_xlim(-GAP, width - GAP)
    axes.set_ylim(0.5 - height, 0.5)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(FOLDER / "rooms.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
