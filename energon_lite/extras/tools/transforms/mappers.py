"""Mappers of torchvision's geometric transforms. Each draws torchvision's random numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from energon_lite.errors import UsageError

# Points are columns ``(x, y, 1)``; x goes right and y goes down; pixel ``(column, row)`` is the square from ``(column,
# row)`` to ``(column + 1, row + 1)``. Sizes are arrays ``(height, width)`` of int64.

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
        return getattr(getattr(self, "transform", None), "fill", None)

    def interpolation(self) -> Any:
        """Return a ``torchvision.transforms.InterpolationMode``; None for any."""
        return getattr(getattr(self, "transform", None), "interpolation", None)

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


try:
    from torchvision import transforms as T
except ImportError as error:
    how = "pip install 'energon-lite[vision]'"
    raise ImportError(f"energon_lite.extras.tools.transforms needs torchvision: {how} ({error})") from error


class ResizeMapper(TransformMapper[T.Resize]):
    """Mapper of ``Resize``, without its smoothing when scaling down."""

    source_type = T.Resize

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Moved:
        size = self.transform.size
        numbers = _numbers(size)
        height, width = numbers if len(numbers) == 2 else self._by_shorter_side(dst_size)
        matrix = self.scale(width / dst_size[1], height / dst_size[0]) @ matrix
        return matrix, _size(height, width), ("Resize", size)

    def _by_shorter_side(self, dst_size: Size) -> tuple[int, int]:
        shorter, longer = _numbers(self.transform.size)[0], self.transform.max_size
        low, high = int(dst_size.min()), int(dst_size.max())
        if longer is not None and longer <= shorter:
            raise UsageError(
                f"Resize(size={shorter}, max_size={longer}): the longer side would be the shorter one",
                fix="give a max_size above size",
            )
        side = int(shorter * high / low)
        if longer is not None and side > longer:
            shorter, side = int(longer * shorter / side), longer
        return (side, shorter) if dst_size[1] <= dst_size[0] else (shorter, side)


class RandomResizedCropMapper(TransformMapper[T.RandomResizedCrop]):
    """Mapper of ``RandomResizedCrop``, without its smoothing when scaling down."""

    source_type = T.RandomResizedCrop

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Moved:
        top, left, height, width = self.transform.get_params(
            _no_image(dst_size), list(self.transform.scale), list(self.transform.ratio)
        )
        wanted = self.transform.size
        matrix = self.scale(wanted[1] / width, wanted[0] / height) @ self.translate(-left, -top) @ matrix
        return matrix, _size(*wanted), ("RandomResizedCrop", (top, left, height, width))


class RandomHorizontalFlipMapper(TransformMapper[T.RandomHorizontalFlip]):
    """Mapper of ``RandomHorizontalFlip``."""

    source_type = T.RandomHorizontalFlip

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Moved:
        flips = bool(torch.rand(1) < self.transform.p)
        if flips:
            matrix = self.translate(dst_size[1], 0) @ self.hflip() @ matrix
        return matrix, dst_size, ("RandomHorizontalFlip", flips)


class RandomVerticalFlipMapper(TransformMapper[T.RandomVerticalFlip]):
    """Mapper of ``RandomVerticalFlip``."""

    source_type = T.RandomVerticalFlip

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Moved:
        flips = bool(torch.rand(1) < self.transform.p)
        if flips:
            matrix = self.translate(0, dst_size[0]) @ self.vflip() @ matrix
        return matrix, dst_size, ("RandomVerticalFlip", flips)


class RandomRotationMapper(TransformMapper[T.RandomRotation]):
    """Mapper of ``RandomRotation``; the size after ``expand`` is Pillow's."""

    source_type = T.RandomRotation

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Moved:
        degrees = self.transform.get_params(self.transform.degrees)
        turn = self.rotate(np.deg2rad(degrees))
        height, width = dst_size
        x, y = self.transform.center or (width / 2, height / 2)
        matrix = self.translate(x, y) @ turn @ self.translate(-x, -y) @ matrix
        if self.transform.expand:
            # As in Pillow: the corners are those of the inverse, and are rounded outwards.
            corners = np.array([(0, width, width, 0), (0, 0, height, height), (1, 1, 1, 1)])
            corners = (self.translate(x, y) @ turn.T @ self.translate(-x, -y) @ corners)[:2].round(9)
            wide, high = np.ceil(corners.max(1)) - np.floor(corners.min(1))
            matrix = self.translate((wide - width) / 2, (high - height) / 2) @ matrix
            dst_size = _size(high, wide)
        return matrix, dst_size, ("RandomRotation", degrees)


