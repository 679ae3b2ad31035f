"""Options of commands that store columns of parts: ``--column``, ``--images``, ``--patches``, ``--checksums``."""

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
    """Columns that these options request.

    Attributes:
        columns: name of the column -> part whose values it stores.
        images: True for the sizes of images.
        patches: rule for the number of patches of an image.
    """

    columns: dict[str, str]
    images: bool
    patches: ImagePatches | None

    def __bool__(self) -> bool:
        return bool(self.columns or self.images or self.patches is not None)


def part_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command."""
    options = [
        click.option(
            "--column",
            "columns",
            multiple=True,
            metavar="NAME=PART",
            help="A further column (repeatable): bytes of a part (txt) or of all (*), rows of an array (npy), a value "
            "in a part (json.loss_tokens).",
        ),
        click.option(
            "--images",
            is_flag=True,
            help="Add the columns images and image_sizes: number of images, and their heights and widths.",
        ),
        click.option(
            "--patches",
            metavar="JSON",
            help='Rule for the patches of an image: \'{"patch_size": 14, "multiple": 28}\' (also image_size, '
            "min_pixels, max_pixels). Adds the columns patches, squared_patches, image_patches, and those of --images.",
        ),
        click.option(
            "--checksums",
            is_flag=True,
            help="Add a checksum of each part, by which it is verified on each read. Reads all shards once.",
        ),
    ]
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


def asked_parts(asked: Mapping[str, Any]) -> AskedParts:
    """Parse the user's options.

    Raises:
        UsageError: an option has a wrong form.
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
    """Format the options as words of a command line."""
    words = [word for column in asked["columns"] for word in ("--column", column)] + ["--checksums"] * asked[
        "checksums"
    ]
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
    if not isinstance(value, dict) or any(type(number) is not int for number in value.values()):
        raise UsageError("--patches is no JSON object of whole numbers", fix=cure)
    try:
        return ImagePatches(**value)
    except TypeError as error:
        raise UsageError(f"--patches: {error}", fix=cure) from None
