"""Door of the tests: data sets by hand, loaders of one rank, commands run here, and limits of time.

``HYPOTHESIS_PROFILE`` chooses how many of the examples are tried that tests give: ``default``, two of five; ``check``,
one of five, for the inner loop; ``full``, all; ``nightly``, twenty times as many, others each time.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import random
import socket
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, settings

from energon_lite import (
    DataLoader,
    SavableDataLoader,
    TaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_lite.cli.main import main
from energon_lite.loading.executors.segments import SegmentReader
from energon_lite.loading.executors.transport import receiving

T = TypeVar("T")
Parts = dict[str, bytes]

#: The only rank of a run, without workers.
ALONE = WorkerConfig(rank=0, world_size=1)


def alone(workers: int) -> WorkerConfig:
    """The only rank of a run, with so many workers."""
    return WorkerConfig(rank=0, world_size=1, num_workers=workers)


def take(batches: Iterable[T], count: int | None) -> list[T]:
    """The first so many of a loader's batches; None: all."""
    return list(islice(batches, count))


def batches_of(dataset: Any, count: int | None = None, **options: Any) -> list[Any]:
    """The first batches of a data set, as :func:`take`, by a loader of its own with these options."""
    with get_savable_loader(dataset, **options) as loader:
        return take(loader, count)


def same(one: Any, other: Any) -> bool:
    """Equality of batches, bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__dataclass_fields__)
    return bool(one == other)


#: What a loader is told, and what a ``WorkerConfig``; all else is told a data set.
_OF_LOADERS, _OF_CONFIGS = (inspect.signature(kind).parameters.keys() for kind in (DataLoader, WorkerConfig))


def train_loader(path: Any, num_workers: int = 0, **arguments: Any) -> SavableDataLoader:
    """A loader of training data, of the only rank if nothing else is said.

    Args:
        arguments: of the data set, of the loader and of the ``WorkerConfig``.
    """
    return _loader(get_train_dataset, path, {"num_workers": num_workers, **arguments})


def val_loader(path: Any, num_workers: int = 0, **arguments: Any) -> SavableDataLoader:
    """The same of validation data."""
    return _loader(get_val_dataset, path, {"num_workers": num_workers, **arguments})


def _loader(get: Callable[..., Any], path: Any, arguments: dict[str, Any]) -> SavableDataLoader:
    config, own = (
        {name: arguments.pop(name) for name in names & arguments.keys()} for names in (_OF_CONFIGS, _OF_LOADERS)
    )
    arguments.setdefault("worker_config", WorkerConfig(**{"rank": 0, "world_size": 1, **config}))
    return get_savable_loader(get(path, **arguments), **own)


class Listed(TaskEncoder):
    """Batches are lists of samples."""

    def batch(self, samples: list[Any]) -> Any:
        return samples


def invoke(*arguments: object, answers: str | None = None) -> Result:
    """The result of a command of the library, run in this process; only its own errors may end it."""
    result = CliRunner().invoke(main, [*map(str, arguments)], input=answers)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def command(*arguments: object, answers: str | None = None) -> tuple[int, str]:
    """Exit status and output of a command."""
    result = invoke(*arguments, answers=answers)
    return result.exit_code, result.output


def output_of(*arguments: object) -> str:
    """Output of a command that succeeds."""
    code, output = command(*arguments)
    assert code == 0, output
    return output


def refusal_of(*arguments: object) -> str:
    """Output of a command that refuses."""
    code, output = command(*arguments)
    assert code == 1, output
    return output


def errors_of(
    run: Callable[[int, Callable[[int], Any]], list[Any]],
    world: int,
    error: type[Exception] | tuple[type[Exception], ...],
    work: Callable[[int], object],
) -> list[str]:
    """The texts of the errors that ``work(rank)`` raises on so many ranks, which ``run(world, work)`` starts."""

    def caught(rank: int) -> str:
        with pytest.raises(error) as raised:
            work(rank)
        return str(raised.value)

    return run(world, caught)


def script(path: Path) -> ModuleType:
    """The module that a script outside of the package is."""
    spec = spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look for theirs there
    spec.loader.exec_module(module)
    return module


def contents_of(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    """The contents of all files in a folder, and below it, by name."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob(pattern) if file.is_file()}


def json_lines(path: Path) -> list[Any]:
    """The values in the lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def free_port() -> int:
    """A free port below those that systems give to connections: none takes it before its test does."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no free port")


def write_members(
    path: Path, members: Iterable[tuple[str, bytes]], tar_format: int = tarfile.USTAR_FORMAT, time: int = 0
) -> Path:
    """A tar of ``(name, bytes)``, byte for byte the same each time; its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), time
            tar.addfile(info, io.BytesIO(data))
    return path


def write_tar(path: Path, samples: Iterable[tuple[str, Parts]], time: int = 0) -> None:
    """A tar of ``(key, {part: bytes})``."""
    members = [(f"{key}.{name}", data) for key, parts in samples for name, data in parts.items()]
    write_members(path, members, time=time)


TEXT_YAML = """\
__module__: megatron.energon
__class__: StandardWebdatasetFactory
sample_type:
  __module__: megatron.energon
  __class__: TextSample
