"""torchtitan: a savable loader as the data loader of its ``Trainer`` and of its ``Validator`` (torchtitan 0.3).

:func:`data_loader` makes the configuration for torchtitan. :class:`TitanLoader` is the loader with torchtitan's
interface, and works without torchtitan. Its state is one entry of a checkpoint, equal on all ranks, and loads on any
number of them; order and distribution to ranks are the loader's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import torch
import torch.nn.functional as F

from energon_lite import SavableDataLoader, WorkerConfig
from energon_lite.batching import PackedBatch, PaddedBatch
from energon_lite.errors import UsageError
from energon_lite.extras.frameworks.trainer_loader import common_state
from energon_lite.tensors import fields_of

__all__ = ["IGNORED", "LoaderRequest", "MakeLoader", "TitanLoader", "data_loader", "model_inputs"]

#: The label that torchtitan's losses ignore.
IGNORED = -100

_THEIR_NAMES = {"tokens": "input", "position_ids": "positions"}


def model_inputs(batch: Any, seq_len: int | None = None) -> tuple[dict[str, Any], torch.Tensor]:
    """Return ``input`` and the other inputs of the model, and the labels.

    For results of :func:`~energon_lite.pack_sequences` and :func:`~energon_lite.pad_sequences`, these are the tokens,
    ``positions`` that restart in each document, and all ``media`` by name. For other batches: ``tokens`` (or
    ``input``), ``position_ids`` (or ``positions``), and every further field that is not None and does not begin with
    ``__``. Labels with a ``loss_mask`` of 0 do not count. A batch without samples becomes a row without counted labels,
    so that its rank can take part in the step.

    Args:
        batch: a mapping, or a dataclass such as :class:`~energon_lite.Batch`; rows are ``[rows, length]``.
        seq_len: length to pad rows to; None for no padding.

    Raises:
        UsageError: there are no tokens or labels, rows are longer than ``seq_len``, or a loss mask is not 0 or 1.

    Example:
        >>> inputs, labels = model_inputs(pack_sequences(samples, pad=0), seq_len=2048)
        >>> sorted(inputs), inputs["input"].shape
        (['input', 'positions'], torch.Size([1, 2048]))
    """
    inputs, without_samples = _named(batch)
    labels, mask = inputs.pop("labels"), inputs.pop("loss_mask", None)
    if without_samples or labels.numel() == 0:
        return _blank(inputs, seq_len or max(labels.shape[-1], 1))
    if mask is not None:
        if bool(((mask != 0) & (mask != 1)).any()):
            what = "a loss_mask between 0 and 1, but for torchtitan's losses a label counts, or it does not"
            raise UsageError(what, fix="give a loss_mask of 0 and 1")
        labels = labels.masked_fill(mask == 0, IGNORED)
    return (inputs, labels) if seq_len is None else _filled(inputs, labels, seq_len)


class _Constants(dict[str, Any]):
    """An input other than a tensor, such as the ids of special tokens. The validator calls ``to`` on every input."""

    def to(self, *_: Any, **__: Any) -> _Constants:
        return self


def _named(batch: Any) -> tuple[dict[str, Any], bool]:
    """Return the fields of a batch by torchtitan's names, and whether it has no samples."""
    fields = dict(batch) if isinstance(batch, Mapping) else fields_of(batch) or {}
    keys = fields.get("__key__")
    if isinstance(batch, PackedBatch | PaddedBatch):
        rows = {name: fields[name] for name in ("tokens", "labels", "position_ids", "loss_mask")}
        fields = rows | {name: _stacked(items) for name, items in batch.media.items()}
    inputs = {
        _THEIR_NAMES.get(name, name): _Constants(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not None and not name.startswith("__")
    }
    if not {"input", "labels"} <= inputs.keys():
        present = ", ".join(fields) or "no fields"
        what = f"torchtitan trains on tokens and labels; this batch, a {type(batch).__name__}, has {present}"
        fix = "return what pack_sequences or pad_sequences makes from batch, or a dict of tokens and labels"
        raise UsageError(what, fix=f"{fix} from encode_batch")
    return inputs, isinstance(keys, list | tuple) and not keys


def _stacked(items: torch.Tensor | list[torch.Tensor]) -> Any:
    """Stack items into one tensor, padded if they differ only in their first dimension, as patches of images do."""
    if isinstance(items, torch.Tensor) or len({item.shape[1:] for item in items}) != 1:
        return items
    return torch.nn.utils.rnn.pad_sequence(items, batch_first=True)


def _blank(inputs: Mapping[str, Any], length: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Make a row without counted labels, with the inputs that belong to no sample."""
    row = {"input": torch.zeros(1, length, dtype=torch.int64)}
    if "positions" in inputs:
        row["positions"] = torch.arange(length)[None]
    constants = {name: value for name, value in inputs.items() if isinstance(value, _Constants)}
    return row | constants, torch.full((1, length), IGNORED)


def _filled(inputs: dict[str, Any], labels: torch.Tensor, seq_len: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Pad rows to a length, for kernels and CUDA graphs. Padding is a document of its own."""
    rows, length = labels.shape
    if length > seq_len:
        fix = "set training.seq_len to the capacity of a pack, or cut samples in encode_sample"
        raise UsageError(f"a row of {length} tokens, and training.seq_len is {seq_len}", fix=fix)
    room = seq_len - length
    inputs["input"] = F.pad(inputs["input"], (0, room))
    if "positions" in inputs:
        inputs["positions"] = torch.cat([inputs["positions"], torch.arange(room).expand(rows, room)], dim=1)
    return inputs, F.pad(labels, (0, room), value=IGNORED)


@dataclass(frozen=True, kw_only=True)
class LoaderRequest:
    """Properties that torchtitan requests of a data loader.

    Args:
        worker_config: this rank among the data-parallel ranks, with the workers and the seed of the configuration.
        dataset_path: path from the configuration; torchtitan's command line may have changed it.
        infinite: True to restart data that ends. A validator with ``steps=-1`` needs an end.
        seq_len: tokens of a row, ``training.seq_len``.
        local_batch_size: rows of a micro-batch, ``training.local_batch_size``.
        tokenizer: the trainer's.
        others: further requested properties, by name.
    """

    worker_config: WorkerConfig
    dataset_path: str | None = None
    infinite: bool = True
    seq_len: int | None = None
    local_batch_size: int = 1
    tokenizer: Any = None
    others: Mapping[str, Any] = field(default_factory=dict)


MakeLoader: TypeAlias = Callable[[LoaderRequest], SavableDataLoader]


class TitanLoader:
    """A savable loader with torchtitan's protocol: ``iter``, ``state_dict``, ``load_state_dict``.

    Args:
        make: maker of the loader; its batches are arguments of :func:`model_inputs`.
        request: requested properties.

    Raises:
        UsageError: ``make`` did not return a savable loader.
    """

    def __init__(self, make: MakeLoader, request: LoaderRequest):
        self.request = request
        self.loader = make(request)
        if not isinstance(self.loader, SavableDataLoader):
            what = f"{getattr(make, '__qualname__', make)} returned a {type(self.loader).__name__}"
            raise UsageError(what, fix="return get_savable_loader(dataset)")

    def __iter__(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        # torchtitan does not close data loaders: the workers stop when the loop ends, or is dropped.
        try:
            empty_passes = 0
            while empty_passes < 2:  # a pass restored at its end is empty
                empty_passes += 1
                for batch in self.loader:
                    empty_passes = 0
                    yield model_inputs(batch, self.request.seq_len)
                if not self.request.infinite:
                    return
            raise UsageError("the data has no batch to begin again with", fix="let it end: infinite=False")
        finally:
            self.loader.close()

    def state_dict(self) -> dict[str, str]:
        """Return the state as text, because checkpoints load into the entries they were saved from, and states vary.

        For content-decided batches, it is a collective of all ranks: each knows only its own lanes.
        """
        return {"state": json.dumps(common_state(self.loader))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state, on any number of ranks. An empty state changes nothing.

        Raises:
            StateError, StateMismatchError: see :meth:`SavableDataLoader.restore_state_rank`.
        """
        if state_dict:
            self.loader.load_state_dict(json.loads(state_dict["state"]))


def data_loader(
    make: MakeLoader, *, dataset_path: str | None = None, num_workers: int = 2, seed: int = 0, infinite: bool = True
) -> Any:
    """Return the configuration of a data loader, for ``Trainer.Config.dataloader`` and that of the validator.

    Its fields are options of torchtitan's command line: ``--dataloader.num_workers 8``.

    Args:
        make: maker of the loader; called on each rank, and for the validator at each validation.
        dataset_path: path that ``make`` finds in its request.
        num_workers: worker processes of each rank.
        seed: seed of the run: the ``seed_offset`` of the worker config.
        infinite: True to restart when the data ends. The validator overrides it.

    Raises:
        UsageError: torchtitan, or a package that it requires, is not installed.

    Example:
        >>> config.dataloader = data_loader(make_train_loader, dataset_path="blend.yaml", num_workers=4)
    """
    try:
        config = _component().Config
    except ModuleNotFoundError as error:
        raise UsageError(f"there is no {error.name}", fix="pip install 'energon-lite[torchtitan]'") from error
    return config(make=make, dataset_path=dataset_path, num_workers=num_workers, seed=seed, infinite=infinite)


@functools.cache
def _component() -> Any:
    """Return :class:`TitanLoader` as a component of torchtitan, with a configuration that builds it."""
    import tyro
    from torchtitan.components.dataloader import BaseDataLoader

    make = Annotated[Callable[..., Any], tyro.conf.Suppress]  # a function cannot be a command line option
    fields: Any = [("make", make), ("num_workers", int), ("seed", int), ("infinite", bool)]
    base: Any = BaseDataLoader.Config
    config = dataclasses.make_dataclass("Config", fields, bases=(base,), kw_only=True, slots=True)

    def build(self: Any, config: Any, *, dp_rank: int = 0, dp_world_size: int = 1, **asked: Any) -> None:
        workers = {"num_workers": config.num_workers, "seed_offset": config.seed}
        place = WorkerConfig(rank=dp_rank, world_size=dp_world_size, **workers)
        known = {name: asked.pop(name) for name in ("seq_len", "local_batch_size", "tokenizer") if name in asked}
        chosen = {"dataset_path": config.dataset_path, "infinite": config.infinite, "others": asked}
        TitanLoader.__init__(self, config.make, LoaderRequest(worker_config=place, **known, **chosen))

    return type("EnergonLiteDataLoader", (TitanLoader, BaseDataLoader), {"Config": config, "__init__": build})
