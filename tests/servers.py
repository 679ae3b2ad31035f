"""Servers of tests: of files, in memory and in ranges; of S3, as moto has it; and clusters of Ray."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.testing import free_port, until


def upload(folder: Path, place: str, pattern: str = "*") -> str:
    """URL of a copy of a folder, or of its files of some names, in fsspec's store in memory."""
    store = fsspec.filesystem("memory")
    for path in sorted(folder.rglob(pattern)):
        if path.is_file():
            store.pipe_file(f"/{place}/{path.relative_to(folder)}", path.read_bytes())
    return f"memory://{place}"


class Files(SimpleHTTPRequestHandler):
    """Python's server of files, which ignores ranges."""

    disable_nagle_algorithm = True  # else an answer of two parts waits for 40 ms

    def log_message(self, *_: Any) -> None: ...


class Ranges(Files):
    """It is taught to answer them; ``shift`` is by how much it errs."""

    shift = 0
    asked = re.compile(r"bytes=(\d+)-(\d+)")

    def do_GET(self) -> None:
        path, wanted = self.translate_path(self.path), self.asked.match(self.headers.get("Range", ""))
        if wanted is None or not os.path.isfile(path):
            return super().do_GET()
        start, stop = int(wanted[1]) + self.shift, int(wanted[2]) + 1 + self.shift
        data = Path(path).read_bytes()
        part = data[start:stop]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@contextmanager
def web_server(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """URL of a server in threads of this process."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def server_process(port: int, *command: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program that answers at ``port``, killed in the end. Workers and ranks are forked, and threads are not
    forked with them."""
    server = subprocess.Popen([sys.executable, *command], **options)

    def answers() -> bool:
        assert server.poll() is None, f"{command} ended"
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        assert until(answers, 300), f"{command} does not answer"
        yield server
    finally:
        server.kill()
        server.wait()


@contextmanager
def s3_server() -> Iterator[int]:
    """Its port."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    port = free_port()
    start = f"from moto.server import ThreadedMotoServer as S; S('127.0.0.1', {port}, verbose=False).start()"
    quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    with server_process(port, "-c", f"import time; {start}; time.sleep(10_000)", **quiet):
        yield port


@contextmanager
def ray_cluster(nodes: int, **each: Any) -> Iterator[Any]:
    """A head that runs no tasks, and nodes on this machine."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        for _ in range(nodes):
            made.add_node(**each)
        ray.init(address=made.address, log_to_driver=False)
        try:
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
