"""A training loop in the shape of Megatron-LM's ``pretrain``, around the model, the process groups and the pipeline
schedules of the installed megatron-core, on CPU. Its data comes in as ``dataloader_type="external"`` does there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

LENGTH, VOCABULARY = 8, 32

Provider = Callable[..., tuple[Any, Any, Any]]


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis; ``vp``: chunks of the model on each pipeline rank."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    vp: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


@dataclass
class Arguments:
    """Those of Megatron-LM's ``args`` that data has to do with."""

    save: Path
    layout: Layout
    log: Path
    train_iters: int = 6
    micro_batch_size: int = 2
    global_batch_size: int = 12
    save_interval: int = 2
    eval_interval: int = 3
    eval_iters: int = 1
    dataloader_save: Path | None = None
    num_workers: int = 0
    die_at: int | None = None
    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0

    @property
    def micro_batches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.layout.dp)


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_cpu(layout: Layout) -> Iterator[Any]:
    """``parallel_state`` of a layout, in a process of its own, where what asks for a GPU gets the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
        with _OnCpu():
            if not dist.is_initialized():
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            virtual = layout.vp if layout.vp > 1 else None
            parallel_state.initialize_model_parallel(layout.tp, layout.pp, virtual, context_parallel_size=layout.cp)
            yield parallel_state


def make_model(groups: Any, layout: Layout) -> list[Any]:
    """The chunks of a GPT on this rank."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=layout.pp * layout.vp,
        hidden_size=16,
        num_attention_heads=2,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
        context_parallel_size=layout.cp,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
    )
    spec = get_gpt_layer_local_spec()
    if layout.cp > 1:  # attention over context-parallel ranks is Transformer Engine's, which needs a GPU
        spec.submodules.self_attention.submodules.core_attention = _Values
    chunks = []
    torch.manual_seed(5)
    for stage in range(layout.vp):
        ends = {"ignore_virtual": False, "vp_stage": stage if layout.vp > 1 else None}
        chunk = GPTModel(
            config,
            spec,
            VOCABULARY,
            LENGTH,
            pre_process=groups.is_pipeline_first_stage(**ends),
            post_process=groups.is_pipeline_last_stage(**ends),
            share_embeddings_and_output_weights=False,
            vp_stage=ends["vp_stage"],
        )
        chunks.append(chunk)
    return chunks


