"""Frame of all pages: head, navigation, keyboard help, the content security policy; addresses of pages and media."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from energon_lite.extras.inspect.preview.element import Child, Markup, document, element, raw, url_path
from energon_lite.extras.inspect.preview.shown_run import ShownRun
from energon_lite.extras.inspect.preview.steps import Place

#: Prefix of a name in a URL, so that a name of dots is not a parent folder.
NAME = "="


class Links:
    """Addresses of a page's links.

    Args:
        base: path prefix of all addresses on the server, including the token. None: the page stands alone, and no
            target is available.
    """

    def __init__(self, base: str | None = None):
        self._base = base

    def _to(self, *segments: object) -> str | None:
        return None if self._base is None else self._base + url_path(*segments)

    def overview(self) -> str | None:
        """Return the address of the first page."""
        return self._base

    def place(self, place: Place, *, whole: bool = False) -> str | None:
        """Return the address of a step; with ``whole``, of all its samples."""
        address = self._to("chunk", place.chunk, place.batch) if place.step is None else self._to("step", place.step)
        return f"{address}?whole=1" if address and whole else address

    def sample(self, leaf: int, index: int, epoch: int) -> str | None:
        """Return the address of a single sample."""
        return self._to("sample", leaf, index, epoch)

    def leaf(self, leaf: int, first: int = 0) -> str | None:
        """Return the address of a data set's page, from its ``first`` sample on."""
        return self._to("leaf", leaf, first)

    def bad(self) -> str | None:
        """Return the address of the page of bad samples."""
        return self._to("bad")

    def find(self) -> str | None:
        """Return the target of the forms that find a step or a sample."""
        return self._to("find")

    def media(self, owner: tuple[object, ...], path: Sequence[str]) -> str | None:
        """Return the address of media in a sample, or in a batch; None if there are none.

        Args:
            owner: ``("sample", leaf, index, epoch, "stored" or "made")``, or ``("batch", place..., rank)``.
            path: names and numbers of the fields and entries that lead to it.
        """
        return self._to("media", *owner, *(NAME + step for step in path))


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
    run: ShownRun,
    links: Links,
    nonce: str,
    title: str,
    *main: Child,
    place: Place | None = None,
    before: str | None = None,
    after: str | None = None,
    in_file: bool = False,
) -> bytes:
    """Make a page.

    Args:
        title: title of the page.
        main: contents of the page.
        place: place in the run, if the page shows one.
        before, after: addresses of the previous and the next page.
    """
    rule = (
        element("meta", http_equiv="Content-Security-Policy", content=policy(nonce, in_file=True)) if in_file else None
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        rule,
        element("title", f"{title} · {run.title}"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        None if in_file else element("link", rel="icon", href=f"{links.overview()}icon"),
        element("style", raw(_file("page.css")), nonce=nonce),
    )
    body = element(
        "body",
        element("a", "Skip to content", href="#content", class_="skip"),
        _header(run, links, title, place),
        element("main", main, id="content", tabindex=-1),
        _steps(before, after),
        _help(),
        element("script", raw(_file("page.js")), nonce=nonce),
    )
    return document(head, body)


def error_page(run: ShownRun, links: Links, nonce: str, lines: list[str]) -> bytes:
    """Make a page with an error and its fix."""
    paragraphs = [element("p", line) for line in lines[1:]]
    return page(run, links, nonce, "Not found", element("h1", lines[0]), paragraphs)


def _header(run: ShownRun, links: Links, title: str, place: Place | None) -> Markup:
    pairs = [("Overview", links.overview()), ("Bad samples", links.bad())]
    items = [element("li", element("a", text, href=address)) for text, address in pairs if address is not None]
    nav = element("nav", element("ul", items), aria_label="Pages") if items else None
    forms: list[Child] = []
    if (find := links.find()) is not None:
        unit = "step" if place is None or place.step is not None else "chunk"
        number = element(
            "input",
            type="number",
            name="number",
            id="go-to",
            min=0,
            max=10**15,
            required=True,
            value=None if place is None else place.chunk if place.step is None else place.step,
        )
        go = [element("label", "Go to ", unit, for_="go-to"), number]
        go += [element("input", type="hidden", name="what", value=unit), element("button", "Go", type="submit")]
        forms.append(element("form", go, action=find, method="get", role="search", aria_label=f"Go to a {unit}"))
        key = element("input", type="search", name="key", id="find-key", required=True, autocomplete="off")
        ask = [element("label", "Find key", for_="find-key"), key, element("button", "Find", type="submit")]
        forms.append(
            element("form", ask, action=find, method="get", role="search", aria_label="Find a sample by its key")
        )
    name = element("a", run.title, href=links.overview()) if links.overview() else run.title
    part = element("span", run.options.split_part, class_="badge")
    return element("header", element("p", name, " ", part, class_="title"), nav, element("div", forms, class_="forms"))


def _steps(before: str | None, after: str | None) -> Markup | None:
    if before is None and after is None:
        return None
    turns = ((before, "← Previous", "prev"), (after, "Next →", "next"))
    ways = [
        element("a", text, href=address, rel=rel) if address else element("span", text, class_="muted")
        for address, text, rel in turns
    ]
    return element("nav", ways, class_="turn", aria_label="Previous and next")


def _help() -> Markup:
    rows = [element("tr", element("td", element("kbd", keys)), element("td", what)) for keys, what in _KEYS]
    off = element("label", element("input", type="checkbox", id="keys-on", checked=True), " single keys are shortcuts")
    close = element("form", element("button", "Close", type="submit"), method="dialog")
    heading = element("h2", "Keyboard", id="help-title")
    dialog = element(
        "dialog",
        heading,
        element("table", element("tbody", rows)),
        element("p", off),
        close,
        id="help",
        aria_labelledby="help-title",
    )
    button = element("button", "Keyboard", type="button", id="show-help", hidden=True)
    status = element("p", "", id="said", class_="visually-hidden", role="status", aria_live="polite")
    return element("footer", button, status, dialog)
