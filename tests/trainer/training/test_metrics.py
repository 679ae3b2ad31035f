"""The metrics file survives crashes and resumes; the progress line says what matters; the arithmetic of throughput."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
import torch
from tqdm import tqdm

import energon_lite.extras
from energon_lite.batching import chain_digest, digest_text
from energon_lite.errors import UsageError
from energon_lite.extras.inspect import MetricsFile, WandbRun
from energon_lite.trainer import LlamaModel, ModelConfig, MultimodalBatch, VisionConfig, build_mesh, config_from_dict
from energon_lite.trainer.data.loaders import StepData
from energon_lite.trainer.models.interface import document_lengths
from energon_lite.trainer.training.metrics import Progress, RunningStep, StepMetrics, make_sinks
from energon_lite.trainer.training.throughput import (
    batch_flops,
    flops_of_images,
    memory_in_use,
    peak_flops,
    training_flops,
)

VALUES: dict[str, Any] = {"loss": 2.5, "grad_norm": 1.0, "tokens": 12, "tokens_per_second": 120.4, "seconds": 0.1}


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
    assert "loss 2.5000, grad norm 1.000, 12 tokens, 120/s, eval loss 3.0000" in told[1]


def test_a_terminal_gets_one_live_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(tqdm, "_instances", WeakSet(), raising=False)  # a bar that a test left open would stand above
    progress = Progress(total=3, done=1, every=1)
    for step in (0, 1, 2):
        progress.write(VALUES | {"step": step})
    progress.close()
    shown = capsys.readouterr().err
    assert "3/3" in shown and "4/3" not in shown, "what is evaluated before the first step is no step"
    assert "loss 2.5000" in shown and shown.count("\n") == 1


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


def test_the_digest_of_a_step_is_the_sum_over_all_ranks() -> None:
    config = config_from_dict({"data": {"path": "blend.yaml"}, "train": {"peak_tflops": 2.0}})
    numbers, digests = StepMetrics(config, build_mesh()), (2**64 - 1, 2**63 + 12_346)
    parts = [RunningStep(1, StepData([1], [], one), 0.0, 0.0, flops=3e12).sums(build_mesh()) for one in digests]
    values: dict[str, Any] = {"step": 1, "seconds": 2.0}
    numbers.complete(values, [sum(part) for part in zip(*parts, strict=True)])
    assert values["digest"] == digest_text(sum(digests) % 2**64) and values["mfu"] == 6e12 / 2.0 / 2e12
    chain = digest_text(chain_digest(0, sum(digests) % 2**64))
    assert numbers.digest.state() == {"first": 0, "step": 1, "chain": chain}


# -- throughput --------------------------------------------------------------------------------------------------------

SHAPE = ModelConfig(hidden_size=64, num_layers=3, num_heads=8, num_kv_heads=2, ffn_size=80, vocab_size=96)


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Operations of each token of a long causal row: 6 N + 6 L H S."""
    return training_flops(config, 1, length / 2)


def test_weights_that_a_token_is_multiplied_with_and_the_length_of_its_row_count() -> None:
    model = LlamaModel(SHAPE, build_mesh())
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    padding = (SHAPE.padded_vocab_size - SHAPE.vocab_size) * SHAPE.hidden_size
    assert flops_per_token(SHAPE, 0) == 6 * (matrices - padding)
    assert flops_per_token(SHAPE, 100) - flops_per_token(SHAPE, 0) == 6 * 3 * 64 * 100
    # What a long row has for each of its tokens, but for the half of a pair with itself.
    assert training_flops(SHAPE, 100, 100 * 101 / 2) == pytest.approx(100 * flops_per_token(SHAPE, 101))


def test_peaks_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "Some other"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found[name] = peak_flops(torch.device("cuda", 0))
    assert list(found.values()) == [989e12, 756e12, 989e12, None]
    assert peak_flops(torch.device("cpu")) is None


def test_memory_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.01 < memory_in_use(torch.device("cpu")) < 1000
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 30)
    assert memory_in_use(torch.device("cuda")) == 3


@pytest.mark.parametrize("projector", ["mlp", "linear"])
def test_images_go_through_the_encoders_matrices(projector: str) -> None:
    vision = VisionConfig(hidden_size=12, num_layers=3, num_heads=2, ffn_size=20, feature_layer=-2, projector=projector)
    config = dataclasses.replace(SHAPE, image_size=8, patch_size=2, vision=vision)
    model = LlamaModel(config, build_mesh())
    used = [
        p for name, p in model.named_parameters() if name.startswith(("vision.", "projector.")) and ".2." not in name
    ]
    matrices = sum(p.numel() for p in used if p.dim() > 1) - model.vision.embeddings.position_embedding.weight.numel()
    assert flops_of_images(config, [(8, 8)] * 3) == [6 * 16 * matrices + 12 * 2 * 12 * 16**2] * 3
    assert sum(flops_of_images(config, [(8, 4), (5, 4)])) == 6 * 12 * matrices + 12 * 2 * 12 * (8**2 + 4**2)
    once = sum(p.numel() for p in model.projector.parameters() if p.dim() > 1)
    pooled = dataclasses.replace(config, vision=dataclasses.replace(vision, pooling="mean"))
    assert flops_of_images(pooled, [(8, 8)]) == [6 * (16 * (matrices - once) + once) + 12 * 2 * 12 * 16**2]
    plain = dataclasses.replace(config, vision=None)
    assert flops_of_images(plain, [(8, 8)]) == [6 * 16 * 12 * SHAPE.hidden_size]
    assert flops_of_images(SHAPE, []) == []


def test_a_micro_batch_costs_what_its_rows_and_images_do() -> None:
    config = dataclasses.replace(SHAPE, image_size=8, patch_size=2)
    zeros = torch.zeros(2, 6, dtype=torch.int64)
    images = {"image": torch.zeros(1, 3, 8, 8), "image_rows": zeros[0, :1], "image_starts": zeros[0, :1]}
    batch = MultimodalBatch(tokens=zeros, labels=zeros, loss_mask=zeros, **images)
    (of_image,) = flops_of_images(config, [(8, 8)])
    assert batch_flops(config, batch) == training_flops(config, 12, 2 * 21) + of_image
    batch.documents = torch.tensor([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 4, 4]])
    batch.document_lengths = document_lengths(batch.documents)
    assert batch.document_lengths == [2, 3, 1, 6] and document_lengths(batch.documents[:0]) == []
    assert batch_flops(config, batch) == training_flops(config, 12, 31) + of_image
    near = dataclasses.replace(config, sliding_window=3)
    assert batch_flops(near, batch) == training_flops(config, 12, 3 + 6 + 1 + 15) + of_image
