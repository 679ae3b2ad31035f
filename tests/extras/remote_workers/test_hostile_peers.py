"""Whatever comes through a connection: it ends closed and counted, and no more memory is taken than was agreed."""

from __future__ import annotations

import random
import socket
import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import SavableDataset, TaskEncoder, WorkerConfig, get_train_dataset
from energon_lite.batching.digests import AddressList
from energon_lite.errors import UsageError
from energon_lite.extras import wire
from energon_lite.extras.remote_workers import JobServer, RayWorkers, TcpWorkers, protocol
from energon_lite.extras.remote_workers.described import host_and_port, secret_in
from energon_lite.extras.remote_workers.protocol import BEAT, FrameError, RefusedError, frame, frames, greet, join
from energon_lite.extras.remote_workers.run_card import check_card, run_card
from energon_lite.extras.remote_workers.server import jobs_in
from energon_lite.extras.remote_workers.tcp_workers import answers_in
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.outcomes import Failure
from tests.extras.remote_workers.served import serving
from tests.testing import ALONE, batches_of, examples, in_time, nightly_but, until

#: What a connection may end with; anything else would end the worker.
ENDS = (RefusedError, FrameError, EOFError, OSError)
#: Hostile connections of a test, and a seed: some each time, 100,000 in the night.
many = pytest.mark.parametrize(
    ("count", "seed"), nightly_but({0}, [(examples(2500), 0), *((10_000, seed) for seed in range(1, 11))])
)


def _hostile(draw: random.Random, honest: bytes) -> bytes:
    """Bytes that look like honest ones, more or less."""
    match draw.randrange(5):
        case 0:
            return draw.randbytes(draw.randrange(200))
        case 1:
            return honest[: draw.randrange(len(honest) + 1)]
        case 2:
            return struct.pack("<4sB3xQ", b"ENLW", draw.randrange(256), draw.choice([0, 5, 1 << 20, 1 << 62])) + honest
        case 3:
            return honest + draw.randbytes(draw.randrange(50))
    changed = bytearray(honest)
    for _ in range(draw.randrange(1, 6)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


class Recorded:
    """A connection, and what has come through it."""

    def __init__(self, connection: socket.socket):
        self.connection, self.received = connection, b""
        self.settimeout, self.sendmsg = connection.settimeout, connection.sendmsg

    def recv_into(self, memory: memoryview) -> int:
        got = self.connection.recv_into(memory)
        self.received += memory[:got]
        return got


def _honest_handshake(secret: bytes | None = None) -> tuple[bytes, bytes]:
    """What an honest trainer and an honest worker send, as long as their random bytes are zeros."""
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "os", SimpleNamespace(urandom=bytes))
        trainer, worker, card = Recorded(ours), Recorded(theirs), {"data": {}, "max_bytes": 1 << 20}
        greeting = Thread(target=greet, args=(worker, secret, lambda _: None, {"workers": 1}, 60.0))
        greeting.start()
        join(trainer, secret, card, 60.0)  # type: ignore[arg-type]
        greeting.join()
    return worker.received, trainer.received


