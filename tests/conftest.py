"""Shared by all tests: tiny data sets, made by hand, and hypothesis' settings."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from tests.testing import load_profile, text_dataset, write_dataset

load_profile()
# Ranks of tests are forked: a rank would wait for ever for its parent's threads that compile.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Tests run beside each other, and tensors are small: more threads only wait for each other. For the programs, too.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Ranks of tests outnumber the GPUs of most machines: only ``pytest -m gpu`` sees any."""
    chosen = re.findall(r"(not +)?\bgpu\b", config.option.markexpr or "")
    if "" not in chosen:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what stays to the end, here and in ranks and workers that are forked."""
    gc.collect()
    gc.freeze()


def blend_yaml(path: Path, leaves: Sequence[tuple[str, float]], **splits: Any) -> Path:
    """A MetadatasetV2 that blends ``(path, weight)``, for train; without weights in val."""
    lines = ["__module__: megatron.energon", "__class__: MetadatasetV2", "splits:"]
    for split in ("train", "val"):
        lines += [f"  {split}:", "    blend:"]
        lines += [f"      - {{path: {leaf}, weight: {weight!r}}}" for leaf, weight in leaves]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(name="write_dataset", scope="session")
def _write_dataset() -> Callable[..., Path]:
    return write_dataset


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill loses nothing that was written; only a power cut does, for which files are flushed."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="session")
def leaf_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``leaf_of(count, tag)``: a text data set of so many samples, made once a session; keys are ``{tag}-{number}``.

    Ranks that are forked before it is made may make it together: the folder appears whole.
    """
    root = tmp_path_factory.mktemp("leaves")
    made: dict[tuple[int, str], Path] = {}

    def make(count: int, tag: str = "a") -> Path:
        if (count, tag) not in made:
            path = made[count, tag] = root / f"{tag}-{count}"
            own = text_dataset(Path(mkdtemp(dir=root)), count, shards=min(3, count), prefix=f"{tag}-")
            with suppress(OSError):  # another rank was first
                own.rename(path)
        return made[count, tag]

    return make
