"""Base classes of samples and batches of all modalities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Self, dataclass_transform

from energon_lite.errors import UsageError, field_of
from energon_lite.tensors import map_tensors, pad_stack

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

#: Plain, comparable key: ``("sample", leaf, index, epoch, attempt)`` or ``("batch", pass_number, number)``.
RestoreKey = tuple[Any, ...]


@dataclass_transform(kw_only_default=True)
def edataclass(cls: type[T]) -> type[T]:
    """Make a dataclass with keyword-only fields and with slots."""
    return dataclass(kw_only=True, slots=True)(cls)


# Neither frozen nor by keywords alone: either takes more time to make one, and there is one for every sample.
@dataclass(slots=True, unsafe_hash=True)
class SourceInfo:
    """Origin of a sample's bytes.

    Args:
        dataset_path: the prepared folder.
        index: position of the sample in the data set, counted over all of its shards.
        shard_name: the tar file, relative to the folder.
        file_names: the members of the tar that were read.
    """

    dataset_path: str
    index: int | str
    shard_name: str
    file_names: tuple[str, ...]


def add_source_info(sample: Any, *sources: SourceInfo) -> Any:
    """Append sources to the ``__sources__`` of a sample, if it has this field, and return the sample.

    Example:
        >>> add_source_info(sample, source) is sample
        True
    """
    if isinstance(sample, dict):
        sample["__sources__"] = (*(sample.get("__sources__") or ()), *sources)
    elif hasattr(sample, "__sources__"):
        sample.__sources__ = (*(sample.__sources__ or ()), *sources)
    return sample


class _Record:
    """Common methods of Sample and Batch: copying fields, and moving tensors."""

    __slots__ = ()

    @classmethod
    def extend(cls, source: Any, **fields: Any) -> Self:
        """Copy ``source``, an instance of a base class of this class, and add ``fields``.

        Raises:
            UsageError: ``source`` is not an instance of a base class.
        """
        if not is_dataclass(cls) or not issubclass(cls, type(source)):
            raise UsageError(
                f"{cls.__name__} does not extend {type(source).__name__}",
                fix=f"derive {cls.__name__} from {type(source).__name__} with @edataclass, or use derive_from",
            )
        kept = {f.name: getattr(source, f.name) for f in dataclasses.fields(source) if f.init}
        return cls(**(kept | fields))

    @property
    def __tags__(self) -> Any:
        """Energon 8's name of ``__subflavors__``."""
        return getattr(self, "__subflavors__")  # noqa: B009  # as below

    @__tags__.setter
    def __tags__(self, tags: Any) -> None:
        setattr(self, "__subflavors__", tags)  # noqa: B010  # a slot of the classes derived from this one

    def pin_memory(self) -> Self:
        """Return a copy with all tensors, nested ones included, in page-locked memory."""
        return map_tensors(lambda tensor: tensor.pin_memory(), self)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Return a copy with all tensors, nested ones included, on ``device``."""
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), self)


@edataclass
class Sample(_Record):
    """One element of a data set; base class of all modalities.

    Args:
        __key__: the sample's name in its data set (the common name of its tar members).
        __restore_key__: plain nested tuple from which the loader makes the same sample again.
        __subflavors__: labels from the YAML; those of the outer document take precedence.
        __sources__: the origin of the bytes.
    """

    __key__: str
    __restore_key__: RestoreKey
    __subflavors__: dict[str, Any] | None = None
    __sources__: tuple[SourceInfo, ...] | None = None

    @classmethod
    def derive_from(cls, base_sample: Sample, **fields: Any) -> Self:
        """Make a sample of this class with the base fields (key, restore key, ...) of ``base_sample``."""
        base = {name: getattr(base_sample, name) for name in BASE_FIELDS}
        return cls(**(base | fields))

    @classmethod
    def from_joined(cls, *samples: Sample | None, **named: Sample | None) -> Self:
        """Join several samples into one.

        Base fields are those of the first sample, other fields those of all, where later samples take precedence. Each
        sample that has a name becomes the field of this name, as a whole. Override this method to join samples in
        another way; YAML's ``join`` calls it (see the documentation of blends).
        """
        every = (*samples, *named.values())
        present = [sample for sample in every if sample is not None]
        if not every or every[0] is None:
            raise UsageError("the first of the joined samples must be there", fix="use nonmatch: skip or error")
        odd = next((sample for sample in present if not is_dataclass(sample)), None)
        if odd is not None:
            raise UsageError(
                f"{cls.__name__}.from_joined is given a {type(odd).__name__}, which has no fields",
                fix="override from_joined, or name a joiner function, for crude samples",
            )
        if named:
            unknown = named.keys() - {f.name for f in dataclasses.fields(cls)}
            if samples or unknown:
                raise UsageError(
                    f"{cls.__name__} has no fields {', '.join(sorted(unknown))} for the samples of these names",
                    fix="join a list of data sets instead of a mapping, or override from_joined",
                )
            return cls(**(_joined_base(present) | named))
        merged = {f.name: getattr(sample, f.name) for sample in present for f in own_fields(type(sample))}
        return cls(**(_joined_base(present) | merged))


_own_fields: dict[type[Any], tuple[dataclasses.Field[Any], ...]] = {}


def own_fields(cls: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a sample type or a batch type that its constructor takes, without the base fields."""
    if cls not in _own_fields:
        _own_fields[cls] = tuple(f for f in dataclasses.fields(cls) if f.init and f.name not in BASE_FIELDS)
    return _own_fields[cls]


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Return whether a field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _joined_base(samples: Sequence[Sample]) -> dict[str, Any]:
    """Base fields of the first sample, with the sources of all."""
    base = {name: getattr(samples[0], name) for name in BASE_FIELDS}
    base["__sources__"] = tuple(source for sample in samples for source in sample.__sources__ or ())
    return base


