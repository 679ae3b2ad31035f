"""A page as one file, with its pictures, sounds and films in it: to be kept, or sent to somebody."""

from __future__ import annotations

import secrets
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from energon_lite.extras.inspect.preview.element import Child, element
from energon_lite.extras.inspect.preview.page_frame import page
from energon_lite.extras.inspect.preview.run_pages import leaf_main, run_facts, tree
from energon_lite.extras.inspect.preview.sample_view import sample_card
from energon_lite.extras.inspect.preview.site import Site
from energon_lite.extras.inspect.preview.step_page import step_main
from energon_lite.extras.inspect.preview.steps import Place
from energon_lite.extras.inspect.preview.value_view import Amount
from energon_lite.storage.files.atomic_file import write_bytes

__all__ = ["FileLinks", "write_page"]

#: Larger media, and more of all of them together, are left out of the file.
_LARGEST, _ALTOGETHER = 24 << 20, 96 << 20


class FileLinks:
    """Addresses in a file: media are in it, and other pages are not to be had.

    Attributes:
        left_out: media that were too large.
    """

    def __init__(self, site: Site):
        self._site, self._used, self.left_out = site, 0, 0

    def overview(self) -> None:
        return None

    def place(self, place: Place, *, whole: bool = False) -> None:
        return None

    def sample(self, leaf: int, index: int, epoch: int) -> None:
        return None

    def leaf(self, leaf: int, first: int = 0) -> None:
        return None

    def bad(self) -> None:
        return None

    def find(self) -> None:
        return None

    def media(self, owner: tuple[object, ...], path: Sequence[str]) -> str | None:
        found = self._site.media(owner, path)
        if found is None:
            return None
        if found.size > _LARGEST or self._used + found.size > _ALTOGETHER:
            self.left_out += 1
            return None
        self._used += found.size
        data = b64encode(found.read(0, found.size)).decode("ascii")
        return f"data:{found.content_type};base64,{data}"


def write_page(
    path: str,
    site: Site,
    *,
    places: Sequence[Place] = (),
    samples: Sequence[tuple[int, int]] = (),
    leaf: int | None = None,
) -> int:
    """Write what is asked for as one file of HTML.

    Args:
        path: of the file; it is replaced as a whole.
        places: steps that are shown; none of these: the first one.
        samples: ``(leaf, index)`` that are shown.
        leaf: a data set that is shown.

    Returns:
        Media that were too large for the file.

    Raises:
        UsageError: there is no such step, or no such sample.
    """
    links = FileLinks(site)
    run, parts = site.run, list[Child]()
    for number, index in samples:
        parts.append(sample_card(site.makers.sample(number, index, 0), run, links, amount=Amount(200_000, None, 64)))
    if leaf is not None:
        parts += leaf_main(run, links, site.makers, leaf, 0)
    if not samples and leaf is None:
        for place in places or (site.first,):
            parts += step_main(run, links, site.makers, site.finder, place, whole=True)
    main: list[Any] = [element("h1", run.title), run_facts(run), tree(run, links, site.makers), *parts]
    write_bytes(path, page(run, links, secrets.token_urlsafe(16), "Preview", main, in_file=True))
    return links.left_out
