"""Pages by address, served or written as one file with its media."""

from __future__ import annotations

import secrets
from base64 import b64encode
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from energon_lite.errors import EnergonLiteError, UsageError, counted
from energon_lite.extras.inspect.audited_run import json_lines
from energon_lite.extras.inspect.preview.element import Child, tag
from energon_lite.extras.inspect.preview.media import Media, made_media, part_size, png_of, stored_media
from energon_lite.extras.inspect.preview.page_frame import NAME, Links, View, page
from energon_lite.extras.inspect.preview.pages import (
    LEAF_SAMPLES,
    bad_main,
    leaf_label,
    leaf_main,
    overview_main,
    run_facts,
    sample_card,
    tree,
)
from energon_lite.extras.inspect.preview.shown_run import ShownRun
from energon_lite.extras.inspect.preview.step_page import step_main
from energon_lite.extras.inspect.preview.steps import Place, SampleMakers, StepFinder
from energon_lite.extras.inspect.preview.value_view import Amount
from energon_lite.storage.files.atomic_file import write_bytes

_HTML = "text/html; charset=utf-8"
#: Most of a value that is shown on a sample's own page.
_WHOLE = Amount(200_000, None, 64)
#: The most digits of a number in an address.
_DIGITS = 18
#: The most fields of a query.
_FIELDS = 16
#: Most lines of a quarantine file that are shown.
_MOST_LINES = 500


@dataclass(frozen=True)
class Answer:
    """Response of the server.

    Args:
        status: HTTP status.
        data: the whole body, unless it is media.
        content_type: MIME type of ``data``.
        media: body that is sent in ranges.
        headers: further headers.
    """

    status: HTTPStatus
    data: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    media: Media | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class Site:
    """Maker of the pages of a run.

    Args:
        run: the previewed run.
        quarantine: quarantine file with bad samples, as a loader writes it, or None.

    Attributes:
        base: path prefix of all addresses.
        first: place that the first page links to.
    """

    def __init__(self, run: ShownRun, quarantine: str | None = None):
        self.run = run
        self.quarantine = quarantine
        self.base = "/"
        self.makers = SampleMakers(run)
        self.finder = StepFinder(run, self.makers)
        self.first: Place = self.finder.start()
        self._batches = lru_cache(8)(self.finder.make)

    @property
    def links(self) -> Links:
        """Addresses of pages and media."""
        return Links(self.base)

    def view(self, links: Links | None = None) -> View:
        """Return the sources of pages, with these links instead of those of the server."""
        return View(self.run, self.makers, self.finder, links or self.links)

    def answer(self, segments: Sequence[str], query: str, nonce: str) -> Answer:
        """Return the response at an address.

        Raises:
            EnergonLiteError: the step or sample does not exist.
        """
        if (fields := 1 + query.count("&")) > _FIELDS:
            wrong = UsageError(f"a query of {fields:,} fields", fix=f"give {_FIELDS} at most")
            return self.error(wrong, nonce, HTTPStatus.BAD_REQUEST)
        asked = {name: values[-1] for name, values in parse_qs(query).items()}
        match segments:
            case []:
                first = self.links.place(self.first)
                return self._page(nonce, "Overview", overview_main(self.view(), first), after=first)
            case ["step", number]:
                return self._place(self.finder.at_step(_number(number)), asked, nonce)
            case ["chunk", chunk, batch]:
                return self._place(Place(None, _number(chunk), _number(batch)), asked, nonce)
            case ["sample", leaf, index, epoch]:
                return self._sample(_number(leaf), _number(index), _number(epoch), nonce)
            case ["leaf", leaf, first]:
                return self._leaf(_number(leaf), _number(first), nonce)
            case ["bad"]:
                lines = [] if self.quarantine is None else _lines(self.quarantine)
                return self._page(nonce, "Bad samples", bad_main(self.view(), lines, self.quarantine))
            case ["find"]:
                return self._find(asked, nonce)
            case ["icon"]:
                return Answer(HTTPStatus.OK, media=Media.of("image/png", _icon()))
            case ["media", *rest]:
                return self._media(rest)
        return self.error(UsageError("there is no such page", fix="go to the overview"), nonce)

    def error(self, error: EnergonLiteError, nonce: str, status: HTTPStatus = HTTPStatus.NOT_FOUND) -> Answer:
        """Make a page with an error and its fix."""
        what = getattr(error, "what", str(error))
        title, *lines = [text for text in (what[:1].upper() + what[1:], error.where, error.fix) if text]
        main = tag("h1", title), [tag("p", line) for line in lines]
        return Answer(status, page(self.view(), nonce, "Not found", *main), _HTML)

    def _page(self, nonce: str, title: str, main: list[Child], **more: Any) -> Answer:
        return Answer(HTTPStatus.OK, page(self.view(), nonce, title, main, **more), _HTML)

    def _place(self, place: Place, asked: Mapping[str, str], nonce: str) -> Answer:
        main = step_main(self.view(), place, whole="whole" in asked)
        around = {"before": self.finder.before(place), "after": self.finder.after(place)}
        turns = {name: None if there is None else self.links.place(there) for name, there in around.items()}
        return self._page(nonce, str(place).capitalize(), main, place=place, **turns)

    def _sample(self, leaf: int, index: int, epoch: int, nonce: str) -> Answer:
        shown = self.makers.sample(leaf, index, epoch)
        heading = tag("h1", "Sample ", tag("bdi.key", shown.key))
        is_last = index + 1 == len(self.run.leaves[leaf].source)
        return self._page(
            nonce,
            f"Sample {shown.key}",
            [heading, sample_card(self.view(), shown, amount=_WHOLE)],
            before=self.links.sample(leaf, index - 1, epoch) if index else None,
            after=None if is_last else self.links.sample(leaf, index + 1, epoch),
        )

    def _leaf(self, leaf: int, first: int, nonce: str) -> Answer:
        if not self.run.dataset.has(leaf, first):
            raise UsageError(f"there is no sample {first:,} of data set {leaf}", fix="go to the overview")
        stop = first + LEAF_SAMPLES
        return self._page(
            nonce,
            self.run.leaf_name(leaf),
            leaf_main(self.view(), leaf, first),
            before=self.links.leaf(leaf, max(0, first - LEAF_SAMPLES)) if first else None,
            after=self.links.leaf(leaf, stop) if stop < len(self.run.leaves[leaf].source) else None,
        )

    def _find(self, asked: Mapping[str, str], nonce: str) -> Answer:
        if "number" in asked:
            number = _number(asked["number"])
            place = Place(None, number) if asked.get("what") == "chunk" else self.finder.at_step(number)
            self.finder.check(place)
            return _moved(self.links.place(place))
        key = asked.get("key", "")
        matches = self.run.find_key(key)
        if len(matches) == 1:
            return _moved(self.links.sample(*matches[0], 0))
        rows = []
        for leaf, index in matches[:200]:
            link = tag("a", f"number {index:,}", href=self.links.sample(leaf, index, 0))
            rows.append(tag("li", leaf_label(self.view(), leaf), link))
        heading = tag("h1", f"{counted(len(matches), 'sample')} with the key ", tag("bdi", key))
        return self._page(nonce, "Found", [heading, tag("ul", rows)])

    def media(self, owner: Sequence[object], path: Sequence[str]) -> Media | None:
        """Return an image, audio or video in a sample or a batch; None if there are no such media.

        Arguments as for :meth:`~energon_lite.extras.inspect.preview.page_frame.Links.media`.
        """
        try:
            match [*map(str, owner)], [*path]:
                case ["sample", leaf, index, epoch, "stored"], [name]:
                    stored = self.makers.sample(_number(leaf), _number(index), _number(epoch)).stored
                    is_file = part_size(stored[name]) is not None
                    return stored_media(stored[name]) if is_file else made_media(stored, [name])
                case ["sample", leaf, index, epoch, "made"], [which, *names]:
                    made = self.makers.sample(_number(leaf), _number(index), _number(epoch)).made
                    return made_media(made[_number(which)], names)
                case ["leaf", leaf], ["small"]:
                    small = self.makers.small_picture(_number(leaf))
                    return Media.of("image/png", small) if small else None
                case ["batch", first, second, rank], names:
                    if self.finder.by_step:
                        return made_media(self._batches(Place(_number(first)))[_number(rank)].batch, names)
                    place = Place(None, _number(first), _number(second))
                    return made_media(self._batches(place)[0].batch, names)
        except (LookupError, UsageError):
            pass
        return None

    def _media(self, rest: Sequence[str]) -> Answer:
        names = [number for number, segment in enumerate(rest) if segment.startswith(NAME)]
        cut = names[0] if names else len(rest)
        media = self.media(rest[:cut], [name.removeprefix(NAME) for name in rest[cut:]])
        if media is None:
            return Answer(HTTPStatus.NOT_FOUND, b"there are no such media\n")
        headers = {"Content-Disposition": "inline", "Cache-Control": "private, max-age=600"}
        return Answer(HTTPStatus.OK, media=media, headers=headers)


