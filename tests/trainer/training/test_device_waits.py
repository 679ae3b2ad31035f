"""No step waits for the device, whatever its rows and its model; a save and an evaluation do, at fixed places."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite.trainer import (
    LlamaModel,
    ModelConfig,
    MultimodalBatch,
    OptimizerConfig,
    OverlappedDistributedOptimizer,
    VisionConfig,
    evaluate,
)
from energon_lite.trainer.checkpointing.checkpoint import CheckpointSaver
from energon_lite.trainer.models import attention_functions
from energon_lite.trainer.models.interface import document_lengths, on_device
from energon_lite.trainer.training.guards import NonFiniteGuard, SpikeGuard
from energon_lite.trainer.training.step import launch_step
from tests.trainer.training.device_waits import DEVICE, device_mesh, device_waits

MODEL = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, ffn_size=24, vocab_size=29)
ENCODER = VisionConfig(hidden_size=8, num_layers=2, num_heads=2, ffn_size=12)
LENGTH = 24


def text(*, packed: bool = False) -> MultimodalBatch:
    tokens = torch.arange(2 * (LENGTH + 1)).view(2, -1) % MODEL.vocab_size
    documents = (torch.arange(LENGTH) // 5).expand(2, -1) if packed else None
    lengths = None if documents is None else document_lengths(documents)
    masks = {"loss_mask": torch.ones(2, LENGTH), "documents": documents, "document_lengths": lengths}
    return MultimodalBatch(tokens=tokens[:, :-1], labels=tokens[:, 1:], counted=2.0 * LENGTH, **masks)


def images(*sizes: tuple[int, int], packed: bool = False) -> MultimodalBatch:
    """Rows with images of these sizes, the first at the begin of its row."""
    places = {"image_rows": torch.arange(len(sizes)) % 2, "image_starts": torch.arange(len(sizes)) // 2 * 5}
    image = torch.ones(len(sizes), 3, 8, 8)
    return dataclasses.replace(text(packed=packed), image=image, image_sizes=[*sizes], **places)


PLAIN, PACKED = text(), text(packed=True)
EQUAL, UNEQUAL = images((8, 8), (8, 8)), images((8, 8), (4, 8), (8, 4), packed=True)
SEES = {"image_size": 8, "patch_size": 4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[MultimodalBatch]]] = {
    "rows of text": ({}, {}, [PLAIN, PACKED]),
    "chunks of the loss": ({"loss_chunk": 7, "tie_embeddings": True}, {"clip": 0.0}, [PLAIN, PACKED]),
    "sliding windows": ({"sliding_window": 4, "qkv_bias": True, "qk_norm": True}, {}, [PLAIN, PACKED]),
    "joined weights": ({"fuse_projections": True, "num_kv_heads": 1}, {"grad_dtype": "parameter"}, [PLAIN, PACKED]),
    "bfloat16": ({"dtype": "bfloat16", "recompute": "full"}, {}, [PLAIN, PACKED]),
    "recomputation": ({"recompute": "selective", "rope_theta": 5.0}, {"algorithm": "sgd"}, [PLAIN, PACKED]),
    "muon": ({}, {"algorithm": "muon"}, [PLAIN, PACKED]),
    "patches": (SEES, {}, [EQUAL, PLAIN]),
    "images of one size": (SEES | {"vision": ENCODER}, {}, [EQUAL, PACKED]),
    "images of several sizes": (SEES | {"vision": ENCODER}, {}, [UNEQUAL, EQUAL]),
    "a pooled image": (SEES | {"vision": dataclasses.replace(ENCODER, pooling="mean")}, {}, [UNEQUAL]),
}


@pytest.fixture(params=["sdpa", "kernel"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Masks, or one kernel for all documents."""
    if request.param == "kernel":
        monkeypatch.setattr(attention_functions, "_varlen_attn", lambda: lambda q, k, v, *_, **how: q * v.sum())
        monkeypatch.setattr(attention_functions, "has_varlen_kernel", lambda device, dtype: True)
    return str(request.param)


def made(model: dict[str, Any], optimizer: dict[str, Any]) -> tuple[LlamaModel, OverlappedDistributedOptimizer]:
    llama = LlamaModel(dataclasses.replace(MODEL, **model), device_mesh(), drawn=())
    return llama, OverlappedDistributedOptimizer(llama, llama.mesh, OptimizerConfig(**optimizer))


@pytest.mark.parametrize("case", CASES)
def test_no_step_waits(case: str, attention: str) -> None:
    """The first step learns the order of gradients, for which it reads."""
    settings, how, rows = CASES[case]
    with device_waits() as found:
        model, optimizer = made(settings, how)
        batches, guard = [batch.to(DEVICE) for batch in rows], SpikeGuard(1.5, 4, model.mesh)
        for _ in range(2):
            found.clear()
            launch_step(model, optimizer, batches, model.mesh, lr=1e-3, spikes=guard)
    assert found == []


#: Ways to wait, each for one reason.
WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[0]),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to the device": lambda x: torch.ones(3).to(x.device),
    "copy_": lambda x: torch.ones(3).copy_(x),
    "copy_ to the device": lambda x: x.copy_(torch.ones(3)),
    "tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "tensor of a number": lambda x: torch.as_tensor(1.0, device=x.device),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x.index_put((x > 0,), x[:1]),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, torch.ones(3, dtype=torch.int64, device=x.device)),
}


@pytest.mark.parametrize("way", WAITS)
def test_each_way_to_wait_is_seen(way: str) -> None:
    with device_waits() as found:
        numbers = torch.ones(3, device=DEVICE)
        assert found == []
        try:
            WAITS[way](numbers)
        except NotImplementedError:  # without values there is no result
            assert found != []
    assert len(found) == 1


def test_numbers_for_the_device_come_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then the copy does not block, whatever it says."""
    pinned, make = list[bool](), torch.tensor

    def noted(*args: Any, pin_memory: bool, **how: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return make(*args, **how)

    monkeypatch.setattr(torch, "tensor", noted)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **how: tensor)
    on_device([1], torch.device("cuda"))
    on_device([1], torch.device("cpu"))
    assert pinned == [True, False]


@pytest.mark.parametrize("layers", [1, 4])
def test_a_save_waits_once_for_all_copies(layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides, it reads whether all is finite, the number of updates, and the guard's losses and count."""
    on_gpu, waits = torch.device("cuda"), list[torch.device]()
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    with device_waits() as found:
        model, optimizer = made({"num_layers": layers, "dtype": "bfloat16"}, {})
        guard, spikes = NonFiniteGuard(model, optimizer, model.mesh, 3), SpikeGuard(1.5, 4, model.mesh)
        monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: found.append("many are read") or [1.0] * len(tensor))
        saver = CheckpointSaver(tmp_path, dataclasses.replace(model.mesh, device=on_gpu))
        for step in (1, 2):
            found.clear()
            guard.check_state(step)
            saver.save(step, model, optimizer, {"spikes": spikes.state()})
            assert found == ["many are read", "many are read", "a number is read", "a number is read"]
            assert waits == [on_gpu] * step
    saver.finish()


@pytest.mark.parametrize("batches", [1, 6])
def test_an_evaluation_reads_once(batches: int) -> None:
    with device_waits() as found:
        model, _ = made({}, {})
        rows = [PACKED.to(DEVICE)] * batches
        found.clear()
        evaluate(model, rows, model.mesh)
    assert found == ["a copy that blocks"], "of the sums to the host"
