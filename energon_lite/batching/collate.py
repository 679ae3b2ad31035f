"""Default collation of encoded samples, for task encoders without a ``batch`` hook."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch

from energon_lite.errors import FatalSampleError, UnlikeError, UsageError, field_of, listed
from energon_lite.samples import Batch
from energon_lite.samples.sample import BASE_COLLATIONS, own_fields
from energon_lite.tensors import fields_of, pad_stack

logger = logging.getLogger(__name__)
#: Names of the task encoders whose empty batches were warned of.
_warned: set[str] = set()

#: Treatment of tensors of one field whose shapes differ. None: an error. A number: each dimension is padded with it, at
#: its end, to the largest of the batch. ``"list"``: the tensors stay as they are, in a list, and so do samples of
#: different types or entries. A mapping gives the treatment of single fields; fields that it does not name must match.
Padding = None | float | Literal["list"] | Mapping[str, float | Literal["list"]]

#: Types that always become a list; tested first because they are common and the test is cheap.
_SCALARS = frozenset({bytes, str, int, float, bool, type(None)})


def check_padding(padding: Any) -> None:
    """Refuse a value that is not a :data:`Padding`.

    Raises:
        UsageError: the value is none; the message shows it.
    """
    values = padding.values() if isinstance(padding, Mapping) else [padding]
    for value in values:
        if isinstance(value, bool) or not (value is None or value == "list" or isinstance(value, (int, float))):
            raise UsageError(
                f"padding is {padding!r}", fix='give a number, "list", a dict of these by field, or None for an error'
            )


def batch_stack(batch: Sequence[Any]) -> torch.Tensor:
    """Stack tensors (or numbers) of equal shape: n x ``[...]`` -> ``[n, ...]``."""
    return torch.stack([torch.as_tensor(value) for value in batch])


def batch_pad_stack(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors of equal rank, each dimension padded at its end with zeros to the largest of the batch.

    Example:
        >>> batch_pad_stack([torch.ones(2), torch.ones(3)])
        tensor([[1., 1., 0.],
                [1., 1., 1.]])
    """
    return pad_stack(batch)


def batch_list(batch: Sequence[Any]) -> list[Any]:
    """Keep the values as a list."""
    return list(batch)


def generic_batch(values: Sequence[Any], padding: Padding = None) -> Any:
    """Collate values by their type.

    Tensors of one shape are stacked. Dicts, dataclasses and named tuples are collated field by field into one of the
    same type (a dataclass with ``from_samples`` makes its own batch). Everything else becomes a list.

    Args:
        values: encoded samples of one type, at least one.
        padding: treatment of the tensors of a field whose shapes differ; see :data:`Padding`.

    Raises:
        UnlikeError: samples, or the values of one of their fields, do not match. Names samples, field, shapes.

    Example:
        >>> generic_batch([{"x": torch.ones(2)}, {"x": torch.ones(3)}], padding=0)
        {'x': tensor([[1., 1., 0.],
                [1., 1., 1.]])}
    """
    try:
        return _collate(values, padding, ())
    except _Unlike as unlike:
        raise unlike.error(values) from None


def batch_from_samples(cls: Any, samples: Sequence[Any], padding: Padding = None) -> Any:
    """Return ``cls.from_samples(samples)``, with tensors collated as in :func:`generic_batch`.

    Raises:
        FatalSampleError: as :func:`generic_batch`.
    """
    if getattr(cls.from_samples, "__func__", None) is not Batch.from_samples.__func__:  # type: ignore[attr-defined]
        return cls.from_samples(samples)  # the class overrides it
    fields: dict[str, Any] = {}
    try:
        for name in (field.name for field in own_fields(cls)):
            column = [getattr(sample, name) for sample in samples if hasattr(sample, name)]
            if len(column) == len(samples) and any(isinstance(value, torch.Tensor) for value in column):
                fields[name] = _collate(column, padding, (name,))
    except _Unlike as unlike:
        raise unlike.error(samples) from None
    return cls.from_samples(samples, **fields)


def collate_entry(name: str, values: list[Any], padding: Padding = None, path: tuple[str, ...] = ()) -> Any:
    """One field of a batch, collated from its samples' values as by :func:`generic_batch`.

    Args:
        path: names of the enclosing fields, outermost first.
    """
    of_base = BASE_COLLATIONS.get(name)
    return of_base(values) if of_base else _collate(values, padding, (*path, name))


