"""The loader inside other training loops: what an interrupted run saw, resumed, is what an undisturbed run saw."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.testing import nightly_but

#: More than an epoch of the 14 samples, in batches of 2, so that every loop begins its data again somewhere.
STEPS = 17


@pytest.mark.parametrize(
    ("framework", "stop"),
    nightly_but(
        {1, 3, 8, 10},
        itertools.product(["accelerate", "lightning", "transformers", "distributed_checkpoint"], [5, 8, 10]),
    ),
)
def test_a_resumed_run_sees_what_an_undisturbed_one_sees(
    framework: str, stop: int, tmp_path: Path, leaf_of: Callable[..., Path]
) -> None:
    train = importlib.import_module(f"examples.frameworks.with_{framework}").train
    leaf = leaf_of(14, framework)
    undisturbed = train(leaf, tmp_path / "undisturbed", STEPS)
    assert len(undisturbed) == 2 * STEPS
    assert sorted(undisturbed[:14]) == sorted(undisturbed[14:28])

    first = train(leaf, tmp_path / "resumed", stop)
    assert first == undisturbed[: 2 * stop]
    # The newest checkpoint; what came after it is seen again. Trainer saves at its last step, too.
    saved = stop if framework == "transformers" else stop - stop % 5
    assert train(leaf, tmp_path / "resumed", STEPS) == undisturbed[2 * saved :]
