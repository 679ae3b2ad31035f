"""Frame of all pages: head, navigation, keyboard help, the content security policy; addresses of pages and media."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from energon_lite.extras.inspect.preview.element import Child, Markup, document, linked, raw, tag, url_path
from energon_lite.extras.inspect.preview.shown_run import ShownRun
from energon_lite.extras.inspect.preview.steps import Place, SampleMakers, StepFinder

#: Prefix of a name in a URL, so that a name of dots is not a parent folder.
NAME = "="


class Links:
    """Addresses of a page's links.

    Args:
        base: path prefix of all addresses on the server, including the token. None: the page stands alone, and no
            target is available.
    """

    def __init__(self, base: str | None = None):
        self.base = base

    def to(self, *segments: object) -> str | None:
        """Return the address of a page: ``bad``, ``find`` (the target of forms), or one with numbers, as below."""
        return None if self.base is None else self.base + url_path(*segments)

    def place(self, place: Place, *, whole: bool = False) -> str | None:
        """Return the address of a step; with ``whole``, of all its samples."""
        address = self.to("chunk", place.chunk, place.batch) if place.step is None else self.to("step", place.step)
        return f"{address}?whole=1" if address and whole else address

    def sample(self, leaf: int, index: int, epoch: int) -> str | None:
        """Return the address of a single sample."""
        return self.to("sample", leaf, index, epoch)

    def leaf(self, leaf: int, first: int = 0) -> str | None:
        """Return the address of a data set's page, from its ``first`` sample on."""
        return self.to("leaf", leaf, first)

    def media(self, owner: tuple[object, ...], path: Sequence[str]) -> str | None:
        """Return the address of media in a sample, or in a batch; None if there are none.

        Args:
            owner: ``("sample", leaf, index, epoch, "stored" or "made")``, or ``("batch", place..., rank)``.
            path: names and numbers of the fields and entries that lead to it.
        """
        return self.to("media", *owner, *(NAME + step for step in path))


class View(NamedTuple):
    """Sources of the contents of pages: the run, its samples and batches, and the addresses of links."""

    run: ShownRun
    makers: SampleMakers
    finder: StepFinder
    links: Links


_KEYS = (
    ("→ or n", "next step, chunk or page"),
    ("← or p", "previous step, chunk or page"),
    ("g", "go to a step"),
    ("/", "filter, or find a key"),
    ("o", "overview"),
    ("?", "this help"),
)


def policy(nonce: str, *, in_file: bool = False) -> str:
    """Return the content security policy of a page: its own style and script, and its own media."""
    media = "data:" if in_file else "'self'"
    rules = [
        "default-src 'none'",
        f"style-src 'nonce-{nonce}'",
        f"script-src 'nonce-{nonce}'",
        f"img-src {media}",
        f"media-src {media}",
        "base-uri 'none'",
        "form-action 'none'" if in_file else "form-action 'self'",
        *([] if in_file else ["frame-ancestors 'none'"]),
    ]
    return "; ".join(rules)


@cache
def _file(name: str) -> str:
    return (files("energon_lite.extras.inspect.preview") / name).read_text(encoding="utf-8")


def page(
    view: View,
    nonce: str,
    title: str,
    *main: Child,
    place: Place | None = None,
    before: str | None = None,
    after: str | None = None,
) -> bytes:
    """Make a page.

    Args:
        title: title of the page.
        main: contents of the page.
        place: place in the run, if the page shows one.
        before, after: addresses of the previous and the next page.
    """
    rule = icon = None
    if view.links.base is None:
        rule = tag("meta", http_equiv="Content-Security-Policy", content=policy(nonce, in_file=True))
    else:
        icon = tag("link", rel="icon", href=view.links.to("icon"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        rule,
        tag("title", f"{title} · {view.run.title}"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        icon,
        tag("style", raw(_file("page.css")), nonce=nonce),
    )
    body = tag(
        "body",
        tag("a.skip", "Skip to content", href="#content"),
        _header(view, place),
        tag("main", main, id="content", tabindex=-1),
        _steps(before, after),
        _help(),
        tag("script", raw(_file("page.js")), nonce=nonce),
    )
    return document(head, body)


def _header(view: View, place: Place | None) -> Markup:
    nav, forms, links = None, list[Child](), view.links
    if links.base is not None:
        pairs = (("Overview", links.base), ("Bad samples", links.to("bad")))
        items = [tag("li", tag("a", text, href=address)) for text, address in pairs]
        nav = tag("nav", tag("ul", items), aria_label="Pages")
        unit = "step" if place is None or place.step is not None else "chunk"
        value = None if place is None else place.chunk if place.step is None else place.step
        limits = {"min": 0, "max": 10**15, "required": True, "value": value}
        go = [
            tag("label", "Go to ", unit, for_="go-to"),
            tag("input", type="number", name="number", id="go-to", **limits),
        ]
        go += [tag("input", type="hidden", name="what", value=unit), tag("button", "Go", type="submit")]
        key = tag("input", type="search", name="key", id="find-key", required=True, autocomplete="off")
        ask = [tag("label", "Find key", for_="find-key"), key, tag("button", "Find", type="submit")]
        forms = [
            tag("form", fields, action=links.to("find"), method="get", role="search", aria_label=label)
            for fields, label in ((go, f"Go to a {unit}"), (ask, "Find a sample by its key"))
        ]
    part = tag("span.badge", view.run.options.split_part)
    return tag("header", tag("p.title", linked(view.run.title, links.base), " ", part), nav, tag("div.forms", forms))


def _steps(before: str | None, after: str | None) -> Markup | None:
    if before is None and after is None:
        return None
    turns = ((before, "← Previous", "prev"), (after, "Next →", "next"))
    ways = [tag("a", text, href=to, rel=rel) if to else tag("span.muted", text) for to, text, rel in turns]
    return tag("nav.turn", ways, aria_label="Previous and next")


def _help() -> Markup:
    rows = [tag("tr", tag("td", tag("kbd", keys)), tag("td", what)) for keys, what in _KEYS]
    off = tag("label", tag("input", type="checkbox", id="keys-on", checked=True), " single keys are shortcuts")
    close = tag("form", tag("button", "Close", type="submit"), method="dialog")
    heading = tag("h2", "Keyboard", id="help-title")
    keys = tag("table", tag("tbody", rows))
    dialog = tag("dialog", heading, keys, tag("p", off), close, id="help", aria_labelledby="help-title")
    button = tag("button", "Keyboard", type="button", id="show-help", hidden=True)
    status = tag("p.visually-hidden", "", id="said", role="status", aria_live="polite")
    return tag("footer", button, status, dialog)
