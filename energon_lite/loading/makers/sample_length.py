"""Length of an encoded sample, and full packs of samples by their lengths.

The length is taken from the first of these that exists: the field that the user names; the task encoder's own
``sample_length(encoded)``; the first existing field of :data:`LENGTH_FIELDS`; the sample itself, if it is a tensor or a
list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from energon_lite.batching.best_fit_decreasing import full_packs
from energon_lite.errors import FatalSampleError, at_least_one, did_you_mean, field_of
from energon_lite.hooks import PackedSamplesOutput, TaskEncoder, is_overridden
from energon_lite.loading.makers.outcomes import Address
from energon_lite.tensors import fields_of
from energon_lite.worker_config import whole_numbers

#: Fields that are taken for the tokens of a sample by default.
LENGTH_FIELDS = ("tokens", "input_ids", "token_ids", "text_tokens")


@dataclass(frozen=True)
class SampleLength:
    """A function from an encoded sample to its length.

    The length of a tensor or array is its first dimension; of a list, tuple, bytes or string its ``len``; of a whole
    number its value.

    Args:
        encoder: task encoder of the samples; its ``sample_length``, if any, takes precedence over all but ``field``.
        field: the field of a sample (a key, or an attribute) that has the length; None: see the module's docstring.

    Raises:
        FatalSampleError: when called with a sample that has no length by these rules.

    Example:
        >>> SampleLength(TaskEncoder())({"tokens": [5, 6, 7], "image": picture})
        3
    """

    encoder: TaskEncoder
    field: str | None = None

    def __str__(self) -> str:
        if self.field is not None:
            return f"field {self.field}"
        return "sample_length" if hasattr(self.encoder, "sample_length") else "the sample's tokens"

    def __call__(self, encoded: Any) -> int:
        own = getattr(self.encoder, "sample_length", None)
        if self.field is None and own is not None:
            return self._checked(own(encoded), f"{type(self.encoder).__name__}.sample_length returned")
        fields = _fields(encoded)
        wanted = LENGTH_FIELDS if self.field is None else (self.field,)
        name = next((name for name in wanted if name in fields), None)
        if name is not None:
            length = _length(fields[name])
            if length is None:
                raise self._none(
                    f"the field {name!r} of an encoded sample has no length: {_kind(fields[name])}", fields
                )
            return self._checked(length, f"the field {name!r} is")
        length = None if self.field is not None or isinstance(encoded, (str, bytes)) else _length(encoded)
        if length is None:
            what = "none of the fields " + ", ".join(wanted) if self.field is None else f"no field {self.field!r}"
            raise self._none(f"an encoded sample has {what}", fields)
        return self._checked(length, "an encoded sample is")

    def _checked(self, length: Any, what: str) -> int:
        value = _whole(length)
        if value is None or value < 0:
            raise FatalSampleError(
                f"{what} {length!r}, which is not a length",
                where=type(self.encoder).__name__,
                fix="a length is a whole number, at least 0",
            )
        return value

    def _none(self, what: str, fields: Mapping[str, Any]) -> FatalSampleError:
        own = {name: value for name, value in fields.items() if not name.startswith("__")}
        there = ", ".join(f"{name} ({_kind(value)})" for name, value in own.items())
        fix = (
            "name the field with --length-field (in Python length_field=), or define sample_length(self, encoded) -> "
            "int in the task encoder"
        )
        return FatalSampleError(
            f"{what}; it has {there or 'no fields'}",
            where=type(self.encoder).__name__,
            fix=fix if self.field is None else did_you_mean(self.field, fields, fix, always=True),
        )


def _fields(value: Any) -> dict[str, Any]:
    own = value if isinstance(value, Mapping) else fields_of(value)
    if own is not None:
        return {str(name): item for name, item in own.items()}
    return dict(vars(value)) if hasattr(value, "__dict__") and not hasattr(value, "shape") else {}


def _whole(value: Any) -> int | None:
    """Return a whole number, also one in a numpy or torch scalar, as an int; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if getattr(value, "shape", None) == () and not getattr(value, "is_floating_point", lambda: False)():
        item = value.item()
        return item if isinstance(item, int) and not isinstance(item, bool) else None
    return None


def _length(value: Any) -> int | None:
    whole = _whole(value)
    if whole is not None:
        return whole
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    return len(value) if isinstance(value, (list, tuple, bytes, bytearray, str)) else None


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} of shape {list(shape)}"
    return type(value).__name__


#: Samples of a buffer by default. From about 64 on, packs hardly become fuller; a resumed run makes the samples of the
#: running buffers again.
DEFAULT_BUFFER = 128


def pack_selection(encoder: TaskEncoder) -> PackSelection | None:
    """Return the default selection for an encoder; None: it has its own selection, or does not pack."""
    (capacity,) = whole_numbers(pack_capacity=encoder.pack_capacity)
    if capacity is None or is_overridden(encoder, "select_samples_to_pack"):
        return None
    at_least_one("give the tokens of a pack, or None", pack_capacity=capacity)
    return PackSelection(SampleLength(encoder), capacity)


@dataclass(frozen=True)
class PackSelection:
    """Replacement for ``select_samples_to_pack``: full packs of the samples of a buffer, in order from its beginning.

    Args:
        length: function that returns the length of a sample in tokens.
        capacity: capacity of a pack in tokens.
    """

    length: SampleLength
    capacity: int

    def __call__(self, samples: list[Any], addresses: Sequence[Address | None]) -> PackedSamplesOutput[Any]:
        """Return the packs, none of which mixes epochs, and push back the last samples of the buffer.

        Args:
            samples: the samples of the buffer.
            addresses: their addresses, as far as they are known.

        Raises:
            FatalSampleError: a sample has no length, or is longer than a pack.
        """
        lengths = list(map(self.length, samples))
        longest = max(lengths)
        if longest > self.capacity:
            raise FatalSampleError(
                f"a sample of {longest} tokens does not fit into a pack of {self.capacity}",
                where=str(field_of(samples[lengths.index(longest)], "__key__") or ""),
                fix="raise pack_capacity of the task encoder, or skip or cut such samples before they are packed",
            )
        owners = [None if address is None else (address[:2], address[2]) for address in addresses]
        packs, taken = full_packs(lengths, self.capacity, owners)
        return PackedSamplesOutput([[samples[place] for place in pack] for pack in packs], samples[taken:])