class _Values(torch.nn.Module):
    """In the place of attention: each token sees itself."""

    def __init__(self, **_: Any):
        super().__init__()

    def forward(self, query: Any, key: Any, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return value.flatten(2)


def pretrain(provider: Provider, args: Arguments) -> None:
    """Take batches to ``args.train_iters``, from the newest checkpoint in ``args.save``; nothing is learned of them."""
    with on_cpu(args.layout) as groups:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        chunks = make_model(groups, args.layout)
        _load(args)
        train, valid, _ = _data_iterators(provider, args, groups)
        do_valid = [valid is not None]
        dist.broadcast_object_list(do_valid, src=0)  # ranks without data take part
        run = get_forward_backward_func()

        def schedule(iterator: Any, kind: str) -> None:
            run(
                forward_step_func=lambda own, chunk: forward_step(own, chunk, groups, args, kind),
                data_iterator=iterator,
                model=chunks if args.layout.vp > 1 else chunks[0],
                num_microbatches=args.micro_batches,
                seq_length=LENGTH,
                micro_batch_size=args.micro_batch_size,
                forward_only=kind != "train",
            )

        while args.iteration < args.train_iters:
            if args.iteration == args.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            schedule(train, "train")
            args.iteration += 1
            args.consumed_train_samples += args.global_batch_size
            if args.iteration % args.eval_interval == 0 and do_valid[0]:
                for _ in range(args.eval_iters):
                    with torch.no_grad():
                        schedule(valid, "valid")
                    args.consumed_valid_samples += args.global_batch_size
            if args.iteration % args.save_interval == 0:
                _save(args, groups, train)


def forward_step(iterator: Any, chunk: Any, groups: Any, args: Arguments, kind: str) -> tuple[Any, Any]:
    batch = get_batch(iterator, chunk, groups, args, kind)
    part = slice(0, LENGTH // args.layout.cp)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None, part, part]
    output = chunk(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


def get_batch(iterator: Any, chunk: Any, groups: Any, args: Arguments, kind: str) -> dict[str, Any]:
    """The first rank of a tensor-parallel group takes a batch; the stages in the middle take none."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    if not (chunk.pre_process or chunk.post_process):
        return dict.fromkeys(["tokens", "position_ids", "labels"])
    data = [next(iterator) if groups.get_tensor_model_parallel_rank() == 0 else None]
    if args.layout.tp > 1:
        group = groups.get_tensor_model_parallel_group()
        dist.broadcast_object_list(data, src=groups.get_tensor_model_parallel_src_rank(), group=group)
    batch = data[0]
    place = {"tp": groups.get_tensor_model_parallel_rank(), "dp": groups.get_data_parallel_rank()}
    place |= {"pp": 0 if chunk.pre_process else 1, "cp": groups.get_context_parallel_rank()}
    with open(args.log / f"{dist.get_rank()}.jsonl", "a") as file:
        file.write(json.dumps({"kind": kind, "iteration": args.iteration, **place, "keys": batch["__key__"]}) + "\n")
    wanted = {name: batch[name] for name in ("tokens", "labels", "position_ids") if batch.get(name) is not None}
    return {"tokens": None, "position_ids": None, "labels": None} | get_batch_on_this_cp_rank(wanted)


# -- data and checkpoints, as Megatron-LM has them --------------------------------------------------------------------


def _data_iterators(provider: Provider, args: Arguments, groups: Any) -> tuple[Any, Any, Any]:
    from megatron.core.rerun_state_machine import RerunDataIterator

    def built(**stage: int) -> list[Any]:
        is_distributed = getattr(provider, "is_distributed", False)
        if not is_distributed and groups.get_tensor_model_parallel_rank() > 0:
            return [None, None, None]
        samples = args.train_iters * args.global_batch_size
        return [None if one is None else RerunDataIterator(one) for one in provider((samples, 0, 0), **stage)]

    if args.layout.vp == 1:
        train, valid, test = built()
        return train, valid, test
    by_stage = [built(vp_stage=stage) for stage in range(args.layout.vp)]
    train, valid, test = ([one[kind] for one in by_stage] for kind in range(3))
    return train, valid, test


def _folder(args: Arguments, root: Path) -> Path:
    return root / f"iter_{args.iteration:07d}"


def _save(args: Arguments, groups: Any, train: Any) -> None:
    _save_dataloader_state(args, groups, train)
    folder = _folder(args, args.save)
    folder.mkdir(parents=True, exist_ok=True)
    counts = {name: getattr(args, name) for name in ("iteration", "consumed_train_samples", "consumed_valid_samples")}
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "common.json").write_text(json.dumps(counts))
        (args.save / "latest_checkpointed_iteration.txt").write_text(str(args.iteration))
    dist.barrier()


def _save_dataloader_state(args: Arguments, groups: Any, train: Any) -> None:
    if train is None or args.dataloader_save is None:
        return
    if groups.get_pipeline_model_parallel_rank() or groups.get_tensor_model_parallel_rank():
        return
    state = train.iterable.save_state()
    rank = groups.get_data_parallel_rank()
    stage = "_000" if args.layout.pp > 1 else ""
    path = _folder(args, args.dataloader_save) / f"mp_rank_00{stage}" / f"train_dataloader_dprank{rank:03d}.pt"
    dist.barrier(group=groups.get_data_parallel_group())
    path.parent.mkdir(parents=True, exist_ok=True)
    dist.barrier(group=groups.get_data_parallel_group())
    torch.save({"dataloader_state_dict": state}, path)


def _load(args: Arguments) -> None:
    """The counts of the newest checkpoint."""
    tracker = args.save / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return
    args.iteration = int(tracker.read_text())
    vars(args).update(json.loads((_folder(args, args.save) / "common.json").read_text()))


def seen(log: Path) -> list[SimpleNamespace]:
    """What every rank took from its iterators, in its order."""
    files = sorted(log.glob("*.jsonl"))
    return [SimpleNamespace(**json.loads(line)) for file in files for line in file.read_text().splitlines()]
