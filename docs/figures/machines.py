"""Picture of workers on other machines: jobs go out as addresses, batches come back.

python docs/figures/machines.py         # writes docs/figures/machines.svg
"""

from __future__ import annotations

from pathlib import Path

from moving import MovingPicture

FOLDER = Path(__file__).parent
#: Left edge, top, width, height, title and lines of each machine.
MACHINES = (
    (20, 20, 190, 130, "GPU machine", ("trainer: plan, order, state", "2 local workers: first")),
    (430, 20, 190, 60, "CPU machine", ("energon-lite serve",)),
    (430, 92, 190, 60, "CPU machine of Ray", ("actors, as many as needed",)),
    (20, 186, 600, 40, "Data set, seen by all", ()),
)


def draw() -> str:
    """Return the picture as SVG."""
    image = MovingPicture(
        640, 246, 1.0, "A trainer sends addresses to workers on other machines, which return batches."
    )
    for left, top, width, height, title, lines in MACHINES:
        image.add(f'<rect class="box" x="{left}" y="{top}" width="{width}" height="{height}" rx="6"/>')
        image.add(image.text(left + 12, top + 24, title))
        for number, line in enumerate(lines):
            image.add(image.text(left + 12, top + 46 + 22 * number, line, "small"))
    for y in (50, 122):
        image.add(_arrow(214, 426, y - 6, "#0072B2") + image.text(250, y - 12, "addresses, by TCP", "small"))
        image.add(_arrow(426, 214, y + 6, "#009E73") + image.text(250, y + 22, "batches", "small"))
    for x, top in ((115, 150), (525, 152)):
        image.add(f'<path d="M{x} 186 V{top + 4}" stroke="#57606a" stroke-dasharray="3 3"/>')
    return image.svg()


def _arrow(start: int, end: int, y: int, colour: str) -> str:
    back = 6 if end > start else -6
    head = f"M{end} {y} l{-back} -4 v8 z"
    return f'<path d="M{start} {y} H{end - back}" stroke="{colour}"/><path d="{head}" fill="{colour}"/>'


if __name__ == "__main__":
    (FOLDER / "machines.svg").write_text(draw())
