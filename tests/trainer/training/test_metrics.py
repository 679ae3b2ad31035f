"""The metrics file survives crashes and resumes; the progress line says what matters."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
from tqdm import tqdm

import energon_lite.extras
from energon_lite.errors import UsageError
from energon_lite.extras.inspect import MetricsFile, WandbRun
from energon_lite.trainer import config_from_dict
from energon_lite.trainer.training.metrics import Progress, make_sinks

VALUES: dict[str, Any] = {"loss": 2.5, "grad_norm": 1.0, "tokens": 12, "seconds": 0.1}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_floats_keep_all_their_digits_and_a_resumed_run_drops_what_it_makes_again(tmp_path: Path) -> None:
    path = tmp_path / "out" / "metrics.jsonl"
    values = [{"step": 1, "loss": math.pi}, {"step": 2, "loss": math.inf, "grad_norm": math.nan}, {"step": 3}]
    with MetricsFile(path, after=0) as metrics:
        for line in values:
            metrics.write(line)
        # On disk before the file is closed: a killed run keeps its lines.
        assert lines(path) == [values[0], {"step": 2, "loss": None, "grad_norm": None}, values[2]]
    with open(path, "a") as stream:
        stream.write('{"step": 4, "lo')
    with MetricsFile(path, after=2) as metrics:
        assert [line["step"] for line in lines(path)] == [1, 2]
        metrics.write({"step": 3})
    assert [line["step"] for line in lines(path)] == [1, 2, 3]
    assert [*path.parent.iterdir()] == [path]


def test_progress_is_logged_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    progress = Progress(total=5, done=0, every=2)
    for step in range(1, 6):
        progress.write(VALUES | {"step": step} | ({"eval_loss": 3.0} if step == 3 else {}))
    progress.close()
    told = [record.message for record in caplog.records if record.name.startswith("energon_lite.trainer")]
    assert [text.split(":")[0] for text in told] == [f"step {n} of 5" for n in (2, 3, 4, 5)]
    assert "loss 2.5000, grad norm 1.000, 12 tokens, eval loss 3.0000" in told[1]


def test_a_terminal_gets_one_live_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(tqdm, "_instances", WeakSet(), raising=False)  # a bar that a test left open would stand above
    progress = Progress(total=4, done=2, every=1)
    for step in (3, 4):
        progress.write(VALUES | {"step": step})
    progress.close()
    shown = capsys.readouterr().err
    assert "4/4" in shown and "loss 2.5000" in shown and shown.count("\n") == 1


def test_weights_and_biases_get_the_numbers_and_a_resumed_run_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    given = {"data": {"path": "blend.yaml"}, "output": str(tmp_path / "run"), "train": {"wandb": {"project": "words"}}}
    config = config_from_dict(given)
    for step in (1, 2):
        for sink in make_sinks(config, step - 1):
            sink.write(VALUES | {"step": step})
            sink.close()
    run = wandb.init.return_value
    assert run.log.call_args_list == [mock.call(VALUES, step=step) for step in (1, 2)] and run.finish.call_count == 2
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert first == second and first["project"] == "words" and first["resume"] == "allow" and len(first["id"]) == 8
    assert first["config"]["data"]["path"] == "blend.yaml" and first["dir"] == str(tmp_path / "run")
    assert [line["step"] for line in lines(tmp_path / "run/metrics.jsonl")] == [1, 2]


def test_without_weights_and_biases_the_error_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"energon-lite\[wandb\]"):
        WandbRun(tmp_path, {}, {})


def test_without_the_extra_there_is_only_the_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "energon_lite.extras.inspect", None)  # importing it fails
    monkeypatch.delattr(energon_lite.extras, "inspect")
    given: dict[str, Any] = {"data": {"path": "blend.yaml"}, "output": str(tmp_path)}
    (sink,) = make_sinks(config_from_dict(given), 1)
    sink.close()
    assert isinstance(sink, Progress) and "metrics.jsonl is not written" in caplog.text
    with pytest.raises(UsageError, match=r"train\.tensorboard needs the extra inspect"):
        make_sinks(config_from_dict(given | {"train": {"tensorboard": True}}), 1)
