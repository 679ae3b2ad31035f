"""What moving pictures have in common: SVG with animations of CSS, in the colours that the reader has chosen.

Who has asked for less motion sees the last moment. Nothing is fetched, so a picture moves where it is an image.
"""

from __future__ import annotations

_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.small { font-size: 11px; fill: #57606a; }
.code { font: 12px ui-monospace, monospace; }
.number { font: 10px ui-monospace, monospace; fill: #ffffff; text-anchor: middle; }
.card { fill: #ffffff; stroke: #d0d7de; }
.box { fill: #f6f8fa; stroke: #d0d7de; }
.padding { fill: #d8dee4; }
.ghost { opacity: 0.22; }
.cross { stroke: #cf222e; stroke-width: 3; stroke-linecap: round; }
.red { fill: #cf222e; font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9198a1; } .number { fill: #ffffff; }
  .card { fill: #0d1117; stroke: #3d444d; } .box { fill: #151b23; stroke: #3d444d; }
  .padding { fill: #30363d; }
  .cross { stroke: #f85149; } .red { fill: #f85149; }
}
@media (prefers-reduced-motion: reduce) { g { animation: none !important; } }
"""


class MovingPicture:
    """A picture that is drawn part by part, and repeats itself.

    Args:
        width, height: in units of the picture.
        seconds: of a round.
        said: what a screen reader says.
    """

    def __init__(self, width: int, height: int, seconds: float, said: str):
        self.width, self.height, self.seconds, self.said = width, height, seconds, said
        self._shapes = [f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>']
        self._frames: list[str] = []

    def add(self, shape: str, name: str = "") -> None:
        """Add a shape; one with a name may be moved, or appear."""
        self._shapes.append(f'<g class="{name}">{shape}</g>' if name else shape)

    def text(self, x: float, y: float, text: str, kind: str = "") -> str:
        """A line of text, its quotes escaped."""
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
        return f'<text class="{kind}" x="{x:g}" y="{y:g}" xml:space="preserve">{escaped}</text>'

    def move(self, name: str, start: tuple[float, float], at: float) -> None:
        """Have what is called so stand beside its place until a time, and then go there."""
        away, here = f"transform: translate({start[0]:g}px, {start[1]:g}px)", "transform: none"
        self._animate(name, away, here, at, 0.55, "ease-in-out")

    def show(self, name: str, at: float) -> None:
        """Have what is called so appear at a time."""
        self._animate(name, "opacity: 0", "opacity: 1", at, 0.3, "linear")

    def svg(self) -> str:
        """The whole of it."""
        style = _STYLE + "\n".join(self._frames)
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{self.said}</title>\n'
        return f"{head}<style>{style}\n</style>\n" + "\n".join(self._shapes) + "\n</svg>\n"

    def _animate(self, name: str, before: str, after: str, at: float, takes: float, how: str) -> None:
        begin, end = (100 * moment / self.seconds for moment in (at, at + takes))
        self._frames.append(
            f"@keyframes {name} {{ 0%, {begin:.2f}% {{ {before}; }} {end:.2f}%, 100% {{ {after}; }} }}\n"
            f"g.{name} {{ animation: {name} {self.seconds:g}s {how} infinite; }}"
        )
