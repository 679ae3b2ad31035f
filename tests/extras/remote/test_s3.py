"""A data set on S3, as moto's server has it, behind a proxy that fails, hangs, and is killed: nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from energon_lite.errors import DatasetError, FatalStorageError, ShardChangedError
from energon_lite.extras.remote import remote_files
from energon_lite.extras.remote.direct_ranges import DirectRanges, direct_ranges
from energon_lite.storage.files.retries import Tries
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.servers import s3_server, server_process
from tests.testing import free_port, train_loader

PROXY = Path(__file__).parents[3] / "tools/bench/store_proxy.py"
SAMPLES = 200


@pytest.fixture(scope="module")
def moto() -> Iterator[int]:
    """Its port."""
    with s3_server() as port:
        yield port


Store = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def store(moto: int, clients: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Starts the proxy, at one and the same address."""
    port = free_port()
    given = {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()

    with ExitStack() as running:

        def start(**how: float) -> subprocess.Popen[bytes]:
            running.close()
            words = [word for name, value in how.items() for word in (f"--{name}", str(value))]
            return running.enter_context(server_process(port, str(PROXY), str(port), str(moto), *words))

        yield start


@pytest.fixture
def url(store: Store, make_tar: Any, tmp_path: Path) -> str:
    """A data set of four shards, prepared there."""
    store()
    for shard in range(4):
        numbers = range(shard * SAMPLES // 4, (shard + 1) * SAMPLES // 4)
        make_tar(f"data/{shard}.tar", [(f"{number:04d}.txt", f"text {number}".encode()) for number in numbers])
    fs, base = remote_files.file_system(f"s3://bucket-{tmp_path.name.replace('_', '-').lower()[:40]}/data")
    fs.mkdir(base.partition("/")[0])
    for path in (tmp_path / "data").glob("*.tar"):
        fs.put_file(str(path), f"{base}/{path.name}")
    url = f"s3://{base}"
    prepare_dataset(url, split_ratio="1,0,0", sample_type="TextSample", field_map={"text": "txt"})
    return url


def loader_of(url: str, workers: int = 2, run: int | None = None) -> Any:
    order = {"shuffle_buffer_size": run and 2 * run, "max_samples_per_sequence": run}
    how: dict[str, Any] = {"virtual_epoch_length": SAMPLES // 10, "start_method": "fork", **order}
    return train_loader(url, workers, batch_size=10, **how)


WHOLE = Counter(f"text {number}" for number in range(SAMPLES))


@pytest.mark.parametrize("run", [None, 10])
def test_failing_and_hanging_requests_lose_nothing(url: str, store: Store, run: int | None) -> None:
    loader = loader_of(url, run=run)
    store(failing=0.05, hanging=0.02, hang=2.0)
    with loader:
        assert Counter(text for batch in loader for text in batch.text) == WHOLE


def test_a_server_that_is_killed_is_waited_for(url: str, store: Store) -> None:
    loader = loader_of(url)
    seen = Counter[str]()
    with loader:
        batches = iter(loader)
        for _ in range(3):
            seen.update(next(batches).text)
        server = store()
        server.kill()
        server.wait()
        waiting = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5)"])
        again = threading.Thread(target=lambda: (waiting.wait(), store()), daemon=True)
        again.start()
        for batch in batches:
            seen.update(batch.text)
        again.join()
    assert seen == WHOLE


@pytest.mark.parametrize("client", ["ours", "s3fs"])
def test_an_object_that_is_replaced_ends_the_run(
    url: str, tmp_path: Path, make_tar: Any, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    source = WebdatasetSource.open(url)
    if client == "s3fs":
        monkeypatch.setattr(DirectRanges, "_read", AsyncMock(return_value=None))
    reader = SampleReader(source)
    assert reader.sample(60).parts == {"txt": b"text 60"}
    first = SAMPLES // 4
    texts = {n: f"text {n}" if n == first else f"TEXT {n}" for n in range(first, 2 * first)}
    path = make_tar("new.tar", [(f"{n:04d}.txt", text.encode()) for n, text in texts.items()])
    fs, base = remote_files.file_system(url)
    assert fs.size(f"{base}/1.tar") == path.stat().st_size
    fs.put_file(str(path), f"{base}/1.tar")
    with pytest.raises(ShardChangedError, match=r"was replaced while[\s\S]*1\.tar"):
        reader.sample(61)
    assert SampleReader(WebdatasetSource.open(url)).sample(61).parts == {"txt": b"TEXT 61"}


@contextmanager
def looking_at_credentials(moto: int) -> Iterator[None]:
    """For a while, moto does so."""

    def begin_after(requests: bytes) -> None:
        url, kind = f"http://127.0.0.1:{moto}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(url, requests, kind)).read()

    begin_after(b"0")
    try:
        yield
    finally:
        begin_after(b"inf")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Seconds that are waited after each failure; None: there is no further try."""
    waits, wait_after = list[float | None](), Tries.wait_after

    def noted(self: Tries, error: BaseException) -> float | None:
        waits.append(wait_after(self, error))
        return waits[-1]

    monkeypatch.setattr(Tries, "wait_after", noted)
    return waits


def test_wrong_credentials_are_an_error_at_once(url: str, moto: int, waits: list[float | None]) -> None:
    source = WebdatasetSource.open(url)
    with looking_at_credentials(moto):
        for read in (lambda: WebdatasetSource.open(url), lambda: SampleReader(source).sample(7)):
            with pytest.raises(FatalStorageError, match=r"refuses the request[\s\S]*credentials"):
                read()
    assert waits and not any(waits)


def test_requests_are_signed_by_us(store: Store, moto: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto checks the signature of each, with keys that make it hard."""
    boto3 = pytest.importorskip("boto3")
    server = f"http://127.0.0.1:{moto}"
    iam = boto3.client("iam", endpoint_url=server, aws_access_key_id="x", aws_secret_access_key="x", region_name="a")
    name = "reader"
    iam.create_user(UserName=name)
    allowed = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
    iam.put_user_policy(UserName=name, PolicyName="all", PolicyDocument=json.dumps(allowed))
    key = iam.create_access_key(UserName=name)["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    store()
    bodies = {f"s3://signed/{name}": name.encode() * 9 for name in ("a.tar", "a b/c+d&e=%20~.tar", "ü/../(1)'.tar")}
    fs, _ = remote_files.file_system("s3://signed/x")
    fs.mkdir("signed")
    for url, body in bodies.items():
        fs.pipe_file(remote_files.file_system(url)[1], body)
    direct = direct_ranges(fs)
    assert direct is not None

    def read(url: str) -> bytes:
        return asyncio.run_coroutine_threadsafe(remote_files.read_range_in_loop(url, 3, 30), fs.loop).result(60)

    with looking_at_credentials(moto):
        assert {url: read(url) for url in bodies} == {url: body[3:33] for url, body in bodies.items()}
        assert direct.read_here == len(bodies)
        known = direct._heads["signed/a.tar"]
        direct._heads["signed/a.tar"] = (known[0], known[1].replace(b"Signature=", b"Signature=0"), known[2])
        assert read("s3://signed/a.tar") == bodies["s3://signed/a.tar"][3:33]  # refused, and signed anew
        assert direct.read_here == len(bodies) + 1


def test_a_bucket_that_is_not_there(url: str, waits: list[float | None]) -> None:
    with pytest.raises(DatasetError, match="no prepared data set"):
        WebdatasetSource.open("s3://no-such-bucket/data")
    assert not any(waits)


@pytest.mark.nightly  # botocore tries for a while by itself
def test_no_server_at_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "_PATIENCE_AT_START", 0.5)
    server = store()
    server.kill()
    server.wait()
    with pytest.raises(FatalStorageError, match=r"cannot be read, for \d+ s[\s\S]*network"):
        WebdatasetSource.open("s3://bucket/data")
    assert os.environ["AWS_ENDPOINT_URL"]