@cache
def _icon() -> bytes:
    """Draw the icon of the pages: four squares, like samples of a batch."""
    pixels = np.zeros((16, 16, 4), np.uint8)
    for place, colour in enumerate(((31, 95, 168), (191, 128, 70), (70, 191, 128), (160, 70, 191))):
        top, left = 1 + place // 2 * 8, 1 + place % 2 * 8
        pixels[top : top + 6, left : left + 6] = (*colour, 255)
    return png_of(pixels)


def _moved(address: str | None) -> Answer:
    return Answer(HTTPStatus.SEE_OTHER, headers={"Location": address or "/"})


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS:
        raise UsageError("this is not a number", fix="give a whole number from 0 on")
    return int(text)


def _lines(path: str) -> list[dict[str, Any]]:
    """Read the last lines of a quarantine file, newest first, without those that are not JSON.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        return [*deque(json_lines(path), _MOST_LINES)][::-1]
    except OSError as error:
        what = f"the quarantine file cannot be read: {error.strerror}"
        raise UsageError(what, where=path, fix="correct --quarantine") from None


#: The largest embedded media in bytes, and the largest total of all of them.
_LARGEST = 24 << 20
_ALTOGETHER = 96 << 20


class FileLinks(Links):
    """Addresses in a file: media are embedded, and other pages are not available.

    Attributes:
        left_out: number of media that were too large.
    """

    def __init__(self, site: Site):
        super().__init__()
        self._site = site
        self._used = 0
        self.left_out = 0

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
    view, parts = site.view(links), list[Child]()
    parts += [sample_card(view, site.makers.sample(number, index, 0), amount=_WHOLE) for number, index in samples]
    if leaf is not None:
        parts += leaf_main(view, leaf, 0)
    if not samples and leaf is None:
        for place in places or (site.first,):
            parts += step_main(view, place, whole=True)
    main: list[Child] = [tag("h1", site.run.title), run_facts(site.run), tree(view), *parts]
    write_bytes(path, page(view, secrets.token_urlsafe(16), "Preview", main))
    return links.left_out