def _collate(values: Sequence[Any], padding: Padding, path: tuple[str, ...]) -> Any:
    kinds = set(map(type, values))
    if kinds <= _SCALARS:
        return list(values)
    own: Any = padding.get(path[0] if path else "") if isinstance(padding, Mapping) else padding
    first = values[0]
    if isinstance(first, torch.Tensor) and all(isinstance(value, torch.Tensor) for value in values):
        if all(value.shape == first.shape and value.dtype == first.dtype for value in values):
            return torch.stack(list(values))
        if own == "list":
            return list(values)
        if own is None or any(value.dim() != first.dim() or value.dtype != first.dtype for value in values):
            raise _Unlike(path, can_pad=True)
        return pad_stack(values, own)
    if not any(map(_is_structured, values)):
        return list(values)
    if len(kinds) > 1 or (isinstance(first, dict) and any(value.keys() != first.keys() for value in values)):
        if own == "list":
            return list(values)
        raise _Unlike(path)
    if isinstance(first, dict):
        return {key: collate_entry(key, [value[key] for value in values], padding, path) for key in first}
    kind: Any = type(first)
    if dataclasses.is_dataclass(first):
        if hasattr(first, "from_samples"):
            return batch_from_samples(kind, values, padding)
        names = [field.name for field in dataclasses.fields(first) if field.init]
        columns = {name: list(map(attrgetter(name), values)) for name in names}
        return kind(**{name: collate_entry(name, column, padding, path) for name, column in columns.items()})
    entries = zip(kind._fields, zip(*values, strict=True), strict=True)
    return kind(*(_collate(column, padding, (*path, name)) for name, column in entries))


def _is_structured(value: Any) -> bool:
    """True for tensors, dicts, named tuples and dataclass instances; all other values go into a list."""
    if isinstance(value, (torch.Tensor, dict)):
        return True
    if isinstance(value, tuple):
        return hasattr(value, "_fields")
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


class _Unlike(Exception):
    """Values that cannot be collated.

    Args:
        path: names of the fields that hold them, outermost first; empty: the samples themselves.
        can_pad: True if they are tensors.
    """

    def __init__(self, path: tuple[str, ...], *, can_pad: bool = False):
        self.path = path
        self.can_pad = can_pad

    def error(self, samples: Sequence[Any]) -> UnlikeError:
        """The error for the user, with the kinds of values and the samples that have them."""
        values = list(samples)
        for name in self.path:
            values = [value[name] if isinstance(value, dict) else getattr(value, name) for value in values]
        keys = [field_of(sample, "__key__") for sample in samples]
        names_by_look: dict[str, list[str]] = {}
        for number, (key, value) in enumerate(zip(keys, values, strict=True)):
            names_by_look.setdefault(_looks(value, values), []).append(f"sample {number}" if key is None else str(key))
        seen = [f"{looks}: {listed(names, _SHOWN)}" for looks, names in names_by_look.items()]
        more = f"; and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
        what, fix = self._mistake(samples, values)
        sources = [source for sample in samples for source in field_of(sample, "__sources__") or ()]
        where = ", ".join(dict.fromkeys(source.dataset_path for source in sources)) or None
        error = UnlikeError(f"{what}: {'; '.join(seen[:_SHOWN])}{more}", where=where, fix=fix)
        error.is_named = None not in keys
        return error

    def _mistake(self, samples: Sequence[Any], values: Sequence[Any]) -> tuple[str, str]:
        """The two parts of the message: the mistake, and the fix."""
        if not self.path and len(set(map(type, samples))) > 1:
            return f"one batch has samples of {len(set(map(type, samples)))} types", _MAKE_ONE_TYPE
        whose = f"the {'.'.join(self.path)!r} of the samples of one batch" if self.path else "the samples of one batch"
        kept = f'{{"{self.path[0]}": "list"}}' if self.path else '"list"'
        own = f"keep them in a list: padding = {kept} in the task encoder; or write a `batch` of your own"
        if not self.can_pad:
            if all(isinstance(value, dict) for value in values):
                every = "have the same entries in every sample (an empty tensor where there is nothing)"
                return f"{whose} have unequal entries", f"{every}, in encode_sample; or {own}"
            return f"{whose} are of unequal types", f"make one type of them in encode_sample, None included; or {own}"
        if len({value.dim() for value in values}) > 1:
            return (
                f"{whose} have unequal numbers of dimensions",
                f"bring them to one number of dimensions in encode_sample (unsqueeze, expand); or {own}",
            )
        if len({value.dtype for value in values}) > 1:
            return f"{whose} have unequal types of numbers", f"convert them in encode_sample (tensor.to(...)); or {own}"
        padding = f'padding = {{"{self.path[0]}": 0}}' if self.path else "padding = 0"
        return (
            f"{whose} have unequal sizes",
            f"cut, resize or pad them to one size in encode_sample; or have the task encoder pad the ends, with 0 or "
            f"another number: {padding}; or {own}",
        )


