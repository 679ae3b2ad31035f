"""Wrappers that put items together: in batches of a number, of groups, in packs; and concatenation of batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from energon_lite.batching.plan import FixedPlan
from energon_lite.errors import UsageError
from energon_lite.extras.energon.wrappers import Parts, WrapperDataset, parts_of
from energon_lite.extras.energon.wrappers.datasets import BlendDataset
from energon_lite.extras.energon.wrappers.items_dataset import Branch, ItemFunction, ItemsDataset
from energon_lite.extras.energon.wrappers.streams import PlanStream
from energon_lite.hooks import TaskEncoder, hooks_of
from energon_lite.loading.assembly import assembled
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.loading.options import Chunks
from energon_lite.worker_config import WorkerConfig


class BatchDataset(WrapperDataset):
    """Batches of a number of items.

    Args:
        dataset: data set of single samples (``batch_size=None``), or another one whose items have numbers.
        batch_size: items in a batch; the last one of a pass may have fewer.
        batcher: ``(list of items) -> batch``; may raise SkipSample.
        batcher_stateless, batcher_config: accepted for Energon; every function is assumed to be stateless.
        drop_last: leave out a last batch that is not full.
        failure_tolerance: as in Energon.
        worker_config: that of the data set.
    """

    def __init__(
        self,
        dataset: SavableDataset,
        batch_size: int,
        batcher: Callable[[list[Any]], Any],
        *,
        batcher_stateless: bool = False,
        batcher_config: Any = None,
        drop_last: bool = False,
        failure_tolerance: int = 100,
        worker_config: WorkerConfig | None = None,
    ):
        function = ItemFunction(batcher, tolerance=failure_tolerance)
        super().__init__(
            dataset,
            worker_config=worker_config,
            text=f", {batch_size}, {function.name}" + (", drop_last" if drop_last else ""),
            batch_size=batch_size,
            batcher=function,
            leaves_out_last=drop_last,
        )

    batch_size: int
    batcher: ItemFunction
    leaves_out_last: bool

    @cached_property
    def resolved(self) -> ItemsDataset:
        inner = super().parts()
        return self.planned(inner, batch_size=self.batch_size, batcher=self.batcher, drop_last=self.leaves_out_last)

    def parts(self) -> Parts:
        batches, depends = self.resolved, super().parts().depends_on_ranks
        return Parts(PlanStream(batches.plan.count(0)), (Branch(batches),), depends_on_ranks=depends)


class MixBatchDataset(BatchDataset):
    """Batches of items of several data sets, mixed by weight: a :class:`BatchDataset` of a :class:`BlendDataset`.

    Args:
        dataset_weights: pairs ``(data set, weight)``.
        batch_size: items in a batch.
        batch_mix_fn: ``(list of items) -> batch``, such as :func:`~energon_lite.extras.energon.homogeneous_concat_mix`.
        worker_config: that of the data sets.
    """

    def __init__(
        self,
        *dataset_weights: tuple[SavableDataset, float],
        batch_size: int,
        batch_mix_fn: Callable[[list[Any]], Any] | None = None,
        worker_config: WorkerConfig | None = None,
    ):
        blend = BlendDataset(*dataset_weights, worker_config=worker_config)
        super().__init__(blend, batch_size, batch_mix_fn or as_list, worker_config=worker_config)


def as_list(items: list[Any]) -> list[Any]:
    """Return the list of items itself as the batch."""
    return items


def _with_hooks(inner: TaskEncoder, first: str, others: Mapping[str, Callable[..., Any]]) -> TaskEncoder:
    """Return a task encoder whose hook ``first`` calls the sample hooks of the inner data set, with other hooks."""
    taken = ("decoder", "cookers", "failure_tolerance", "padding", "cook_crude_sample")
    made = TaskEncoder[Any, Any, Any, Any]()
    vars(made).update({name: getattr(inner, name) for name in taken}, **{first: partial(_encoded, inner)}, **others)
    return made


def _encoded(inner: TaskEncoder, sample: Any) -> Any:
    for name in hooks_of(inner, packing=False, batched=False).sample:
        sample = getattr(inner, name)(sample)
    return sample


class _ByContent(WrapperDataset):
    """A data set of single samples, wrapped by hooks that make the batches content-decided."""

    first: str
    hooks: Mapping[str, Callable[..., Any]]
    batch_size: int | None
    packing: int | None
    drops_last: bool

    @cached_property
    def resolved(self) -> SavableDataset:
        inner, name = self.dataset.resolved, type(self).__name__
        plan = inner.plan
        if not isinstance(inner, PlannedDataset) or isinstance(inner, ItemsDataset) or not isinstance(plan, FixedPlan):
            raise UsageError(
                f"{name} of a {type(inner).__name__} that is not a data set of single samples",
                fix="give what get_train_dataset(..., batch_size=None) returned, or use the hooks of its task encoder",
            )
        if inner.batched:
            raise UsageError(f"{name} of a data set of batches", fix="give it batch_size=None")
        if inner.limit is not None or inner.loop_length:
            raise UsageError(
                f"{name} of a data set that counts single samples (limit or virtual_epoch_length)",
                fix=f"count batches: LimitDataset, or EpochizeDataset, of the {name}",
            )
        common = ("leaves", "weights", "worker_config", "repetitions", "stages")
        return assembled(
            plan.order,
            inner.identity,
            Chunks(),
            None,
            batch_size=self.batch_size,
            packing=self.packing,
            drop_last=self.drops_last,
            refill=inner.refill,
            task_encoder=_with_hooks(self.dataset.task_encoder, self.first, self.hooks),
            **{field: getattr(inner, field) for field in common},
        )

    def parts(self) -> Parts:
        return parts_of(self.resolved, type(self).__name__)


class GroupBatchDataset(_ByContent):
    """Batches of samples of one group each: ``batch_group_criterion`` around a data set of single samples.

    Args:
        dataset: data set from ``get_train_dataset`` or ``get_val_dataset`` with ``batch_size=None``.
        fixed_batch_size: batch size of all groups; None: ``sample_group_key`` gives it.
        sample_group_key: ``(sample) -> (key, batch size or None)``.
        batcher: ``(list of samples) -> batch``.
        drop_last: leave out batches that are not full.
        worker_config: that of the data set. The other arguments are Energon's.
    """

    def __init__(
        self,
        dataset: SavableDataset,
        fixed_batch_size: int | None,
        sample_group_key: Callable[[Any], tuple[Hashable, int | None]],
        batcher: Callable[[list[Any]], Any],
        *,
        batcher_stateless: bool = False,
        batcher_config: Any = None,
        drop_last: bool = False,
        failure_tolerance: int = 100,
        worker_config: WorkerConfig | None = None,
    ):
        super().__init__(
            dataset,
            worker_config=worker_config,
            first="encode_sample",
            hooks={"batch_group_criterion": sample_group_key, "batch": batcher},
            batch_size=fixed_batch_size,
            packing=None,
            drops_last=drop_last,
        )


class PackingDataset(_ByContent):
    """Packs of samples: packing hooks around a data set of single samples.

    Args:
        dataset: data set from ``get_train_dataset`` or ``get_val_dataset`` with ``batch_size=None``.
        buffer_size: samples in a buffer, which ``pre_packer`` gets.
        pre_packer: ``(list of samples) -> list of lists of them``.
        final_packer: ``(list of encoded samples) -> pack``.
        sample_encoder: function for the samples that were selected.
        worker_config: that of the data set. The other arguments are Energon's.
    """

    def __init__(
        self,
        dataset: SavableDataset,
        buffer_size: int,
        pre_packer: Callable[[list[Any]], list[list[Any]]],
        final_packer: Callable[[list[Any]], Any],
        *,
        final_packer_stateless: bool = False,
        sample_encoder: Callable[[Any], Any] | None = None,
        sample_encoder_stateless: bool = False,
        packer_config: Any = None,
        pre_packer_failure_tolerance: int = 100,
        final_packer_failure_tolerance: int = 100,
        sample_encoder_failure_tolerance: int = 100,
        worker_config: WorkerConfig | None = None,
    ):
        hooks = {"select_samples_to_pack": pre_packer, "pack_selected_samples": final_packer}
        hooks |= {} if sample_encoder is None else {"postencode_sample": sample_encoder}
        super().__init__(
            dataset,
            worker_config=worker_config,
            first="preencode_sample",
            hooks=hooks,
            batch_size=None,
            packing=buffer_size,
            drops_last=False,
        )


def concat_pad(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors along the first dimension; the other dimensions are padded with zeros to the largest size.

    Args:
        batch: tensors ``[rows, ...]`` of the same number of dimensions.

    Example:
        >>> concat_pad([torch.ones(1, 2), torch.ones(2, 1)])
        tensor([[1., 1.],
                [1., 0.],
                [1., 0.]])
    """
    sizes = [max(tensor.shape[axis] for tensor in batch) for axis in range(1, batch[0].dim())]
    made = batch[0].new_zeros((sum(len(tensor) for tensor in batch), *sizes))
    row = 0
    for tensor in batch:
        made[(slice(row, row + len(tensor)), *(slice(size) for size in tensor.shape[1:]))] = tensor
        row += len(tensor)
    return made


def generic_concat(batch: Sequence[Any]) -> Any:
    """Concatenate batches: tensors by :func:`concat_pad`; dicts, dataclasses and named tuples field by field; other
    values as a list of the values in the batches."""
    first = batch[0]
    if isinstance(first, torch.Tensor):
        return concat_pad(batch)
    if isinstance(first, dict):
        return {key: generic_concat([part[key] for part in batch]) for key in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(**{name: generic_concat([getattr(part, name) for part in batch]) for name in names})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(generic_concat(values) for values in zip(*batch, strict=True)))
    return batch


def homogeneous_concat_mix(samples: Sequence[Any]) -> Any:
    """Apply :func:`generic_concat` to batches of one type, for ``MixBatchDataset``.

    Raises:
        UsageError: the batches have different types.
    """
    kinds = {type(sample).__name__ for sample in samples}
    if len(kinds) > 1:
        raise UsageError(f"batches of different types: {', '.join(sorted(kinds))}", fix="give a batch_mix_fn of yours")
    return generic_concat(samples)
