"""A real browser without a window, driven over a pipe by Chromium's own protocol: no package is needed for it."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["NAMES", "Chromium", "find_chromium", "running"]

#: What the program may be called.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_PATIENCE = 60.0
_FLAGS = ("--headless=new", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio")
#: It reads commands from descriptor 3, and answers to 4.
_START = "import os, sys; [os.dup2(int(sys.argv[n]), n + 2) for n in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"


def find_chromium() -> str | None:
    """The program; None: there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One page of a browser.

    Attributes:
        complaints: errors and warnings of the pages, refusals by their rules among them.
    """

    def __init__(self, to_browser: int, from_browser: int):
        self._to, self._from = to_browser, from_browser
        self._buffer, self._events, self._number = b"", list[dict[str, Any]](), 0
        self.complaints: list[str] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Have the browser do something."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {} if self._session is None else {"sessionId": self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, url: str) -> float:
        """Go to a page; returns the seconds until it is loaded."""
        began = time.monotonic()
        self._events.clear()
        self.call("Page.navigate", url=url)
        self.wait("Page.loadEventFired")
        return time.monotonic() - began

    def wait(self, event: str) -> None:
        """Wait for something to have happened since the last page was asked for."""
        while not any(one["method"] == event for one in self._events):
            self._read()
        self._events.clear()

    def run(self, expression: str) -> Any:
        """The value of an expression on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key, and let it go."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def look(self, scheme: str = "light", width: int = 1280, height: int = 900) -> None:
        """Be a screen of a size, in light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def spoken(self) -> list[tuple[str, str]]:
        """Role and name of what a screen reader finds on the page."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        pairs = (
            (one.get("role", {}).get("value"), one.get("name", {}).get("value")) for one in nodes if not one["ignored"]
        )
        return [(str(role), str(name or "")) for role, name in pairs]

    def _read(self) -> dict[str, Any]:
        end, poll = time.monotonic() + _PATIENCE, select.poll()  # the number of a file may be above 1,023
        poll.register(self._from, select.POLLIN)
        while b"\0" not in self._buffer:
            ready = poll.poll(1000 * max(0.0, end - time.monotonic()))
            data = os.read(self._from, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser says nothing")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method, params = message.get("method"), message.get("params", {})
        if method is not None:
            self._events.append(message)
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        if method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        return message


@contextmanager
def running(program: str, folder: Path) -> Iterator[Chromium]:
    """A browser that keeps what it has to keep in a folder."""
    read_end, to_browser = os.pipe()
    from_browser, write_end = os.pipe()
    flags = [*_FLAGS, f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_end, write_end)]  # not where they are to be put
    start = [sys.executable, "-S", "-c", _START, *map(str, ends), program, *flags, "about:blank"]
    process = subprocess.Popen(start, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for end in ends:
        os.close(end)
    os.close(read_end)
    os.close(write_end)
    try:
        yield Chromium(to_browser, from_browser)
    finally:
        os.close(to_browser)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)
        os.close(from_browser)
