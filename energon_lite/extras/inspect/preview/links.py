"""Addresses of pages and media: on the server, or inside one written file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlencode

from energon_lite.extras.inspect.preview.element import url_path
from energon_lite.extras.inspect.preview.steps import Place

__all__ = ["Links", "ServedLinks"]

#: Prefix of a name in a URL, so that a name of dots is not a parent folder.
NAME = "="


class Links(Protocol):
    """Interface for the addresses of a page's links; None if a target is not available."""

    def overview(self) -> str | None:
        """Return the address of the first page."""

    def place(self, place: Place, *, whole: bool = False) -> str | None:
        """Return the address of a step; with ``whole``, of all its samples."""

    def sample(self, leaf: int, index: int, epoch: int) -> str | None:
        """Return the address of a single sample."""

    def leaf(self, leaf: int, first: int = 0) -> str | None:
        """Return the address of a data set's page, from its ``first`` sample on."""

    def bad(self) -> str | None:
        """Return the address of the page of bad samples."""

    def find(self) -> str | None:
        """Return the target of the forms that find a step or a sample."""

    def media(self, owner: tuple[object, ...], path: Sequence[str]) -> str | None:
        """Return the address of media in a sample, or in a batch.

        Args:
            owner: ``("sample", leaf, index, epoch, "stored" or "made")``, or ``("batch", place..., rank)``.
            path: names and numbers of the fields and entries that lead to it.
        """


class ServedLinks:
    """Addresses on the server.

    Args:
        base: path prefix of all addresses, including the token.
    """

    def __init__(self, base: str):
        self._base = base

    def overview(self) -> str:
        return self._base

    def place(self, place: Place, *, whole: bool = False) -> str:
        more = "?" + urlencode({"whole": 1}) if whole else ""
        if place.step is not None:
            return self._base + url_path("step", place.step) + more
        return self._base + url_path("chunk", place.chunk, place.batch) + more

    def sample(self, leaf: int, index: int, epoch: int) -> str:
        return self._base + url_path("sample", leaf, index, epoch)

    def leaf(self, leaf: int, first: int = 0) -> str:
        return self._base + url_path("leaf", leaf, first)

    def bad(self) -> str:
        return self._base + "bad"

    def find(self) -> str:
        return self._base + "find"

    def media(self, owner: tuple[object, ...], path: Sequence[str]) -> str:
        return self._base + url_path("media", *owner, *(NAME + step for step in path))
