"""Where pages and media are: on the server, or inside of the one file that is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlencode

from energon_lite.extras.inspect.preview.element import url_path
from energon_lite.extras.inspect.preview.steps import Place

__all__ = ["Links", "ServedLinks"]

#: What stands before a name in a URL, so that a name of dots is no way up.
NAME = "="


class Links(Protocol):
    """Addresses of what a page refers to; None: it is not to be had there."""

    def overview(self) -> str | None:
        """The first page."""

    def place(self, place: Place, *, whole: bool = False) -> str | None:
        """A step; with ``whole``, all samples of it."""

    def sample(self, leaf: int, index: int, epoch: int) -> str | None:
        """A sample by itself."""

    def leaf(self, leaf: int, first: int = 0) -> str | None:
        """A data set, from its ``first`` sample on."""

    def bad(self) -> str | None:
        """The bad samples."""

    def find(self) -> str | None:
        """Where the forms lead that find a step or a sample."""

    def media(self, owner: tuple[object, ...], path: Sequence[str]) -> str | None:
        """Something of a sample, or of a batch, that a browser shows.

        Args:
            owner: ``("sample", leaf, index, epoch, "stored" or "made")``, or ``("batch", place..., rank)``.
            path: names and numbers that lead to it.
        """


class ServedLinks:
    """Addresses on the server.

    Args:
        base: the path that all of them begin with; has the token.
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
