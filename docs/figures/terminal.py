"""The first minutes in a terminal, as a moving picture: commands that are run, and what they print.

    python docs/figures/terminal.py record    # runs the commands; writes first-minutes.cast (asciinema, version 2)
    python docs/figures/terminal.py           # draws first-minutes.svg from it

What is printed is real; the times are not: nobody wants to watch a program being imported.
"""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CAST, PICTURE = (Path(__file__).with_name(f"first-minutes.{kind}") for kind in ("cast", "svg"))
COMMANDS = (
    "energon-lite init first",
    "cd first",
    "energon-lite info blend.yaml",
    "python train.py --steps 100",
    "torchrun --nproc-per-node 2 train.py --steps 200",
)
WIDTH, HEIGHT = 100, 26
#: Seconds: for each letter that is typed, before a command's output, between its lines, at the end of all.
KEY, THINK, LINE, REST = 0.03, 0.5, 0.12, 4.0
_CELL, _LEADING, _MARGIN = 7.8, 18, 16


def record() -> str:
    """The recording: what the commands print, in a folder of their own."""
    events: list[tuple[float, str]] = []
    now = 0.0
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        for command in COMMANDS:
            for letter in ("$ ", *command):
                events.append((now, letter))
                now += KEY
            events.append((now, "\r\n"))
            now += THINK
            if command.startswith("cd "):
                where /= command.removeprefix("cd ")
                continue
            environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": str(WIDTH)}
            done = subprocess.run(
                command, shell=True, cwd=where, env=environment, capture_output=True, text=True, check=True
            )
            for line in done.stdout.replace(str(where), ".").splitlines():
                for part in [line[start : start + WIDTH] for start in range(0, len(line), WIDTH)] or [""]:
                    events.append((now, f"{part}\r\n"))
                    now += LINE
    header = {"version": 2, "width": WIDTH, "height": HEIGHT, "title": "The first minutes with energon_lite"}
    lines = [header, *([round(at, 3), "o", text] for at, text in events)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def draw(cast: str) -> str:
    """A moving picture of a recording."""
    header, *events = map(json.loads, cast.splitlines())
    lines: list[tuple[list[tuple[float, str]], float]] = []  # what is typed on each line, and when it begins
    current: list[tuple[float, str]] = []
    for at, _, text in events:
        plain = text.removesuffix("\r\n")
        if plain:
            current.append((at, plain))
        if text.endswith("\r\n"):
            lines.append((current, current[0][0] if current else at))
            current = []
    total = events[-1][0] + REST
    height, width = header["height"] * _LEADING + 2 * _MARGIN, header["width"] * _CELL + 2 * _MARGIN
    steps, texts = [], []
    for number, (parts, begins) in enumerate(lines):
        above = max(0, number + 1 - header["height"])
        if above:
            steps.append((begins, -above * _LEADING))
        texts.append(_line(parts, number, total))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}"'
            ' role="img">',
            f"<title>{html.escape(header['title'])}</title>",
            "<style>text { font: 13px monospace; fill: #d7dae0; white-space: pre } .typed { fill: #8fd18f }</style>",
            '<rect width="100%" height="100%" rx="8" fill="#1d2129"/>',
            # An inner picture, so that lines that have gone up are cut off.
            f'<svg x="{_MARGIN}" y="{_MARGIN}" height="{height - 2 * _MARGIN}"><g>',
            _animation("transform", [(0.0, "0 0"), *((at, f"0 {move}") for at, move in steps)], total, "translate"),
            *texts,
            "</g></svg></svg>",
            "",
        ]
    )


def _line(parts: list[tuple[float, str]], number: int, total: float) -> str:
    """A line of text, letters of a command one after the other."""
    is_typed = len(parts) > 1
    spans = []
    for at, text in [parts[0]] if parts and not is_typed else _words(parts):
        shown = _animation("visibility", [(0.0, "hidden"), (max(at, 0.001), "visible")], total)
        spans.append(f"<tspan>{html.escape(text)}{shown}</tspan>")
    kind = ' class="typed"' if is_typed else ""
    return f'<text y="{(number + 1) * _LEADING - 4}"{kind} xml:space="preserve">{"".join(spans)}</text>'


def _words(parts: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Four letters at a time: fewer things to animate."""
    return [
        (parts[start][0], "".join(text for _, text in parts[start : start + 4])) for start in range(0, len(parts), 4)
    ]


def _animation(name: str, values: list[tuple[float, str]], total: float, kind: str = "") -> str:
    times = ";".join(f"{at / total:.4f}" for at, _ in values)
    tag = f'animateTransform attributeName="{name}" type="{kind}"' if kind else f'animate attributeName="{name}"'
    shown = ";".join(value for _, value in values)
    return (
        f'<{tag} values="{shown}" keyTimes="{times}" calcMode="discrete" dur="{total:.2f}s" repeatCount="indefinite"/>'
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["record"]:
        CAST.write_text(record())
    PICTURE.write_text(draw(CAST.read_text()))
