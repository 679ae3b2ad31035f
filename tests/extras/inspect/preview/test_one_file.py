from __future__ import annotations

import re
from pathlib import Path

from tests.extras.inspect.preview.samples_to_show import blend, hostile
from tests.extras.inspect.preview.test_server import Page
from tests.testing import invoke


def written(path: Path, file: Path, *options: str) -> str:
    encoder = "tests.extras.inspect.preview.samples_to_show:Keep"
    command = ["preview", str(path), "--html", str(file), "--task-encoder", encoder, *options]
    result = invoke(*command)
    assert result.exit_code == 0, result.output
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
    assert "caption 5" in Page(written(path, tmp_path / "restored.html", "--key", '["sample", 0, 5, 3, 0]')).text
    assert "Step 9" in Page(written(path, tmp_path / "batch.html", "--key", '["batch", 0, 9]')).text


def test_hostile_samples(tmp_path: Path) -> None:
    html = written(hostile(tmp_path), tmp_path / "page.html")
    assert len(re.findall("<script", html)) == 1 and "<img" not in html and "&lt;script&gt;document.title" in html
