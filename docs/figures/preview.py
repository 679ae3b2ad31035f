"""The picture of the page: a step with pictures and sounds, one of which is skipped and one broken. Needs Chromium.

PYTHONPATH=. python docs/figures/preview.py
"""

from __future__ import annotations

import base64
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from energon_lite.extras.inspect.preview.shown_run import RunOptions, ShownRun
from energon_lite.extras.inspect.preview.site import Site
from tests.extras.inspect.preview.chromium import find_chromium, running
from tests.extras.inspect.preview.samples_to_show import Keep, blend
from tests.extras.inspect.preview.served import serving


def main() -> None:
    """Write ``preview.png`` beside this file."""
    program = find_chromium()
    if program is None:
        sys.exit("there is no Chromium")
    with tempfile.TemporaryDirectory() as name:
        site = Site(ShownRun.open(str(blend(Path(name))), RunOptions(), Keep()))
        step = next(n for n in range(99) if {"p3", "p4"} <= _keys(site, n))
        with serving(site) as server, running(program, Path(name) / "browser") as browser:
            browser.look(width=1100, height=900)
            browser.open(f"{server.url}step/{step}")
            data = base64.b64decode(browser.call("Page.captureScreenshot")["data"])
    picture = Image.open(io.BytesIO(data)).convert("RGB").quantize(64)
    picture.save(Path(__file__).with_name("preview.png"), optimize=True)


def _keys(site: Site, step: int) -> set[str]:
    planned = site.finder.planned(site.finder.at_step(step))
    return {site.run.leaves[one[0]].source.key(one[1]) for _, part in planned for one in part}


if __name__ == "__main__":
    main()
