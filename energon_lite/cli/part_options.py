"""Options of the commands that store columns by parts as they are stored: ``--column``, ``--images``, ``--patches``."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from energon_lite.errors import UsageError
from energon_lite.storage.index.columns import CHECKSUMS

if TYPE_CHECKING:
    from energon_lite.extras.balance.image_patches import ImagePatches

__all__ = ["AskedParts", "asked_parts", "part_options", "part_words"]


class AskedParts(NamedTuple):
    """What these options ask for.

    Attributes:
        columns: by name, the field that is stored.
        images: sizes of images.
        patches: how many patches they become.
    """

    columns: dict[str, str]
    images: bool
    patches: ImagePatches | None

    def __bool__(self) -> bool:
        return bool(self.columns or self.images or self.patches is not None)


def part_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options."""
    options = [
        click.option(
            "--column",
            "columns",
            multiple=True,
            metavar="NAME=PART",
            help="A further column (repeatable): bytes of a part (txt) or of all (*), rows of an array (npy), a value "
            "in it (json.loss_tokens).",
        ),
        click.option(
            "--images",
            is_flag=True,
            help="Columns images and image_sizes: how many there are, and their heights and widths, by their headers.",
        ),
        click.option(
            "--patches",
            metavar="JSON",
            help='How many patches an image becomes: \'{"patch_size": 14, "multiple": 28}\' (also image_size, '
            "min_pixels, max_pixels). Columns patches, squared_patches, image_patches, and those of --images.",
        ),
        click.option(
            "--checksums",
            is_flag=True,
            help="A checksum of each part, by which it is verified whenever it is read. Reads all shards once.",
        ),
    ]
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


def asked_parts(asked: Mapping[str, Any]) -> AskedParts:
    """What the user's options ask for.

    Raises:
        UsageError: they are not written so.
    """
    columns = {}
    for text in asked["columns"]:
        name, equals, field = text.partition("=")
        if not (name and equals and field):
            raise UsageError(f"--column {text}: that is no name and part", fix="write --column bytes=jpg")
        if name in columns:
            raise UsageError(f"--column {name}=... is given twice", fix="give each column once")
        columns[name] = field
    if asked["checksums"]:
        columns[CHECKSUMS] = "crc32"
    return AskedParts(columns, asked["images"], _patches(asked["patches"]))


def part_words(asked: Mapping[str, Any]) -> list[str]:
    """The same options as they are written on a command line."""
    words = [word for one in asked["columns"] for word in ("--column", one)] + ["--checksums"] * asked["checksums"]
    return (
        words + ["--images"] * asked["images"] + ([] if asked["patches"] is None else ["--patches", asked["patches"]])
    )


def _patches(text: str | None) -> ImagePatches | None:
    if text is None:
        return None
    from energon_lite.extras.balance.image_patches import ImagePatches

    cure = 'write it like --patches \'{"patch_size": 14, "multiple": 28}\', in single quotes; or --patches 14'
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--patches is not JSON: {error}", fix=cure) from None
    value = {"patch_size": value} if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(value, dict) or any(type(one) is not int for one in value.values()):
        raise UsageError("--patches is no JSON object of whole numbers", fix=cure)
    try:
        return ImagePatches(**value)
    except TypeError as error:
        raise UsageError(f"--patches: {error}", fix=cure) from None
