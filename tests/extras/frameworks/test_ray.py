"""Keys in a driver, samples in its workers: plain processes here, and Ray's actors where Ray is installed."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from energon_lite import get_savable_loader
from energon_lite.errors import SampleError, StateMismatchError, UsageError
from energon_lite.extras.frameworks.ray import SampleKey, SampleKeys, fetch, fetch_batch
from tests.extras.frameworks import keyed_prompts
from tests.extras.frameworks.keyed_prompts import PROMPTS, digest, drive, write_blend
from tests.testing import take

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def blend(leaf_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_blend(tmp_path_factory.mktemp("keys") / "blend.yaml", leaf_of(30), leaf_of(8, "b"))


def made(keys: list[SampleKey]) -> tuple[str, str, list[str]]:
    """What a worker makes of keys: digests of the samples and of a batch, and the samples' own keys."""
    samples = fetch(keys)
    return digest(samples), digest(fetch_batch(keys)), [sample["__key__"] for sample in samples]


def in_workers(parts: list[list[SampleKey]]) -> list[tuple[str, str, list[str]]]:
    """What processes, each of its own, make of keys that are sent to them."""
    with FORK.Pool(len(parts), maxtasksperchild=1) as workers:
        return workers.map(made, parts, chunksize=1)


def test_keys_are_small_and_in_the_loader_s_order(blend: str) -> None:
    keys = SampleKeys(PROMPTS, blend)
    taken = keys.take(256)
    assert len(pickle.dumps(taken)) <= 24 * 256
    assert len(pickle.dumps(taken[0].address)) < 100
    with get_savable_loader(keyed_prompts.open_prompts(blend)) as loader:
        expected = take(loader, 256)
    assert digest(fetch(taken)) == digest(expected)  # skipped ones are replaced by the same ones
    assert len({sample["__restore_key__"][1] for sample in expected}) == 2
    assert any(sample["__restore_key__"][4] for sample in expected)


def test_every_worker_makes_the_same_tensors(blend: str) -> None:
    keys = SampleKeys(PROMPTS, blend)
    taken = keys.take(12)
    answers = in_workers([taken] * 3)
    assert len(pickle.dumps(taken)) < 100 * 12
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][:2] == (digest(fetch(taken)), digest(fetch_batch(taken)))
    assert fetch_batch(taken)["keys"] == answers[0][2]
    assert digest(fetch_batch(taken[::-1])) != answers[0][1]


def _drive(blend: str, workers: int, folder: Path, *numbers: int) -> None:
    def ask(batch: list[SampleKey]) -> list[list[str]]:
        return [keys for *_, keys in in_workers([batch[number::workers] for number in range(workers)])]

    drive(ask, blend, folder, *numbers)


def test_a_killed_driver_goes_on_exactly_with_other_workers_and_batches(blend: str, tmp_path: Path) -> None:
    first = FORK.Process(target=_drive, args=(blend, 2, tmp_path, 8, 9, 3))
    first.start()
    first.join(60)
    assert first.exitcode == -signal.SIGKILL
    _drive(blend, 3, tmp_path, 6, 3)
    _drive(blend, 1, tmp_path, 5, 2)
    seen = (tmp_path / "seen.txt").read_text().split()
    assert seen == [one["__key__"] for one in fetch(SampleKeys(PROMPTS, blend).take(3 * 8 + 28))]


def test_states_are_those_of_a_loader(blend: str) -> None:
    keys = SampleKeys(PROMPTS, blend)
    keys.take(10)
    loader = get_savable_loader(keyed_prompts.open_prompts(blend)).with_restored_state_rank(keys.state_dict())
    assert next(iter(loader))["__key__"] == keys.take(1)[0].fetch()["__key__"]
    assert loader.state_dict() == keys.state_dict()
    batches = get_savable_loader(keyed_prompts.open_batches(blend))
    next(iter(batches))
    keys.load_state_dict(batches.state_dict())
    assert keys.take(4) == SampleKeys(PROMPTS, blend).take(8)[4:]


@pytest.mark.parametrize("opened", ["open_once", "open_validation"])
def test_finite_data_is_dealt_pass_by_pass(leaf_of: Callable[..., Path], opened: str) -> None:
    def opened_keys() -> SampleKeys:
        return SampleKeys(f"{keyed_prompts.__name__}:{opened}", str(leaf_of(8, "b")))

    keys = opened_keys()
    passes = [[key for batch in keys.batches(3) for key in batch] for _ in range(2)]
    assert [sorted(key.address[1] for key in one) for one in passes] == [list(range(8))] * 2
    for delivered in range(9):
        keys, again = opened_keys(), opened_keys()
        if delivered:
            keys.take(delivered)
        again.load_state_dict(json.loads(json.dumps(keys.state_dict())))
        rest = [key for batch in again.batches(2) for key in batch]
        assert rest == (passes[0][delivered:] or passes[1])


def test_validation_has_no_replacements(leaf_of: Callable[..., Path]) -> None:
    keys = SampleKeys(f"{keyed_prompts.__name__}:open_validation", str(leaf_of(8, "b")))
    with pytest.raises(SampleError, match="ends with 3"):
        keys.key(3).fetch()
    with pytest.raises(SampleError, match="ends with 3"):
        fetch_batch([keys.key(2), keys.key(3)])
    assert len(fetch_batch([keys.key(2), keys.key(4)])["keys"]) == 2
    with pytest.raises(SampleError, match=r"batch: .*no batch of three"):
        fetch_batch([keys.key(number) for number in (2, 4, 5)])


def test_what_cannot_be_addressed_is_refused(blend: str) -> None:
    for opened in ("open_batches", "open_rank", "open_nothing"):
        with pytest.raises(UsageError, match="single samples"):
            SampleKeys(f"{keyed_prompts.__name__}:{opened}", blend)
    with pytest.raises(UsageError, match="open_prompts"):
        SampleKeys(f"{keyed_prompts.__name__}:open_promts", blend)
    keys = SampleKeys(PROMPTS, blend)
    with pytest.raises(UsageError, match="0 keys"):
        keys.take(0)
    with pytest.raises(UsageError, match="0 data sets"):
        fetch_batch([])
    other = pickle.loads(pickle.dumps(keys.key(0)))
    object.__setattr__(other.data, "fingerprint", "0" * 16)
    with pytest.raises(StateMismatchError, match="other data"):
        other.fetch()
    with pytest.raises(UsageError, match="2 data sets"):
        fetch_batch([keys.key(0), other])


@pytest.mark.slow
def test_ray_s_actors_and_a_killed_driver(blend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs Ray: pip install ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:  # the names of sockets have to be
        address = ray.init(num_cpus=2, include_dashboard=False, _temp_dir=short, log_to_driver=False).address_info
        try:
            program = [sys.executable, str(Path(__file__).with_name("ray_driver.py"))]
            given = [address["gcs_address"], blend, str(tmp_path)]
            ended = [
                subprocess.run([*program, *given, *map(str, numbers)], timeout=120).returncode
                for numbers in ((2, 8, 9, 3), (3, 6, 3), (1, 5, 2))  # workers, batch, steps, and the step of its death
            ]
        finally:
            ray.shutdown()
    assert ended == [-signal.SIGKILL, 0, 0]
    seen = (tmp_path / "seen.txt").read_text().split()
    assert seen == [one["__key__"] for one in fetch(SampleKeys(PROMPTS, blend).take(3 * 8 + 28))]