@contextmanager
def _sent(data: bytes, *, is_all: bool = True) -> Iterator[socket.socket]:
    """The end of a connection at which these bytes arrive; and no more, if that is all."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        if is_all:
            there.shutdown(socket.SHUT_WR)
        yield here


@pytest.fixture(params=[None, b"s" * 32])
def secret(request: pytest.FixtureRequest) -> bytes | None:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def bounded() -> Iterator[None]:
    """No more memory is taken than was agreed, and what tests need."""
    tracemalloc.start()
    yield
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 << 20


@many
@pytest.mark.usefixtures("bounded")
def test_fuzzed_handshakes(secret: bytes | None, count: int, seed: int) -> None:
    draw, (honest, _), cards = random.Random(seed), _honest_handshake(secret), list[Any]()

    def refuse(card: Any) -> None:
        cards.append(card)
        raise RefusedError("no trainer of this run")

    for _ in range(count):
        with _sent(_hostile(draw, honest)) as worker, pytest.raises(ENDS):
            greet(worker, secret, refuse, {"workers": 1}, 1.0)
    assert not cards  # nobody gets so far without a proof


@many
@pytest.mark.usefixtures("bounded")
def test_fuzzed_handshakes_of_peers_with_the_secret(secret: Any, count: int, seed: int, monkeypatch: Any) -> None:
    """Changed behind the proof, too, whose random bytes are known here. Whatever it is, it ends."""
    monkeypatch.setattr(protocol, "os", SimpleNamespace(urandom=bytes))
    draw, honest, cards = random.Random(seed), _honest_handshake(secret), list[Any]()
    for number in range(count):
        with _sent(_hostile(draw, honest[number % 2])) as here:
            if number % 2:
                with suppress(Exception):  # the receiver does not use such a server, and says why
                    join(here, secret, {}, 1.0)
            else:
                with suppress(*ENDS):
                    greet(here, secret, cards.append, {"workers": 1}, 1.0)
    assert cards and all(isinstance(card, dict) for card in cards)


AGREED = 1 << 16


def _honest_frame() -> bytes:
    jobs = [(7, Job(0, 3, AddressList([(0, 7, 1), (0, 3, 1)], 9), ("batch", 0, 3)))]
    return b"".join(frame(5, wire.pack((jobs, False))))


def _end_of(sent: bytes) -> tuple[BaseException, int]:
    """The error with which a worker's side ends that gets these frames, and the messages with jobs before."""
    fine = 0
    with _sent(sent) as worker:
        received = frames(worker, [AGREED])
        try:
            while True:
                got = next(received)
                assert got is not None and got.body.nbytes <= AGREED
                jobs_in(got.body)
                fine += 1
        except ENDS as error:
            return error, fine


@many
@pytest.mark.usefixtures("bounded")
def test_fuzzed_frames(count: int, seed: int) -> None:
    draw, honest = random.Random(seed), _honest_frame()
    fine = sum(_end_of(_hostile(draw, honest))[1] for _ in range(count))
    assert fine < count  # only what the jobs say was changed


@many
@pytest.mark.usefixtures("bounded")
def test_fuzzed_answers(count: int, seed: int) -> None:
    """Of a worker that was changed on its way. The trainer drops it, and no other error ends the run."""
    value = ({"__key__": ["a-7"], "x": torch.zeros(3)}, [0], 0, None, 7)
    messages = [([(7, True, value)], 0.5, []), ((), Failure("a", "a-7", "decode", "ValueError: no", False), ())]
    honest = [b"".join(wire.pack(message)) for message in messages]
    draw, fine = random.Random(seed), 0
    for number in range(count):
        body = np.frombuffer(_hostile(draw, honest[number % 2]) or b"0", dtype=np.uint8).copy()
        try:
            answers, _, _ = answers_in(body.data, [7])
            fine += [ticket for ticket, _, _ in answers] in ([7], [])
        except (FrameError, wire.UnknownClassError):
            continue
    assert 0 < fine < count


def _dataset(leaf: Path, config: WorkerConfig = ALONE, **options: Any) -> SavableDataset:
    return get_train_dataset(leaf, worker_config=config, **{"batch_size": 4} | options)


def _first_batch(leaf: Path, workers: Any, **options: Any) -> list[Any]:
    """Of a run with these workers, and none of its own."""
    return batches_of(_dataset(leaf, WorkerConfig(0, 1, workers=workers), **options), 1)


@pytest.mark.parametrize("count", nightly_but({0}, [60, 100_000]))
def test_a_server_outlives_and_counts_what_comes(leaf_of: Any, count: int) -> None:
    draw, (honest, _) = random.Random(count), _honest_handshake()
    with serving(_dataset(leaf_of(50))) as served:
        for _ in range(count):
            with socket.create_connection(("127.0.0.1", served.port)) as connection:
                with suppress(OSError):  # the server has closed it already
                    connection.sendall(_hostile(draw, honest))
                    connection.shutdown(socket.SHUT_WR)
        assert until(lambda: served.refused == count)
        assert _first_batch(leaf_of(50), served.tcp())


