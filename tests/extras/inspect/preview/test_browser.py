"""The pages in a real browser: what is run, what is refused, what keys do, and what a screen reader is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from energon_lite import TaskEncoder
from energon_lite.extras.inspect.preview.server import PreviewServer
from energon_lite.extras.inspect.preview.shown_run import RunOptions, ShownRun
from energon_lite.extras.inspect.preview.site import Site, write_page
from tests.conftest import write_dataset
from tests.extras.inspect.preview.chromium import NAMES, Chromium, find_chromium, running
from tests.extras.inspect.preview.samples_to_show import Keep, Words, blend, hostile
from tests.extras.inspect.preview.served import serving

PROGRAM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason=f"there is no browser: none of {', '.join(NAMES)}"),
]
#: What a screen reader has to be told a name of.
_ROLES = "link button image img textbox searchbox spinbutton checkbox article navigation"
NAMED = frozenset(_ROLES.split())
#: Loaded pictures; sounds and films whose beginning was understood.
LOADED = """Promise.all([...document.querySelectorAll("img")].map((one) => {
  one.loading = "eager"; return one.decode().then(() => one.naturalWidth > 1, () => false); }))"""
PLAYABLE = """Promise.all([...document.querySelectorAll("audio, video")].map((one) => new Promise((done) => {
  one.preload = "metadata"; one.onloadedmetadata = () => done(one.duration > 0); one.onerror = () => done(false);
  if (one.readyState > 0) done(one.duration > 0); else one.load(); })))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    assert PROGRAM is not None
    with running(PROGRAM, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., PreviewServer]]:
    with ExitStack() as stack:

        def make(path: Path, encoder: TaskEncoder, **options: object) -> PreviewServer:
            site = Site(ShownRun.open(str(path), RunOptions(**options), encoder))  # type: ignore[arg-type]
            return stack.enter_context(serving(site))

        yield make


@pytest.fixture(scope="module")
def server(serve: Callable[..., PreviewServer], tmp_path_factory: pytest.TempPathFactory) -> PreviewServer:
    return serve(blend(tmp_path_factory.mktemp("looked-at")), Keep())


def test_pictures_sounds_and_films(browser: Chromium, server: PreviewServer) -> None:
    browser.open(f"{server.url}sample/0/1/0")
    assert browser.run(LOADED) == [True, True]  # as stored, and as made
    for leaf, players in ((1, 2), (2, 2)):
        browser.open(f"{server.url}sample/{leaf}/1/0")
        assert browser.run(PLAYABLE) == [True] * players
    assert browser.complaints == []


def test_keys(browser: Chromium, server: PreviewServer) -> None:
    def title() -> str:
        return str(browser.run("document.querySelector('h1').textContent"))

    browser.open(f"{server.url}step/1000000000")
    browser.press("ArrowRight")
    browser.wait("Page.loadEventFired")
    assert title() == "Step 1,000,000,001"
    browser.press("p")
    browser.wait("Page.loadEventFired")
    assert title() == "Step 1,000,000,000"
    browser.press("g")
    assert browser.run("document.activeElement.id") == "go-to"
    browser.press("n")  # in a field, a letter is a letter
    assert title() == "Step 1,000,000,000"
    browser.run("document.activeElement.blur()")
    browser.press("?")
    assert browser.run("document.querySelector('#help').open") is True
    browser.press("n")
    browser.run("document.querySelector('#keys-on').click(); document.querySelector('#help').close()")
    browser.press("n")
    assert title() == "Step 1,000,000,000"  # single keys are switched off
    browser.run("localStorage.clear()")
    assert browser.complaints == []


def test_what_a_screen_reader_finds(browser: Chromium, server: PreviewServer) -> None:
    browser.open(f"{server.url}sample/0/1/0")
    spoken = browser.spoken()
    roles = {role for role, _ in spoken}
    assert {"main", "navigation", "banner", "contentinfo", "search", "heading", "article"} <= roles
    for role, name in spoken:
        assert role not in NAMED or name.strip(), (role, name)
    assert any(role in ("image", "img") and name.startswith("png of sample p1") for role, name in spoken)


def test_light_and_dark_narrow_and_wide(browser: Chromium, server: PreviewServer) -> None:
    grounds = set()
    for scheme in ("light", "dark"):
        for width in (360, 1280):
            browser.look(scheme, width)
            for path in ("", "step/3", "sample/2/0/0"):
                browser.open(server.url + path)
                sticks_out = "document.documentElement.scrollWidth > innerWidth"
                assert browser.run(sticks_out) is False, (path, width)
            grounds.add((scheme, browser.run("getComputedStyle(document.body).backgroundColor")))
    assert len(grounds) == len({ground for _, ground in grounds}) == 2
    browser.look()


def test_hostile_samples(browser: Chromium, serve: Callable[..., PreviewServer], tmp_path: Path) -> None:
    server = serve(hostile(tmp_path), Keep(), batch_size=2)
    file = tmp_path / "page.html"
    write_page(str(file), server.site)
    pages = [server.url + path for path in ("", "step/0", "leaf/0/0", "sample/0/0/0")]
    for url in (*pages, f"file://{file}"):
        browser.open(url)
        assert "OWNED" not in browser.run("document.title") and browser.run("document.scripts.length") == 1
        assert browser.run("document.querySelectorAll('img, iframe').length") == 0
    assert browser.complaints == []  # nothing had to be refused: it never became an element


def test_no_number_breaks_in_its_middle(browser: Chromium, serve: Callable[..., PreviewServer], tmp_path: Path) -> None:
    text = " ".join(str(10**6 + n) for n in range(300)).encode()
    server = serve(write_dataset(tmp_path / "numbers", {"n.tar": [("a", {"txt": text})]}), Words(), batch_size=1)
    browser.look(width=360)
    browser.open(f"{server.url}sample/0/0/0")
    lines = "[...document.querySelectorAll('.numbers > * > span')].map((one) => one.getClientRects().length)"
    found = browser.run(lines)
    browser.look()
    assert len(found) >= 300 and set(found) == {1}


def test_a_long_row_of_tokens(browser: Chromium, serve: Callable[..., PreviewServer], tmp_path: Path) -> None:
    text = " ".join(str(n % 500) for n in range(10_001)).encode()
    server = serve(write_dataset(tmp_path / "long", {"l.tar": [("a", {"txt": text})]}), Words(), batch_size=1)
    browser.open(f"{server.url}sample/0/0/0")  # a second or two on a machine that does nothing else
    assert browser.run("document.querySelectorAll('.tokens span > span, .tokens mark > span').length") >= 10_000
    words = browser.run("document.querySelector('.token-figure figcaption').textContent")
    assert "10,000 tokens and the label of the last" in words and "learned" in words
