"""torchtitan's own ``Trainer`` with its debug model, on the CPU.

It is made for GPUs; what stands in for them here is the least that lets it run:

* the device's module, of which ``torch.cpu`` has only a part;
* attention: FlexAttention has no backward pass on the CPU, so its masks are used with torch's other attention;
* kernels in Triton, and Hugging Face's ``datasets``, which it imports and this run never calls, where they are not
  installed;
* ``torch.distributed.set_timeout``, which torch 2.13 has by another name.

Everything else is the installed package's: its loop, steps, losses, FSDP, optimizer, checkpoints, validator.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.extras.frameworks.titan_data import PICTURE

#: Steps between checkpoints, and tokens of a row.
SAVE_EVERY, SEQ_LEN = 2, 48

try:
    from torch.nn.attention.flex_attention import AuxOutput, create_block_mask, create_mask
except ImportError:
    pytest.skip("torchtitan needs a newer torch", allow_module_level=True)


class _Cpu:
    """``torch.cpu``, with what a GPU's module has besides."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=1 << 34, name="cpu")

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def _nothing(self, *_: Any) -> None:
        """There is nothing to reset or to wait for."""

    reset_peak_memory_stats = empty_cache = synchronize = _nothing


def import_trainer() -> None:
    """Import torchtitan's trainer, with what stands in for a GPU. Skips the test, with the reason, if it cannot."""
    for name in ("torchtitan", "torchdata", "tyro", "spmd_types"):
        pytest.importorskip(name, reason=f"torchtitan's trainer needs {name}: pip install 'energon-lite[torchtitan]'")
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", mock.MagicMock())
    if importlib.util.find_spec("datasets") is None:
        for name in ("datasets", "datasets.distributed"):
            sys.modules.setdefault(name, mock.MagicMock())
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", _Cpu()
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout
    import torchtitan.trainer  # noqa: F401
    from torchtitan.models.common import attention

    attention.FlexAttention._compiled_flex_attn = staticmethod(_attention)
    attention._compiled_create_block_mask = create_block_mask


def _attention(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    output = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )
    return output, AuxOutput()


@dataclass
class Run:
    """What a run did on one rank.

    Args:
        keys: by step, the keys of the samples of each of its micro-batches.
        losses: by step, as torchtitan logs them: over all ranks.
        validated: by validation, the keys of the samples of each of its steps.
        validation_losses: by validation.
    """

    keys: dict[int, list[list[str]]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    validated: list[list[list[str]]] = field(default_factory=list)
    validation_losses: list[float] = field(default_factory=list)


def run(
    rank: int,
    folder: Path,
    *,
    train: Any,
    validate: Any = None,
    steps: int,
    until: int | None = None,
    micro_batches: int,
    on_step: Callable[[int], None] = lambda step: None,
    **checkpoint: Any,
) -> Run:
    """Train the debug model on this rank, from the newest checkpoint in ``folder`` if there is one.

    Args:
        train, validate: configurations of data loaders; the latter for validations, after the first step and with each
            checkpoint.
        steps: of the whole run, which its learning rates follow.
        until: stop behind this step already.
        micro_batches: of a step, over all ranks.
        on_step: called after each step with its number, before a checkpoint is saved.
    """
    import torchtitan.components.validate as validation
    from torchtitan.trainer import Trainer

    from energon_lite.extras.frameworks import torchtitan as adapter

    found = Run()
    with mock.patch.dict("os.environ", {"LOCAL_RANK": str(rank)}):
        trainer: Any = _config(folder, train, validate, steps, micro_batches, checkpoint).build()
    assert type(trainer) is Trainer
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo can do no other
    named, taken, log = adapter.model_inputs, trainer.train_step, trainer.metrics_processor.log
    validating: list[list[str]] | None = None

    def seen(batch: Any, seq_len: Any) -> Any:
        places = found.keys.setdefault(trainer.step, []) if validating is None else validating
        places.append(list(batch.__key__))
        return named(batch, seq_len)

    def step(batches: Any) -> None:
        taken(batches)
        on_step(trainer.step)

    def logged(step: int, loss: float, *rest: Any, **more: Any) -> None:
        found.losses[step] = loss
        log(step, loss, *rest, **more)

    def validated(self: Any, *arguments: Any) -> None:
        nonlocal validating
        found.validated.append(validating := [])
        own_validate(self, *arguments)
        validating = None

    own_validate = validation.Validator.validate
    trainer.metrics_processor.log, trainer.train_step = logged, step
    trainer.metrics_processor.log_validation = lambda loss, step: found.validation_losses.append(loss)
    trainer.should_continue_training = lambda: trainer.step < (until or steps)
    with (
        mock.patch.object(adapter, "model_inputs", seen),
        mock.patch.object(validation.Validator, "validate", validated),
        mock.patch("time.sleep", lambda seconds: None),
    ):
        trainer.train()
    trainer.checkpointer.maybe_wait_for_saving()
    trainer.close()
    return found


def _config(folder: Path, train: Any, validate: Any, steps: int, micro_batches: int, more: Any) -> Any:
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.llama3 import config_registry

    config = config_registry.llama3_debugmodel()
    config.model_spec.model = _seeing(config.model_spec.model)
    validator = replace(config.validator, enable=validate is not None, freq=SAVE_EVERY, steps=-1)
    return replace(
        config,
        dataloader=train,
        validator=validator if validate is None else replace(validator, dataloader=validate),
        tokenizer=_no_tokenizer(),
        dump_folder=str(folder),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        activation_checkpoint=None,
        parallelism=replace(config.parallelism, spmd_backend="partial_dtensor"),
        training=replace(
            config.training,
            local_batch_size=1,
            global_batch_size=micro_batches,
            seq_len=SEQ_LEN,
            steps=steps,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        checkpoint=replace(config.checkpoint, enable=True, interval=SAVE_EVERY, **more),
        comm=replace(config.comm, trace_buf_size=0),
    )


def _seeing(model: Any) -> Any:
    """The debug model, one layer of it, with pictures' patches added where tokens keep their places."""
    from torchtitan.models.llama3.model import Llama3Model

    class SeeingLlama(Llama3Model):
        @dataclass(kw_only=True, slots=True)
        class Config(Llama3Model.Config):
            pass

        def forward(
            self,
            tokens: Any,
            positions: Any = None,
            attention_masks: Any = None,
            pixel_values: Any = None,
            grid_thw: Any = None,
        ) -> Any:
            def look(module: Any, arguments: Any, embedded: Any) -> Any:
                if pixel_values is None:
                    return embedded
                patches = torch.cat([own[: int(grid.prod())] for own, grid in zip(pixel_values, grid_thw, strict=True)])
                return embedded.index_put((tokens == PICTURE).nonzero(as_tuple=True), patches, accumulate=True)

            with self.tok_embeddings.register_forward_hook(look):
                return super().forward(tokens, positions, attention_masks)

    fields = {name: getattr(model, name) for name in model.__dataclass_fields__ if not name.startswith("_")}
    return SeeingLlama.Config(**fields | {"layers": model.layers[:1]})


def _no_tokenizer() -> Any:
    from torchtitan.components.tokenizer import BaseTokenizer

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any):
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return 2048

    return NoTokenizer.Config()
