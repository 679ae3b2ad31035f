"""Options of ``measure`` and ``prepare`` for columns that are computed from stored parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from energon_lite.entry_points import columns as columns_of_guests
from energon_lite.entry_points import load
from energon_lite.errors import UsageError
from energon_lite.storage.index.columns import CHECKSUMS

if TYPE_CHECKING:
    from energon_lite.loading.measuring.parts import RequestedColumns  # imports torch

#: Options of guests, by name.
_OF_GUESTS = {name: option for guest in columns_of_guests().values() for name, option in guest.options.items()}
#: Names of the values of all options.
PART_OPTIONS = ("columns", *_OF_GUESTS, "checksums")


class AskedParts(NamedTuple):
    """Columns that these options request.

    Attributes:
        columns: name of the column -> part whose values it stores.
        others: columns of guests.
    """

    columns: dict[str, str]
    others: tuple[RequestedColumns, ...]

    def __bool__(self) -> bool:
        return bool(self.columns or self.others)


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
            "--checksums",
            is_flag=True,
            help="Add a checksum of each part, by which it is verified on each read. Reads all shards once.",
        ),
        *(
            click.option(f"--{name}", metavar=option.metavar or None, is_flag=not option.metavar, help=option.help)
            for name, option in _OF_GUESTS.items()
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
            raise UsageError(f"--column {text}: expected NAME=PART", fix="write --column bytes=jpg")
        if name in columns:
            raise UsageError(f"--column {name}=... is given twice", fix="give each column once")
        columns[name] = field
    if asked["checksums"]:
        columns[CHECKSUMS] = "crc32"
    others = []
    for guest in columns_of_guests().values():
        given = {name: asked[name] for name in guest.options}
        if any(value not in (None, False) for value in given.values()):
            make: Callable[[Mapping[str, str | bool | None]], RequestedColumns] = load(guest.target)
            others.append(make(given))
    return AskedParts(columns, tuple(others))


def given_words(names: Collection[str]) -> list[str]:
    """Return the options of the running command that are given, of those with these names, as words."""
    context, words = click.get_current_context(), list[str]()
    for option in context.command.params:
        value = context.params[str(option.name)]
        if option.name in names and value and value != option.get_default(context):
            values = value if isinstance(value, tuple) else [] if value is True else [value]
            words += [word for given in values for word in (option.opts[0], given)] or [option.opts[0]]
    return words
