"""Heat map of samples over steps: steps to the right, samples downwards, a colour for each rank."""

from __future__ import annotations

import colorsys
import os

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError

__all__ = ["HeatMap"]


class HeatMap:
    """Counts of sightings in cells, which become coarser if there are more samples or steps than cells.

    Args:
        samples: largest number of rows.
        steps: largest number of columns.
        colours: number of ranks with different colours; 1: all ranks have the same.

    Example:
        >>> seen = HeatMap(samples=1000, steps=1000, colours=8)
        >>> seen.add(sample=3, step=0, rank=1)
        >>> seen.save("seen.png", gain=10.0)
        (3, 0)
    """

    def __init__(self, samples: int, steps: int, colours: int):
        self._cells: NDArray[np.float64] = np.zeros((2 * -(-samples // 2), 2 * -(-steps // 2), 3))
        self._factors = [1, 1]
        self._last = [0, 0]
        hues = (np.arange(colours) * 0.618034) % 1.0  # far apart, for any number of colours
        self._colours = np.array([colorsys.hsv_to_rgb(hue, 0.85, 1.0) for hue in hues] if colours > 1 else [[1, 1, 1]])

    def add(self, sample: int, step: int, rank: int) -> None:
        """Count one sighting of a sample, by a rank in a step."""
        for axis, place in enumerate((sample, step)):
            while place >= self._cells.shape[axis] * self._factors[axis]:
                self._halve(axis)
            self._last[axis] = max(self._last[axis], place)
        row, column = sample // self._factors[0], step // self._factors[1]
        self._cells[row, column] += self._colours[rank % len(self._colours)]

    def _halve(self, axis: int) -> None:
        cells = np.moveaxis(self._cells, axis, 0)
        half = len(cells) // 2
        # The sums are complete before they are written over the first half, from which they are computed.
        cells[:half] = cells[::2] + cells[1::2]
        cells[half:] = 0
        self._factors[axis] *= 2

    def save(self, path: str, gain: float) -> tuple[int, int]:
        """Write the picture.

        Args:
            path: path of the file; its ending determines the format.
            gain: factor of the brightness; 1: the fullest cell has full brightness.

        Returns:
            The last sample and the last step.

        Raises:
            UsageError: Pillow is missing, or does not support the format.
        """
        try:
            from PIL import Image
        except ImportError as error:
            raise UsageError("the picture needs Pillow", fix="pip install 'energon-lite[image]'") from error
        rows, columns = (last // factor + 1 for last, factor in zip(self._last, self._factors, strict=True))
        cells = self._cells[:rows, :columns]
        bright = (cells * (gain * 255 / max(cells.max(), 1e-9))).clip(0, 255).astype(np.uint8)
        try:
            Image.fromarray(bright).save(path)
        except ValueError as error:
            fix = "give a name that ends with .png"
            raise UsageError(f"{os.path.basename(path)}: {error}", fix=fix) from error
        return self._last[0], self._last[1]