class RandomCropMapper(TransformMapper[T.RandomCrop]):
    """Mapper of ``RandomCrop``, with a border of constant color."""

    source_type = T.RandomCrop

    def __init__(self, transform: T.RandomCrop):
        super().__init__(transform)
        if transform.padding_mode != "constant":
            raise UsageError(
                f"RandomCrop(padding_mode={transform.padding_mode!r}) cannot be merged: the border would show pixels "
                "twice",
                fix='give padding_mode="constant", or leave RandomCrop out of MergeTransform and apply it behind',
            )

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Moved:
        wanted = _size(*self.transform.size)
        left, top, right, bottom = _borders(self.transform.padding)
        before, after = np.array((top, left)), np.array((bottom, right))
        if self.transform.pad_if_needed:
            missing = np.maximum(wanted - dst_size - before - after, 0)
            before, after = before + missing, after + missing
        matrix = self.translate(before[1], before[0]) @ matrix
        dst_size = dst_size + before + after
        if (dst_size < wanted).any():
            raise UsageError(
                f"RandomCrop(size={tuple(wanted)}) of an image that is {tuple(dst_size)} (height, width)",
                fix="give pad_if_needed=True, or a smaller size",
            )
        top, left, *_ = self.transform.get_params(_no_image(dst_size), self.transform.size)
        return self.translate(-left, -top) @ matrix, wanted, ("RandomCrop", (left, top, *wanted))


class RandomPerspectiveMapper(TransformMapper[T.RandomPerspective]):
    """Mapper of ``RandomPerspective``."""

    source_type = T.RandomPerspective

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Moved:
        startpoints = endpoints = None
        if torch.rand(1) < self.transform.p:
            startpoints, endpoints = self.transform.get_params(
                int(dst_size[1]), int(dst_size[0]), self.transform.distortion_scale
            )
            matrix = _homography(startpoints, endpoints) @ matrix
        return matrix, dst_size, ("RandomPerspective", startpoints, endpoints)


class CenterCropMapper(TransformMapper[T.CenterCrop]):
    """Mapper of ``CenterCrop``; a smaller image gets a border."""

    source_type = T.CenterCrop

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Moved:
        numbers = _numbers(self.transform.size)
        wanted = _size(numbers[0], numbers[-1])
        # Missing pixels are added half to each side, rounded down on the first; surplus is rounded by Python's rule.
        missing = np.maximum(wanted - dst_size, 0)
        cut = [round(int(spare) / 2) for spare in np.maximum(dst_size - wanted, 0)]
        top, left = missing // 2 - cut
        return self.translate(left, top) @ matrix, wanted, ("CenterCrop", (top, left, *wanted))


def _homography(startpoints: Sequence[Sequence[float]], endpoints: Sequence[Sequence[float]]) -> Matrix:
    """Return the matrix that maps four points (x, y) to four others.

    It solves eight equations for its eight free entries, two from each point.
    """
    rows, right = [], []
    for (x, y), (u, v) in zip(startpoints, endpoints, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        right += [u, v]
    entries = np.linalg.solve(np.array(rows, np.float64), np.array(right, np.float64))
    return np.append(entries, 1.0).reshape(3, 3)


def _numbers(size: int | Sequence[int]) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(size)


def _size(height: float, width: float) -> Size:
    return np.array((height, width), np.int64)


def _no_image(size: Size) -> torch.Tensor:
    """Return an empty tensor with the size of an image, for torchvision functions that only read the size."""
    return torch.empty(1, int(size[0]), int(size[1]), device="meta")


def _borders(padding: int | Sequence[int] | None) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom from torchvision's padding of one, two or four numbers."""
    numbers = _numbers(padding or 0)
    return tuple((numbers * 4)[:4])  # type: ignore[return-value]
