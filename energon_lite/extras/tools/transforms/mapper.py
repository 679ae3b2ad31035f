"""Base class of mappers, which describe the movement of an image's points by a transform.

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
#: The matrix, the size, and the values drawn at random, for inspection.
Moved = tuple[Matrix, Size, tuple[Any, ...]]


class TransformMapper(ABC, Generic[TTransform]):
    """One of torchvision's transforms as a movement of points.

    Attributes:
        source_type: torchvision's class of the transform.
        transform: the transform.
    """

    source_type: ClassVar[type[torch.nn.Module]]

    def __init__(self, transform: TTransform):
        self.transform = transform

    def __call__(self, sample: Any) -> Any:
        """Apply this transform alone to a sample."""
        return self.transform(sample)

    @abstractmethod
    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Moved:
        """Append this transform to others.

        Args:
            matrix: the combined matrix of the others, float64 ``[3, 3]``: from points of the first image to those of
                the last.
            dst_size: (height, width) of the last image; must not be changed in place.

        Returns:
            The matrix and the size including this transform, and a tuple of the values drawn at random.
        """

    def fill(self) -> Any:
        """Return the value of uncovered pixels: a number, or one per channel; None if all are covered."""
        return None

    def interpolation(self) -> Any:
        """Return a ``torchvision.transforms.InterpolationMode``; None for any."""
        return None

    @staticmethod
    def translate(x: float, y: float) -> Matrix:
        """Return the matrix of a translation by (x, y) pixels."""
        return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])

    @staticmethod
    def rotate(angle: float) -> Matrix:
        """Return the matrix of a rotation about (0, 0), counter-clockwise on screen (y goes down), in radians."""
        cos, sin = np.cos(angle), np.sin(angle)
        return np.array([[cos, sin, 0.0], [-sin, cos, 0.0], [0.0, 0.0, 1.0]])

    @staticmethod
    def scale(x: float, y: float) -> Matrix:
        """Return the matrix of a scaling by factors."""
        return np.diag([x, y, 1.0])

    @staticmethod
    def shear(x: float, y: float) -> Matrix:
        """Return the matrix of a shear: x grows by ``x`` for each y, y by ``y`` for each x."""
        return np.array([[1.0, x, 0.0], [y, 1.0, 0.0], [0.0, 0.0, 1.0]])

    @staticmethod
    def hflip() -> Matrix:
        """Return the matrix of a reflection at the vertical line through (0, 0)."""
        return np.diag([-1.0, 1.0, 1.0])

    @staticmethod
    def vflip() -> Matrix:
        """Return the matrix of a reflection at the horizontal line through (0, 0)."""
        return np.diag([1.0, -1.0, 1.0])


class CustomTransform(TransformMapper[torch.nn.Module]):
    """Base class of user transforms: implement at least :meth:`apply_transform`.

    Example:
        >>> class Shift(CustomTransform):
        ...     def __init__(self):
        ...         pass
        ...
        ...     def apply_transform(self, matrix, dst_size):
        ...         return self.translate(5, 5) @ matrix, dst_size, ("Shift", 5)
    """
