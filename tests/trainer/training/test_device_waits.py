"""No step waits for the device, whatever its rows and its model; a save and an evaluation do, at fixed places.

They are counted on a processor: torch's device ``meta`` stands for a GPU. Its tensors have no values, so whatever needs
one shows: a read, a copy that blocks, an index made of a mask. (Only ``x[[0, 1]]`` waits and leaves no trace.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from energon_lite.trainer import (
    CheckpointSaver,
    LlamaModel,
    MultimodalBatch,
    OptimizerConfig,
    OverlappedDistributedOptimizer,
    VisionConfig,
    build_mesh,
    evaluate,
)
from energon_lite.trainer.models import named_layers
from energon_lite.trainer.models.interface import on_device
from energon_lite.trainer.optimizer import overlapped_optimizer
from energon_lite.trainer.training.guards import NonFiniteGuard, SpikeGuard
from energon_lite.trainer.training.step import launch_step
from tests.trainer.training.test_step import MODEL, text

DEVICE = torch.device("meta")
#: Operations whose result has a size that only the device knows.
_OF_UNKNOWN_SIZE = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")


@contextmanager
def device_waits() -> Iterator[list[str]]:
    """A list with a name for each wait within the block."""
    with _Waits() as waits, pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor")):
            patch.setattr(owner, name, waits.noted(getattr(owner, name)))
        # Addresses, of which tensors without memory have none.
        patch.setattr(overlapped_optimizer, "check_memory", lambda places: None)
        yield waits.found


class _Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def noted(self, make: Any) -> Any:
        """A maker of tensors of the host's numbers: on a device, it copies them from memory that is not pinned."""

        def made(*args: Any, **how: Any) -> Any:
            here = any(isinstance(value, torch.Tensor) and value.device == DEVICE for value in args)
            if ((torch.device(how.get("device") or "cpu") == DEVICE) and not here) or ("new" in make.__name__ and here):
                self.found.append("numbers of the host")
            return make(*args, **how)

        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        how, name = kwargs or {}, func.overloadpacket.__name__
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is None:  # torch's fused SGD lacks the device
            return None if name == "_fused_sgd_" else func(*args, **how)
        here = first.device == DEVICE
        if name == "_local_scalar_dense" and here:
            self.found.append("a number is read")
            return 1
        if (name in _OF_UNKNOWN_SIZE and here) or (name == "repeat_interleave" and how.get("output_size") is None):
            self.found.append(name)
            return torch.zeros(1, max(first.dim(), 1), dtype=torch.int64, device=DEVICE)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and here:
            wrong = [i for i in args[1] if i is not None and (i.dtype == torch.bool or i.device != DEVICE)]
            self.found += ["an index of a mask or of the host"] * len(wrong)
        if name == "_to_copy" and here != (torch.device(how.get("device") or first.device) == DEVICE):
            self.found += [] if how.get("non_blocking") else ["a copy that blocks"]
            if here:  # numbers of buckets, for the optimizer
                made = torch.arange(first.numel()) if first.dtype == torch.int64 else torch.zeros(first.numel())
                return made.view(first.shape).to(how.get("dtype") or first.dtype)
        if name == "copy_" and here != (args[1].device == DEVICE):
            self.found += [] if any(args[2:]) or how.get("non_blocking") else ["a copy that blocks"]
            return first
        return func(*args, **how)


ENCODER = VisionConfig(hidden_size=8, num_layers=2, num_heads=2, ffn_size=12)


def images(*sizes: tuple[int, int], packed: bool = False) -> MultimodalBatch:
    """Rows with images of these sizes, the first at the begin of its row."""
    places = {"image_rows": torch.arange(len(sizes)) % 2, "image_starts": torch.arange(len(sizes)) // 2 * 5}
    image = torch.ones(len(sizes), 3, 8, 8)
    return dataclasses.replace(text(length=24, packed=packed), image=image, image_sizes=[*sizes], **places)


PLAIN, PACKED = dataclasses.replace(text(length=24), counted=48.0), text(length=24, packed=True)
EQUAL, UNEQUAL = images((8, 8), (8, 8)), images((8, 8), (4, 8), (8, 4), packed=True)
SEES = {"image_size": 8, "patch_size": 4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[MultimodalBatch]]] = {
    "rows of text": ({}, {}, [PLAIN, PACKED]),
    "chunks of the loss": ({"loss_chunk": 7, "tie_embeddings": True}, {"clip": 0.0}, [PLAIN, PACKED]),
    "sliding windows": ({"sliding_window": 4, "qkv_bias": True, "qk_norm": True}, {}, [PLAIN, PACKED]),
    "grouped heads": ({"num_kv_heads": 1}, {"grad_dtype": "parameter"}, [PLAIN, PACKED]),
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
        monkeypatch.setattr(named_layers, "_varlen_attn", lambda: lambda q, k, v, *_, **how: q * v.sum())
        monkeypatch.setattr(named_layers, "has_varlen_kernel", lambda device, dtype: True)
    return str(request.param)


def made(model: dict[str, Any], optimizer: dict[str, Any]) -> tuple[LlamaModel, OverlappedDistributedOptimizer]:
    mesh = dataclasses.replace(build_mesh(), device=DEVICE)
    llama = LlamaModel(dataclasses.replace(MODEL, vocab_multiple=64, **model), mesh, drawn=())
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