#: Largest number of kinds of values in a message, and of samples of each kind.
_SHOWN = 4
_MAKE_ONE_TYPE = (
    "make one type of them, in encode_sample or with cookers; or keep them apart: batch_group_criterion, returning "
    '(type(sample).__name__, None); or in a list: padding = "list" in the task encoder'
)


def _looks(value: Any, others: Sequence[Any]) -> str:
    """Short description of a value, with the property that distinguishes it from the others."""
    if isinstance(value, torch.Tensor):
        dtypes = {other.dtype for other in others if isinstance(other, torch.Tensor)}
        dtype = f", {value.dtype}" if len(dtypes) > 1 else ""
        return f"shape {list(value.shape)}{dtype}"
    if isinstance(value, dict) and all(isinstance(other, dict) for other in others):
        return f"entries {', '.join(map(str, value))}"
    return type(value).__name__


def empty_like(batch: Any, rows: int) -> Any:
    """Return ``batch``, which holds ``rows`` samples, without any of its rows.

    Tensors and arrays whose first dimension is ``rows``, and lists (or tuples) of that length lose all their rows;
    everything else stays. A task encoder whose batches have another form overrides ``TaskEncoder.empty_batch``.
    """
    return with_rows(batch, rows, [])


def with_rows(batch: Any, rows: int, places: list[int]) -> Any:
    """Return ``batch``, which holds ``rows`` samples, with those at some places, in that order.

    Tensors and arrays whose first dimension is ``rows``, and lists (or tuples) of that length are changed; everything
    else stays.
    """
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch[places] if batch.ndim and batch.shape[0] == rows else batch
    if isinstance(batch, dict):
        return {key: with_rows(value, rows, places) for key, value in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        changed = {name: with_rows(getattr(batch, name), rows, places) for name in names}
        if "__sources__" in changed and not places:
            changed["__sources__"] = ()
        return dataclasses.replace(batch, **changed)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(with_rows(value, rows, places) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)([batch[place] for place in places]) if len(batch) == rows else batch
    return batch


def rows_like(like: Any, rows: int, where: str, fix: str | None = None) -> int:
    """Return the length of the tensors and lists of a batch that belong to its samples.

    Args:
        like: the batch.
        rows: number of its samples.
        where: name of the task encoder, for messages.
        fix: advice for the message; None: to write ``empty_batch``.

    Raises:
        FatalSampleError: it is not clear which parts of the batch belong to its samples.
    """
    if rows not in _sizes(like):
        rows = rows_of(like, 0)
    fix = fix or "write empty_batch(self, like, rows) in the task encoder: the batch `like` without its samples"
    if not rows:
        raise FatalSampleError(
            f"a rank has no samples left, and an empty batch cannot be made: this {type(like).__name__} "
            "has no tensors or lists of one and the same length",
            where=where,
            fix=fix,
        )
    if where not in _warned and (others := sorted(set(_sizes(empty_like(like, rows))) - {0})):
        _warned.add(where)
        logger.warning(
            "%s: a batch without samples keeps its tensors and lists of length %s; only those of length %d are cut. "
            "If the others hold samples, these count twice: %s",
            *(where, listed(others), rows, fix),
        )
    return rows


def rows_of(batch: Any, otherwise: int) -> int:
    """Return the number of samples in a batch, from the batch alone: the length of ``__key__``, or else the common
    first dimension of all its tensors and lists; ``otherwise`` if there is none."""
    keys = batch.get("__key__") if isinstance(batch, dict) else getattr(batch, "__key__", None)
    if isinstance(keys, (list, tuple)):
        return len(keys)
    sizes = set(_sizes(batch))
    return sizes.pop() if len(sizes) == 1 else otherwise


def tokens_of(batch: Any) -> int:
    """Return the ``num_tokens`` of a batch, summed if there are several; 0 if it has none."""
    tokens = batch.get("num_tokens") if isinstance(batch, dict) else getattr(batch, "num_tokens", None)
    if tokens is None:  # the usual case; an exception would take a microsecond
        return 0
    if isinstance(tokens, torch.Tensor):
        return int(tokens.sum())
    if isinstance(tokens, (list, tuple)):
        return sum(map(int, tokens))
    try:
        return int(tokens)
    except (TypeError, ValueError):
        return 0  # a field of the user's that happens to have this name


def _sizes(value: Any) -> Iterator[int]:
    """Yield the first dimensions of the tensors and lists in a batch."""
    fields = fields_of(value)
    if fields is not None:
        for part in fields.values():
            yield from _sizes(part)
    elif shape := getattr(value, "shape", None):
        yield int(shape[0])
    elif isinstance(value, (list, tuple)):
        yield len(value)