def test_a_server_outlives_and_counts_frames_of_trainers(leaf_of: Any) -> None:
    """Of a trainer that knows the secret, and then sends what is no job."""
    dataset = _dataset(leaf_of(50))
    runs = dataset.resolved
    card = run_card(runs.identity.to_plain(), runs.runner()) | {"max_bytes": AGREED, "trace": False}
    draw, honest, counted = random.Random(3), _honest_frame(), 0
    with serving(dataset) as served:
        with socket.create_connection(("127.0.0.1", served.port)) as idle:
            join(idle, None, card, 60.0)
            time.sleep(0.5)
            assert len(idle.recv(1 << 16)) < 100 * len(b"".join(frame(BEAT)))  # there are three
        for _ in range(24):
            sent = _hostile(draw, honest)
            counted += isinstance(_end_of(sent)[0], FrameError)
            with socket.create_connection(("127.0.0.1", served.port)) as connection:
                join(connection, None, card, 60.0)
                connection.settimeout(60.0)
                with suppress(OSError):  # the server has closed it already
                    connection.sendall(sent)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass
            assert until(lambda: served.refused == counted)  # noqa: B023
    assert 8 < counted < 24


class Sized(TaskEncoder):
    def __init__(self, size: int):
        self.size = size


class Other(Sized):
    pass


@pytest.mark.parametrize(
    ("options", "secret", "said"),
    [
        ({"task_encoder": Sized(1)}, "s" * 20, "self.size is 1 at the trainer and 2 here"),
        ({"task_encoder": Other(2)}, "s" * 20, "the task encoder is Other at the trainer and Sized here"),
        ({"batch_size": 5}, "s" * 20, "batch_size: 5 at the trainer, 4 here"),
        ({}, "t" * 20, "does not know the secret"),
    ],
)
def test_other_runs_are_refused_by_name(
    leaf_of: Any, tmp_path: Path, options: dict[str, Any], secret: str, said: str
) -> None:
    (tmp_path / "secret").write_text(secret)
    there: dict[str, Any] = {"task_encoder": Sized(2)}
    with serving(_dataset(leaf_of(50), **there), secret=b"s" * 20) as served:
        with pytest.raises(UsageError, match=said):
            _first_batch(leaf_of(50), served.tcp(secret_file=tmp_path / "secret"), **there | options)


def test_differences_of_code_and_environment_are_named(leaf_of: Any) -> None:
    runs = _dataset(leaf_of(50), task_encoder=Sized(1)).resolved
    card = run_card(runs.identity.to_plain(), runs.runner())
    check_card(card, card, runs.identity)
    for change, text in (
        ({"environment": card["environment"] | {"torch": "0.1"}}, "torch is 0.1 at the trainer and "),
        ({"code": dict.fromkeys(card["code"], "0")}, "the code of the task encoder in test_hostile_peers.py differs"),
        ({"seed": "7"}, "the seed is 7 at the trainer"),
    ):
        with pytest.raises(RefusedError, match=text):
            check_card(card | change, card, runs.identity)


def _hello(version: int, has_secret: bool) -> list[memoryview]:
    return frame(0, [memoryview(struct.pack("<H?32s", version, has_secret, bytes(32)))])


@pytest.mark.parametrize(
    ("own", "sent", "error", "said"),
    [
        (None, _hello(2, False), RefusedError, "speaks version 2 of the protocol, this trainer 1"),
        (None, frame(0, [memoryview(bytes(34))]), FrameError, "a greeting of another size"),
        (b"s" * 16, _hello(1, False), RefusedError, "the worker has no secret"),
        (b"s" * 16, _hello(1, True) + frame(2, [memoryview(bytes(32))]), RefusedError, "does not know the secret"),
        (None, [], TimeoutError, "timed out"),
    ],
)
def test_a_trainer_refuses_what_is_no_worker_of_its_run(own: Any, sent: Any, error: Any, said: str) -> None:
    with _sent(b"".join(sent), is_all=False) as trainer, pytest.raises(error, match=said):
        in_time(lambda: join(trainer, own, {}, 60.0 if sent else 0.05))


