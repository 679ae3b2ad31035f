"""Formatting of samples for a terminal: values with their types and shapes, images as small pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["picture_lines", "sample_lines"]

#: Fields of every sample that do not describe its contents.
_HIDDEN = ("__restore_key__", "__subflavors__", "__sources__", "__shard__")
#: Characters of a text that are shown.
_LONGEST_TEXT = 400
#: Items of a collection that are shown.
_MOST_VALUES = 8
#: Nesting depth to which collections are shown.
_DEEPEST = 4


def sample_lines(sample: Any, *, width: int, colours: bool) -> Iterator[str]:
    """Yield the lines of a sample: one for each field, followed by a picture if it is an image.

    Args:
        sample: an object with fields, or a dict of parts.
        width: width of the terminal, in characters.
        colours: draw pictures; False: images are only described.
    """
    if isinstance(sample, Mapping):
        fields = dict(sample)
    elif dataclasses.is_dataclass(sample):
        fields = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    else:
        fields = {"value": sample}
    for name, value in fields.items():
        if name in _HIDDEN or value is None:
            continue
        yield from _lines(name, value, "  ", width, colours, 0)


def _lines(name: str, value: Any, indent: str, width: int, colours: bool, depth: int) -> Iterator[str]:
    nested = isinstance(value, (Mapping, list, tuple)) and any(map(_is_large, _values(value)))
    if not nested or depth >= _DEEPEST:
        kind = "" if depth else f" ({type(value)})"
        yield f"{indent}{name}{kind}: {_words(value)}"
    else:
        kind = "" if isinstance(value, Mapping) else f" ({type(value).__name__} of {len(value)})"
        yield f"{indent}{name}:{kind}"
        items = [*value.items()] if isinstance(value, Mapping) else [*enumerate(value)]
        for key, item in items[:_MOST_VALUES]:
            yield from _lines(str(key), item, indent + "  ", width, colours, depth + 1)
        if len(items) > _MOST_VALUES:
            yield f"{indent}  ... and {len(items) - _MOST_VALUES} more"
    if colours and (pixels := _pixels(value)) is not None:
        columns = max(8, min(width - len(indent) - 2, 64))
        yield from (f"{indent}  {line}" for line in picture_lines(pixels, columns))


def _values(value: Any) -> Sequence[Any]:
    return [*value.values()] if isinstance(value, Mapping) else value


def _is_large(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, bytes, Mapping, list, tuple)) or hasattr(value, "getbands")


def _words(value: Any) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        kind = f"{type(value).__name__}{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        if not value.size if isinstance(value, np.ndarray) else not value.numel():
            return kind
        if value.ndim <= 1:
            return f"{kind} {_shorter(repr(value.reshape(-1)[:16].tolist()))}"
        return f"{kind}, {value.min().item():.4g} to {value.max().item():.4g}" if _has_order(value) else kind
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value):,} bytes {bytes(value[:16])!r}" + ("..." if len(value) > 16 else "")
    if hasattr(value, "getbands"):
        return f"image {value.size[0]}x{value.size[1]} {value.mode}"
    return _shorter(repr(value))


def _has_order(value: Any) -> bool:
    return str(value.dtype).removeprefix("torch.") not in ("complex64", "complex128", "bool", "object")


def _shorter(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}... ({len(text):,} characters)"


def _pixels(value: Any) -> np.ndarray[Any, Any] | None:
    """Convert an image to uint8 ``[height, width, 3]``; None for other values."""
    if hasattr(value, "getbands"):
        return np.asarray(value.convert("RGB"))
    if isinstance(value, torch.Tensor) and value.ndim == 3 and value.shape[0] in (1, 3, 4):
        value = value.permute(1, 2, 0).numpy()
    elif not (isinstance(value, np.ndarray) and value.ndim == 3 and value.shape[2] in (1, 3, 4)):
        return None
    if not value.size or value.dtype.kind not in "uif":
        return None
    if value.dtype.kind == "f":
        low, high = min(0.0, float(np.nanmin(value))), max(1.0, float(np.nanmax(value)))
        value = np.nan_to_num((value - low) / (high - low) * 255)
    value = value.clip(0, 255).astype(np.uint8)
    return np.repeat(value, 3, axis=2) if value.shape[2] == 1 else value[:, :, :3]


def picture_lines(pixels: np.ndarray[Any, Any], columns: int) -> Iterator[str]:
    """Draw an image as lines of half blocks in 24-bit colours: each character is two pixels, one above the other.

    Args:
        pixels: uint8 ``[height, width, 3]``.
        columns: largest number of characters in a line.
    """
    height, width, _ = pixels.shape
    across = min(columns, width)
    down = max(2, round(height * across / width) // 2 * 2)
    rows = (np.arange(down) + 0.5) * height // down
    small = pixels[rows.astype(int)][:, ((np.arange(across) + 0.5) * width // across).astype(int)]
    for top, bottom in zip(small[::2].tolist(), small[1::2].tolist(), strict=True):
        cells = (
            f"\x1b[38;2;{r};{g};{b}m\x1b[48;2;{x};{y};{z}m▀" for (r, g, b), (x, y, z) in zip(top, bottom, strict=True)
        )
        yield "".join(cells) + "\x1b[0m"