field_map:
  text: txt
"""


CRUDE_YAML = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


def write_dataset(
    path: Path,
    shards: dict[str, Sequence[tuple[str, Parts]]],
    *,
    splits: dict[str, list[str]] | None = None,
    dataset_yaml: str = TEXT_YAML,
    exclude: Sequence[str] = (),
) -> Path:
    """A prepared folder: tars and the small files of ``.nv-meta`` (the index is built when it is opened)."""
    for name, samples in shards.items():
        write_tar(path / name, samples)
    meta = path / ".nv-meta"
    meta.mkdir(parents=True, exist_ok=True)
    counts = {name: len(samples) for name, samples in shards.items()}
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    split = {"split_parts": splits or {"train": list(shards), "val": list(shards)}, "exclude": list(exclude)}
    (meta / "split.yaml").write_text(json.dumps(split))  # JSON is YAML
    (meta / "dataset.yaml").write_text(dataset_yaml)
    return path


def text_dataset(path: Path, count: int, *, shards: int = 1, prefix: str = "") -> Path:
    """``count`` text samples with keys ``{prefix}0, {prefix}1, ...`` whose text is their key."""
    samples = [(f"{prefix}{number}", {"txt": f"{prefix}{number}".encode()}) for number in range(count)]
    size = -(-count // shards)
    return write_dataset(
        path, {f"shard-{i:03d}.tar": samples[i * size : (i + 1) * size] for i in range(shards) if samples[i * size :]}
    )


def metadataset(split: dict[str, Any]) -> dict[str, Any]:
    """A metadataset that has the same in ``train`` and ``val``."""
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": split, "val": split}}


def blend_of(leaves: Iterable[tuple[Any, Any]], **more: Any) -> dict[str, Any]:
    """A metadataset that blends ``(path, weight)``, each with ``more``."""
    return metadataset({"blend": [{"path": str(path), "weight": weight, **more} for path, weight in leaves]})


#: Examples of a test that says nothing else, where all are tried.
_USUAL = 50


def load_profile() -> None:
    """Have hypothesis use the profile that the environment chooses."""
    settings.register_profile(
        "default",
        deadline=None,
        derandomize=True,
        max_examples=_USUAL * 2 // 5,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
    )
    default = settings.get_profile("default")
    settings.register_profile("check", parent=default, max_examples=_USUAL // 5)
    settings.register_profile("full", parent=default, max_examples=_USUAL)
    settings.register_profile("nightly", parent=default, derandomize=False, max_examples=_USUAL * 20)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def examples(count: int) -> int:
    """Examples of a test, of the ``count`` that it tries in the profile ``full``.

    Example:
        >>> @settings(max_examples=examples(200))
        ... @given(st.integers())
        ... def test_it(number): ...
    """
    return max(1, count * settings().max_examples // _USUAL)


def nightly_but(always: Collection[int], cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: those at the places ``always`` are tried each time, the others with ``-m nightly``.

    Of a product, ``always`` should have each value of each axis at least once.

    Example:
        >>> @pytest.mark.parametrize(("world", "reduce"), nightly_but({0, 3}, itertools.product([1, 2], "ab")))
    """
    given = [case if isinstance(case, tuple) else (case,) for case in cases]
    assert max(always) < len(given)
    return [
        pytest.param(*case, marks=[pytest.mark.nightly] * (place not in always)) for place, case in enumerate(given)
    ]


def in_time(step: Callable[[], T], seconds: float = 120.0) -> T:
    """What ``step`` gives, or raises, run in another thread; TimeoutError: it is still at it after so long."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(step())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


def until(holds: Callable[[], T], seconds: float = 120.0) -> T:
    """The first true result of ``holds``, asked again and again; after so long, its last one."""
    deadline = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number; one that has ended, and is not waited for yet, is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# Garbage and threads of earlier tests may open and close files, read, sleep and log at any moment.


def descriptors() -> set[tuple[str, str]]:
    """The open files of this process, each with its target: what another call has more was opened since."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the folder itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def calls_here(monkeypatch: pytest.MonkeyPatch, owner: Any, *names: str) -> list[tuple[Any, ...]]:
    """Grows with the arguments of each call of these functions by this thread."""
    calls, here = list[tuple[Any, ...]](), threading.get_ident()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            if threading.get_ident() == here:
                calls.append(arguments)
            return function(*arguments)

        return noted

    for name in names:
        monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
    return calls


def told_of(caplog: pytest.LogCaptureFixture, what: object) -> list[str]:
    """The messages in a log that name something."""
    return [message for record in caplog.records if str(what) in (message := record.getMessage())]


def received(connection: Connection, segments: SegmentReader | None = None) -> Any:
    """The next object from a pipe, as the trainer or a worker receives it."""
    found = next(receiving(connection.fileno(), segments))
    assert found is not None  # because the pipe blocks
    return found[0]
