from __future__ import annotations

import io
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import numpy as np
import pytest
from PIL import Image

from energon_lite.errors import UsageError
from energon_lite.extras.inspect.preview import site
from energon_lite.extras.inspect.preview.server import PreviewServer
from energon_lite.extras.inspect.preview.shown_run import RunOptions, ShownRun
from energon_lite.extras.inspect.preview.site import Site
from tests.extras.inspect.preview.samples_to_show import Keep, blend, hostile, png, sound
from tests.extras.inspect.preview.served import Page, ask, serving
from tests.testing import output_of

#: What pages are made of.
_NAMES = """article section div span dl dt dd ol ul li table thead tbody tr th td caption figure figcaption details
summary aside svg rect title bdi code small strong h2 h3 h4 pre img audio video mark"""
ELEMENTS = frozenset(_NAMES.split())


def site_of(path: Path, **options: Any) -> Site:
    return Site(ShownRun.open(str(path), RunOptions(**options), Keep()))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreviewServer]:
    with serving(site_of(blend(tmp_path_factory.mktemp("served")))) as server:
        yield server


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreviewServer]:
    with serving(site_of(hostile(tmp_path_factory.mktemp("attacked")), batch_size=2)) as server:
        yield server


def test_clients_that_leave_are_no_errors(server: PreviewServer, capsys: pytest.CaptureFixture[str]) -> None:
    for error, is_told in ((ConnectionResetError(), False), (TimeoutError(), False), (ValueError("it"), True)):
        try:
            raise error
        except (OSError, ValueError):
            server.handle_error(None, ("127.0.0.1", 1))
        assert bool(capsys.readouterr().err) == is_told


