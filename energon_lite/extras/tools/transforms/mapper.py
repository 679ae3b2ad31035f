"""How a transform moves the points of an image's plane: the base of all mappers, and of a user's own transforms.

Points are columns ``(x, y, 1)``; x goes right and y goes down; pixel ``(column, row)`` is the square from
``(column, row)`` to ``(column + 1, row + 1)``. Sizes are arrays ``(height, width)`` of int64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["CustomTransform", "Matrix", "Moved", "Size", "TransformMapper"]

TTransform = TypeVar("TTransform", bound=torch.nn.Module)
Matrix = npt.NDArray[np.float64]
Size = npt.NDArray[np.int64]
#: The matrix, the size, and what was drawn at random, for whoever wants to know it.
Moved = tuple[Matrix, Size, tuple[Any, ...]]


class TransformMapper(ABC, Generic[TTransform]):
    """One of torchvision's transforms as a movement of points.

    Attributes:
        source_type: the class of torchvision whose objects it takes.
        transform: such an object.
    """

    source_type: ClassVar[type[torch.nn.Module]]

    def __init__(self, transform: TTransform):
        self.transform = transform

    def __call__(self, sample: Any) -> Any:
        """Apply the transform itself, alone."""
        return self.transform(sample)

    @abstractmethod
    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Moved:
        """Put this transform behind others.

        Args:
            matrix: what the others do, of shape (3, 3), float64: from points of the first image to those of the last.
            dst_size: (height, width) of the last image; not to be changed in place.

        Returns:
            The matrix and the size with this one behind, and a tuple of what was drawn at random.
        """

    def fill(self) -> Any:
        """What the places get that no pixel comes to: a number, or one for each channel; None: it leaves none open."""
        return None

    def interpolation(self) -> Any:
        """A ``torchvision.transforms.InterpolationMode``; None: any."""
        return None

    @staticmethod
    def translate(x: float, y: float) -> Matrix:
        """Move by (x, y) pixels."""
        return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])

    @staticmethod
    def rotate(angle: float) -> Matrix:
        """Turn about (0, 0), counter-clockwise as one sees it (y goes down), by radians."""
        cos, sin = np.cos(angle), np.sin(angle)
        return np.array([[cos, sin, 0.0], [-sin, cos, 0.0], [0.0, 0.0, 1.0]])

    @staticmethod
    def scale(x: float, y: float) -> Matrix:
        """Stretch by factors."""
        return np.diag([x, y, 1.0])

    @staticmethod
    def shear(x: float, y: float) -> Matrix:
        """Slant: x grows by ``x`` for each y, y by ``y`` for each x."""
        return np.array([[1.0, x, 0.0], [y, 1.0, 0.0], [0.0, 0.0, 1.0]])

    @staticmethod
    def hflip() -> Matrix:
        """Mirror at the vertical line through (0, 0)."""
        return np.diag([-1.0, 1.0, 1.0])

    @staticmethod
    def vflip() -> Matrix:
        """Mirror at the horizontal line through (0, 0)."""
        return np.diag([1.0, -1.0, 1.0])


class CustomTransform(TransformMapper[torch.nn.Module]):
    """A transform of the user's own: derive from it, and write at least :meth:`apply_transform`.

    Example:
        >>> class Shift(CustomTransform):
        ...     def __init__(self):
        ...         pass
        ...
        ...     def apply_transform(self, matrix, dst_size):
        ...         return self.translate(5, 5) @ matrix, dst_size, ("Shift", 5)
    """