#: Collation of the fields of every Sample and every Batch.
BASE_COLLATIONS: dict[str, Callable[[list[Any]], Any]] = {
    "__key__": list,
    "__restore_key__": tuple,
    "__subflavors__": list,
    "__sources__": lambda values: tuple(chain.from_iterable(filter(None, values))),
}
#: Names of these fields.
BASE_FIELDS: tuple[str, ...] = tuple(BASE_COLLATIONS)


@edataclass
class Batch(_Record):
    """Several samples combined; base class of the batches of a task encoder.

    Args:
        __key__: the keys of its samples, in order.
        __restore_key__: ``("batch", pass_number, number)``; ``loader.restore_sample(key)`` makes the same batch again.
        __subflavors__: the subflavors of its samples, in order.
        __sources__: the sources of all of its samples.
    """

    __key__: list[str]
    __restore_key__: RestoreKey
    __subflavors__: list[dict[str, Any] | None] | None = None
    __sources__: tuple[SourceInfo, ...] | None = None

    @classmethod
    def derive_from(cls, base_batch: Batch, **fields: Any) -> Self:
        """Make a batch of this class with the base fields of ``base_batch``."""
        base = {name: getattr(base_batch, name) for name in BASE_FIELDS}
        return cls(**(base | fields))

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], **fields: Any) -> Self:
        """Make a batch of ``samples``.

        Base fields are collected. Each further field of the batch class that is not in ``fields`` is collated from the
        samples' field of that name: tensors are padded and stacked, other values become lists.

        Example:
            >>> @edataclass
            ... class TextBatch(Batch):
            ...     tokens: torch.Tensor  # [rows, longest]
            >>> TextBatch.from_samples(samples)
        """
        collated = {
            name: _stack([getattr(sample, name) for sample in samples])
            for name in (field.name for field in own_fields(cls))
            if name not in fields and samples and all(hasattr(sample, name) for sample in samples)
        }
        return cls(**(base_fields_of(samples) | collated | fields))


def _stack(values: list[Any]) -> Any:
    import torch

    return pad_stack(values) if isinstance(values[0], torch.Tensor) else values


def base_fields_of(samples: Iterable[Any]) -> dict[str, Any]:
    """Return the base fields of a batch of ``samples`` (instances of Sample, or dicts with the same entries)."""
    every = list(samples)
    return {name: collate([field_of(sample, name) for sample in every]) for name, collate in BASE_COLLATIONS.items()}


class CrudeSample(dict[str, Any]):
    """Sample in the form of its parts, as stored in the shard: ``{"jpg": ..., "json": ..., "__key__": ..., ...}``.

    A cooker (:func:`energon_lite.cooker`) or ``encode_sample`` converts it. ``__tags__`` returns its
    ``__subflavors__``.
    """

    def __missing__(self, key: str) -> Any:
        if key == "__tags__":
            return self["__subflavors__"]
        raise KeyError(key)


class SourceList(Sequence[SourceInfo]):
    """A sequence that equals the tuple of its :class:`SourceInfo`; as columns it is cheap to make and to send.

    Args:
        paths: path of the data set for each sample, or one path for all.
        indices: index of each sample in its data set.
        shards: name of each sample's shard.
        keys: key of each sample.
        names: names of the parts for each sample, or one tuple for all.

    Example:
        >>> sources = SourceList("/data", [7], ["s0.tar"], ["key"], ("jpg", "txt"))
        >>> sources[0].file_names
        ('key.jpg', 'key.txt')
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        indices: Sequence[int],
        shards: Sequence[str],
        keys: Sequence[str],
        names: tuple[str, ...] | list[tuple[str, ...]],
    ):
        self._columns = (paths, indices, shards, keys, names)

    @cached_property
    def _made(self) -> tuple[SourceInfo, ...]:
        paths, indices, shards, keys, names = self._columns
        path_of = repeat(paths, len(keys)) if isinstance(paths, str) else paths
        names_of = names if isinstance(names, list) else repeat(names, len(keys))
        return tuple(
            SourceInfo(
                dataset_path=path, index=index, shard_name=shard, file_names=tuple([f"{key}.{name}" for name in parts])
            )
            for path, index, shard, key, parts in zip(path_of, indices, shards, keys, names_of, strict=True)
        )

    def __len__(self) -> int:
        return len(self._columns[3])

    def __getitem__(self, place: Any) -> Any:
        return self._made[place]

    def __iter__(self) -> Iterator[SourceInfo]:
        return iter(self._made)

    def __add__(self, other: Sequence[SourceInfo]) -> tuple[SourceInfo, ...]:
        return self._made + tuple(other)

    def __radd__(self, other: Sequence[SourceInfo]) -> tuple[SourceInfo, ...]:
        return tuple(other) + self._made

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (tuple, SourceList)):
            return self._made == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._made)

    def __repr__(self) -> str:
        return repr(self._made)

    def __reduce__(self) -> tuple[Any, ...]:
        return SourceList, self._columns