@pytest.mark.parametrize("place", [0, 4, 5, 7, 8])
def test_one_byte_of_a_head_is_changed(place: int) -> None:
    head = bytearray(b"".join(frame(8, [memoryview(bytes(AGREED))])))
    with _sent(head) as here:
        got = next(frames(here, [AGREED]))
    assert got is not None and (got.kind, got.body.nbytes) == (8, AGREED)
    head[place] += 1
    said = "65,537 bytes; 65,536 were" if place == 8 else "is no frame"
    with _sent(head) as here, pytest.raises(FrameError, match=said):
        next(frames(here, [AGREED]))


JOB = Job(0, 3, AddressList([(0, 7, 1)], 9), ("batch", 0, 3))
VALUE: Any = ({}, [0], 0, None, 7)
ANSWER = (7, True, VALUE)


@pytest.mark.parametrize("jobs", [[], [(7, "job")], [(7, JOB), (8.0, JOB)]])
def test_messages_without_jobs_end_a_connection(jobs: list[Any]) -> None:
    with pytest.raises(FrameError, match="no jobs in it"):
        jobs_in(memoryview(bytearray(b"".join(wire.pack((jobs, False))))))


@pytest.mark.parametrize("answers", [[(8, True, VALUE)], [ANSWER] * 2, [(7, True, VALUE[1:])], [(7, False, VALUE)], []])
@pytest.mark.parametrize("rest", [(0.5, []), ({}, [0.5])])
def test_answers_that_are_none_end_a_connection(answers: list[Any], rest: tuple[Any, ...]) -> None:
    with pytest.raises(FrameError, match="answers none of the worker's jobs"):
        answers_in(memoryview(bytearray(b"".join(wire.pack((answers, *rest))))), [7, 9])


def test_nothing_is_served_openly(leaf_of: Any) -> None:
    dataset = _dataset(leaf_of(50))
    with pytest.raises(UsageError, match="without a secret or TLS"):
        JobServer(dataset, "0.0.0.0", 0)
    with JobServer(dataset, "0.0.0.0", 0, secret=b"s" * 16):
        pass


def test_wrong_descriptions_are_refused(tmp_path: Path, leaf_of: Any) -> None:
    assert host_and_port("[::1]:65535") == ("::1", 65_535)
    for addresses in ("host", "host:port", ":70", "host:65536"):
        with pytest.raises(UsageError, match="host:port"):
            TcpWorkers([addresses])
    with pytest.raises(UsageError, match="without addresses"):
        TcpWorkers()
    with pytest.raises(UsageError, match="secret is unknown"):
        TcpWorkers.from_text("tcp://host:70?secret=abc")
    for numbers in ((0, 0), (1, 2), (1, -1)):
        with pytest.raises(UsageError, match="give 0 <= minimum <= maximum"):
            RayWorkers(*numbers)
    (tmp_path / "short").write_text(16 * "s" + "\n")
    assert secret_in(tmp_path / "short") == 16 * b"s"
    (tmp_path / "short").write_text(15 * "s" + "\n")
    for workers, said in (
        (TcpWorkers(["localhost:1"], secret_file=tmp_path / "short"), "a secret of 15 bytes"),
        (TcpWorkers(["localhost:1"], secret_file=tmp_path / "none"), "the file of the secret cannot be read"),
        ("carrier-pigeon://loft", "no workers of the kind 'carrier-pigeon'"),
    ):
        with pytest.raises(UsageError, match=said):
            _first_batch(leaf_of(7), workers)
