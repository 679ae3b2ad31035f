"""Writing of a page as one file, with its images, audio and video embedded."""

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

#: The largest embedded media in bytes, and the largest total of all of them.
_LARGEST = 24 << 20
_ALTOGETHER = 96 << 20


class FileLinks:
    """Addresses in a file: media are embedded, and other pages are not available.

    Attributes:
        left_out: number of media that were too large.
    """

    def __init__(self, site: Site):
        self._site = site
        self._used = 0
        self.left_out = 0

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
        media = self._site.media(owner, path)
        if media is None:
            return None
        if media.size > _LARGEST or self._used + media.size > _ALTOGETHER:
            self.left_out += 1
            return None
        self._used += media.size
        data = b64encode(media.read(0, media.size)).decode("ascii")
        return f"data:{media.content_type};base64,{data}"


def write_page(
    path: str,
    site: Site,
    *,
    places: Sequence[Place] = (),
    samples: Sequence[tuple[int, int]] = (),
    leaf: int | None = None,
) -> int:
    """Write steps, samples and data sets as one file of HTML.

    Args:
        path: path of the file, which is replaced atomically.
        places: steps to show; the first step by default.
        samples: ``(leaf, index)`` of the samples to show.
        leaf: number of a data set to show.

    Returns:
        The number of media that were too large for the file.

    Raises:
        UsageError: a step or a sample does not exist.
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