class TestWhoMayAsk:
    @pytest.mark.parametrize(
        ("path", "asked", "status"),
        [
            ("", {}, 200),
            *((path, {}, 403) for path in ("/", "/step/0", "/favicon.ico", "/x/", "/../", "//", "/%C3%BC/")),
            # Under other names; and through a tunnel.
            *(("", {"host": host}, 403) for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example")),
            *(("", {"host": host}, 403) for host in ("", "localhost@evil")),
            *(
                ("", {"host": host}, 200)
                for host in ("localhost", "LOCALHOST:9000", "127.0.0.1:1", "[::1]:8000", "[::1]")
            ),
            *(("step/0", {"method": name}, 405) for name in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")),
            ("", {"method": "BREW"}, 501),
        ],
    )
    def test_with_the_token_from_this_machine_for_looking(
        self, server: PreviewServer, path: str, asked: dict[str, str], status: int
    ) -> None:
        answer = ask(server, path, **asked)
        assert answer.status == status and server.server_address[0] == "127.0.0.1"
        assert (status != 403) or b"<" not in answer.body
        assert (status != 405) or answer.headers["allow"] == "GET, HEAD"

    def test_with_a_part_of_the_token(self, server: PreviewServer) -> None:
        assert ask(server, f"/{server.token[:-1]}/").status == ask(server, f"/{server.token}").status == 403

    def test_only_the_head(self, server: PreviewServer) -> None:
        head, whole = ask(server, "step/0", "HEAD"), ask(server, "step/0")
        assert head.status == 200 and not head.body and abs(int(head.headers["content-length"]) - len(whole.body)) < 200

    def test_a_port_that_is_taken(self, server: PreviewServer) -> None:
        with pytest.raises(UsageError, match="cannot be opened"):
            PreviewServer(server.site, server.server_address[1])


class TestRules:
    def test_what_a_page_may_load(self, server: PreviewServer) -> None:
        first, second = ask(server, "step/0"), ask(server, "step/0")
        rules = dict(rule.split(" ", 1) for rule in first.headers["content-security-policy"].split("; "))
        nonce = rules["script-src"].strip("'")
        assert rules["default-src"] == "'none'" and rules["style-src"] == rules["script-src"]
        assert rules["img-src"] == rules["media-src"] == rules["form-action"] == "'self'"
        assert rules["base-uri"] == rules["frame-ancestors"] == "'none'"
        page = Page(first.text)
        own = [attrs for tag, attrs in page.tags if tag in ("script", "style")]
        assert len(own) == 2 and all(attrs == {"nonce": nonce.removeprefix("nonce-")} for attrs in own)
        assert nonce not in second.headers["content-security-policy"]
        assert not any("style" in attrs or any(name.startswith("on") for name in attrs) for _, attrs in page.tags)

    def test_headers(self, server: PreviewServer) -> None:
        for path in ("", "step/0", "nothing", "media/sample/0/0/0/stored/=png"):
            found = ask(server, path).headers
            assert found["x-content-type-options"] == "nosniff" and found["referrer-policy"] == "no-referrer"
            assert found["cross-origin-resource-policy"] == "same-origin" and found["x-frame-options"] == "DENY"
            assert "server" in found and "Python" not in found["server"]
        assert ask(server, "").headers["cache-control"] == "no-store"

    def test_all_that_a_page_refers_to_is_here(self, server: PreviewServer) -> None:
        """Each link leads to a page, and each picture is one; none leads elsewhere."""
        seen: set[str] = set()
        for path in ("", "step/0", "leaf/0/0", "sample/2/0/0", "bad", "find?key=p1", "find?key=nobody"):
            answer = ask(server, path)
            where = answer.headers.get("location") or server.site.base + path
            for address in Page(answer.text).addresses():
                there = urljoin(where, address)
                assert not urlsplit(there).netloc and (there.startswith(server.site.base) or address.startswith("#"))
                if there not in seen and not address.startswith("#") and len(seen) < 60:
                    seen.add(there)
                    status = ask(server, there).status
                    assert status == 200 or (status == 404 and there.endswith("/find")), there


class TestPages:
    def test_the_overview_has_the_shares(self, server: PreviewServer) -> None:
        answer = ask(server, "")
        assert answer.text.count('class="small"') == 1  # of the pictures, not of sounds and films
        facts = "Samples27 in 3 data sets, shuffledBatchesbatches of 8, on 1 rank; seed 0Task encodertests."
        shares = "SamplesShareFirst picturepictures1250%sounds1225%films325%"
        assert facts in Page(answer.text).text and shares in Page(answer.text).text
        text = Page(ask(server, "leaf/1/6").text).text
        assert "12, crude samplesShare25%Named in" in text
        assert "Samples 6 to 11 of 12s6soundsnumber 6epoch 0s.tarAs" in text

    def test_before_and_after(self, server: PreviewServer) -> None:
        for path, before, after in (
            ("step/0", "", "step/1"), ("step/5", "step/4", "step/6"), ("sample/2/0/1", "", "sample/2/1/1"),
            ("sample/2/2/0", "sample/2/1/0", ""), ("leaf/1/0", "", "leaf/1/6"), ("leaf/1/6", "leaf/1/0", ""),
            ("leaf/1/7", "leaf/1/1", ""), ("", "", "step/0"),
        ):  # fmt: skip
            tags = Page(ask(server, path).text).tags
            turns = {attrs["rel"]: attrs["href"] for name, attrs in tags if name == "a" and "rel" in attrs}
            assert turns == {rel: server.site.base + to for rel, to in (("prev", before), ("next", after)) if to}

    def test_a_step_has_its_samples_what_was_lost_and_what_comes_next(self, server: PreviewServer) -> None:
        finder = server.site.finder
        place = next(at for n in range(50) for at in [finder.at_step(n)] if (0, 4) in _samples(server, at))
        page = Page(ask(server, f"step/{place.step}").text)
        assert "failed in decode" in page.text and "DecodeError" in page.text and "In its place: " in page.text
        assert f"Step {place.step + 1}" in page.text and "Next →" in page.text and "planned from" not in page.text
        assert sum(tag == "article" for tag, _ in page.tags) == 8
        bad = Page(ask(server, "bad").text)
        assert "p4" in bad.text and "DecodeError" in bad.text

    def test_pictures_sounds_and_films_have_words(self, server: PreviewServer) -> None:
        for leaf, tag in ((0, "img"), (1, "audio"), (2, "video")):
            page = Page(ask(server, f"sample/{leaf}/0/0").text)
            found = [attrs for name, attrs in page.tags if name == tag]
            assert found and all(attrs.get("alt") or attrs.get("aria-label") for attrs in found)
            labels = {attrs.get("for") for name, attrs in page.tags if name == "label"}
            inputs = [attrs for name, attrs in page.tags if name == "input"]
            fields = [attrs["id"] for attrs in inputs if attrs.get("type") not in ("hidden", "checkbox")]
            assert fields and labels.issuperset(fields)
        names = [name for name, _ in page.tags]
        assert {"main", "nav", "header", "footer", "h1"} <= set(names) and names.count("h1") == 1

    @pytest.mark.parametrize(
        "path",
        ["step/-1", "step/99999999999999999999", "step/x", "step/1e9", "step/%D9%A1", "sample/9/0/0", "sample/0/999/0",
         "leaf/7/0", "leaf/0/-1", "chunk/0/0", "chunk/0/9999999", "find?number=x", "nothing",
         "find?number=1&what=chunk", "step/0/../../..", "%2e%2e/%2e%2e/etc/passwd", "sample/0/0/99999999999999999999"],
    )  # fmt: skip
    def test_what_is_not_there(self, server: PreviewServer, path: str) -> None:
        answer = ask(server, path)
        assert answer.status == 404 and "Overview" in answer.text

    def test_too_many_fields(self, server: PreviewServer) -> None:
        answer = ask(server, "find?" + "&".join(f"key={number}" for number in range(17)))
        assert answer.status == 400 and "17 fields" in answer.text

    def test_an_address_that_is_none(self, server: PreviewServer) -> None:
        with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10) as client:
            client.sendall(b"GET http://[/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 403 ")

    def test_going_to_a_step_and_finding_a_key(self, server: PreviewServer) -> None:
        moved = ask(server, "find?what=step&number=1000000000")
        assert moved.status == 303 and moved.headers["location"].endswith("/step/1000000000")
        assert ask(server, "find?key=s2").headers["location"].endswith("/sample/1/2/0")

    def test_a_page_that_fails_is_no_end(self, server: PreviewServer, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object) -> None:
            raise RuntimeError("<b>inside</b>")

        monkeypatch.setattr("energon_lite.extras.inspect.preview.site.bad_main", broken)
        answer = ask(server, "bad")
        assert answer.status == 500 and "&lt;b&gt;inside" in answer.text
        assert ask(server, "").status == 200


def _samples(server: PreviewServer, place: object) -> set[tuple[int, ...]]:
    return {tuple(one[:2]) for _, part in server.site.finder.planned(place) for one in part}  # type: ignore[arg-type]


class TestMedia:
    def test_stored_parts_as_they_are(self, server: PreviewServer) -> None:
        answer = ask(server, "media/sample/0/1/0/stored/=png")
        assert answer.body == png(1) and answer.headers["content-type"] == "image/png"
        assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
        assert ask(server, "media/sample/1/1/0/stored/=wav").body == sound()

    def test_the_icon_has_four_squares(self, server: PreviewServer) -> None:
        icon = np.asarray(Image.open(io.BytesIO(ask(server, "icon").body)))
        squares = np.zeros((16, 16, 4), np.uint8)
        squares[1:7, 1:7], squares[1:7, 9:15] = (31, 95, 168, 255), (191, 128, 70, 255)
        squares[9:15, 1:7], squares[9:15, 9:15] = (70, 191, 128, 255), (160, 70, 191, 255)
        assert np.array_equal(icon, squares)

    def test_tensors(self, server: PreviewServer) -> None:
        answer = ask(server, "media/sample/0/1/0/made/=0/=image")
        assert answer.status == 200 and answer.body.startswith(b"\x89PNG")

    def test_a_stretch_of_it(self, server: PreviewServer) -> None:
        where, whole = "media/sample/1/1/0/stored/=wav", sound()
        for asked, first, stop in (("bytes=0-9", 0, 10), ("bytes=100-", 100, len(whole)), ("bytes=-5", -5, None)):
            answer = ask(server, where, Range=asked)
            assert answer.status == 206 and answer.body == whole[first:stop]
        assert answer.headers["content-range"] == f"bytes {len(whole) - 5}-{len(whole) - 1}/{len(whole)}"
        assert ask(server, where, Range="bytes=999999-").status == 416
        digits = "9" * 5000
        assert ask(server, where, Range=f"bytes={digits}-").status == 416
        for asked in (f"bytes=0-{digits}", f"bytes=-{digits}"):
            assert (ask(server, where, Range=asked).status, ask(server, where, Range=asked).body) == (206, whole)
        for odd in ("bytes=9-2", "lines=1-2", "bytes=a-b", "bytes=0-1,5-6", "bytes=-"):
            assert ask(server, where, Range=odd).status in (200, 416)

    @pytest.mark.parametrize(
        "path",
        ["sample/0/0/0/stored/=txt", "sample/0/0/0/stored/=none", "sample/0/0/0/stored", "sample/0/0/0/other/=png",
         "sample/0/0/0/made/=0/=caption", "sample/0/0/0/made/=0/=__class__", "sample/0/0/0/made/=9/=image", "",
         "sample/0/0/0/made/=0/=image/=__init__", "sample/0/4/0/made/=0/=image", "batch/0/0/0/=keys",
         "batch/0/0/7/=keys", "sample/0/0/0/stored/=..%2f..%2fp.tar", "sample/0/0/0/stored/png", "batch/0/0/0",
         "sample/99999/0/0/stored/=png", "sample/0/0/0/made/=0", "sample/0/0/0/made/=0/=image/=-1"],
    )  # fmt: skip
    def test_nothing_else(self, server: PreviewServer, path: str) -> None:
        assert ask(server, f"media/{path}").status == 404


class TestHostileSamples:
    def test_all_is_text(self, attacked: PreviewServer) -> None:
        harmless = Page(ask(attacked, "nothing").text)
        allowed = {tag for tag, _ in harmless.tags} | ELEMENTS
        for path in ("", "step/0", "leaf/0/0", "sample/0/0/0", "bad", "find?key=%3Cscript%3E", "%3Cscript%3E"):
            answer = ask(attacked, path)
            page = Page(answer.text)
            assert {tag for tag, _ in page.tags} <= allowed, path
            for tag, attrs in page.tags:
                assert not any(name.startswith("on") or name in ("style", "srcdoc") for name in attrs), (path, attrs)
                assert "OWNED" not in (attrs.get("src") or "") + (attrs.get("href") or "")
                assert tag not in ("iframe", "object", "embed", "base")
            scripts = re.findall(r"<script[^>]*>", answer.text)
            assert len(scripts) == 1 and "nonce" in scripts[0]
            assert "\0" not in page.text and "\x1b" not in page.text
        assert "document.title='OWNED'" in Page(ask(attacked, "sample/0/0/0").text).text  # it is shown, as text

    def test_documents_are_no_pictures(self, attacked: PreviewServer) -> None:
        for part in ("svg", "html", "jpg", "txt", "json"):
            assert ask(attacked, f"media/sample/0/0/0/stored/={part}").status == 404

    def test_names_of_headers_cannot_be_made(self, attacked: PreviewServer) -> None:
        answer = ask(attacked, "find?what=step&number=1%0d%0aSet-Cookie:%20a=b")
        assert answer.status == 404 and "set-cookie" not in answer.headers


# -- one file ----------------------------------------------------------------------------------------------------------


def written(path: Path, file: Path, *options: str) -> str:
    encoder = "tests.extras.inspect.preview.samples_to_show:Keep"
    output_of("preview", path, "--html", file, "--task-encoder", encoder, *options)
    return file.read_text()


def test_all_is_in_the_file(tmp_path: Path) -> None:
    html = written(blend(tmp_path), tmp_path / "page.html", "--step", "1000000000")
    page = Page(html)
    assert "Step 1,000,000,000" in page.text
    assert all(address.startswith(("data:", "#")) for address in page.addresses()), page.addresses()
    assert any(address.startswith("data:image/png;base64,") for address in page.addresses())
    rules = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert rules and "default-src 'none'" in rules and "img-src data:" in rules and "'self'" not in rules


def test_a_sample_and_a_data_set(tmp_path: Path) -> None:
    path = blend(tmp_path)
    assert "caption 7" in Page(written(path, tmp_path / "key.html", "--key", "p7")).text
    assert "f1" in Page(written(path, tmp_path / "leaf.html", "--leaf", "films")).text


def test_media_that_are_too_large_for_the_file_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, size = site_of(blend(tmp_path)), len(png(1))
    for largest, altogether, left_out in ((size, 2 * size, 1), (size - 1, 9 * size, 3)):
        monkeypatch.setattr(site, "_LARGEST", largest)
        monkeypatch.setattr(site, "_ALTOGETHER", altogether)
        links = site.FileLinks(served)
        found = [links.media(("sample", 0, 1, 0, "stored"), [name]) for name in ("png", "png", "png", "none")]
        assert links.left_out == left_out and found.count(None) == left_out + 1


def test_hostile_samples_in_a_file(tmp_path: Path) -> None:
    html = written(hostile(tmp_path), tmp_path / "page.html")
    assert len(re.findall("<script", html)) == 1 and "<img" not in html and "&lt;script&gt;document.title" in html
