"""Bar charts of two to five colours, drawn with matplotlib."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from examples.charts.questions import PLACES

#: Height and width of a chart, in pixels.
SIZE = 40
#: Colours of bars, saturated, so that few pixels distinguish them.
COLOURS = {
    "red": "#e6191e",
    "green": "#0fa040",
    "blue": "#1446e6",
    "yellow": "#ffd200",
    "purple": "#a020c8",
}
#: Heights of bars, all different in a chart.
HEIGHTS = range(1, 9)


@dataclass(frozen=True)
class Chart:
    """The bars of a chart, from the left.

    Args:
        colours: names out of :data:`COLOURS`.
        heights: out of :data:`HEIGHTS`.
    """

    colours: tuple[str, ...]
    heights: tuple[int, ...]

    @property
    def name(self) -> str:
        """Its unique name in the data set."""
        return "-".join(f"{colour}{height}" for colour, height in zip(self.colours, self.heights, strict=True))


def different_charts(number: int, *, seed: int) -> Iterator[Chart]:
    """``number`` different charts; the same for a seed."""
    random_ = random.Random(seed)
    seen: set[Chart] = set()
    while len(seen) < number:
        bars = random_.randint(2, len(PLACES))
        chart = Chart(tuple(random_.sample(list(COLOURS), bars)), tuple(random_.sample(list(HEIGHTS), bars)))
        if chart not in seen:
            seen.add(chart)
            yield chart


class Painter:
    """Draws charts on one figure, because making axes takes most of the time.

    Example:
        >>> Painter().png(Chart(("red", "blue"), (3, 7)))[:4]
        b'\\x89PNG'
    """

    @cached_property
    def _axes(self):  # type: ignore[no-untyped-def]
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1, 1), dpi=SIZE)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.04, 0.04, 0.92, 0.92))
        axes.set_ylim(0, max(HEIGHTS) + 0.5)
        axes.set_xticks([])
        axes.set_yticks([])
        return axes

    def png(self, chart: Chart) -> bytes:
        """A chart as a PNG file."""
        import numpy as np
        from PIL import Image

        axes = self._axes
        bars = axes.bar(range(len(chart.colours)), chart.heights, color=[COLOURS[name] for name in chart.colours])
        axes.set_xlim(-0.5, len(chart.colours) - 0.5)
        axes.figure.canvas.draw()
        pixels = np.asarray(axes.figure.canvas.buffer_rgba())[..., :3]
        bars.remove()
        stream = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(stream, format="PNG")
        return stream.getvalue()


def hold_out(charts: Iterable[Chart], number: int) -> tuple[list[Chart], list[Chart]]:
    """Divide charts into (train, val): the first ones are held out."""
    every = list(charts)
    return every[number:], every[:number]
