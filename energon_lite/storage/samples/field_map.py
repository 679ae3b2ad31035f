"""``field_map``: the part, or the value inside a part, that fills each field of a sample; and the loader that decodes
the parts and makes the object.

The notation is Energon's: ``json[text][0]`` is an access into a decoded part, ``jpg,png`` means the first of the
alternatives that the sample has.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

from energon_lite.errors import ConfigError, DecodeError, FieldAccessError, SampleError, did_you_mean, listed
from energon_lite.samples import CrudeSample, Sample
from energon_lite.storage.index.nv_meta import folder_of_shards
from energon_lite.storage.read.opened_source import AnySource, Renaming
from energon_lite.storage.read.ranges import PartRange
from energon_lite.storage.read.sample_reader import Reader, SampleReader
from energon_lite.storage.read.webdataset import RawSample, WebdatasetSource
from energon_lite.storage.samples.decoding import SampleDecoder

_OPTION = re.compile(r"([^\[\],]+)((?:\[[^\[\],]+\])*)")
_STEP = re.compile(r"\[([^\[\]]+)\]")


@dataclass(frozen=True)
class Access:
    """An access to a value: a part's name, then keys of mappings or positions in lists."""

    part: str
    steps: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.part + "".join(f"[{step}]" for step in self.steps)

    def follow(self, decoded: Mapping[str, Any]) -> Any:
        """Return the value in a sample's decoded parts.

        Raises:
            FieldAccessError: the part, a key or a position does not exist.
        """
        if self.part not in decoded:
            raise FieldAccessError(f"the sample has no part {self.part!r}", fix=_has(self.part, decoded))
        value = decoded[self.part]
        for depth, step in enumerate(self.steps):
            reached = Access(self.part, self.steps[:depth])
            if isinstance(value, Mapping):
                if step not in value:
                    raise FieldAccessError(f"{reached} has no key {step!r}", fix=_has(step, value))
                value = value[step]
            elif isinstance(value, list):
                value = _element(value, step, reached)
            else:
                raise FieldAccessError(
                    f"{reached} is of type {type(value).__name__}, so [{step}] cannot be taken of it",
                    fix="only JSON objects, lists and the like can be accessed with [...]",
                )
        return value


def _element(values: list[Any], step: str, reached: Access) -> Any:
    try:
        return values[int(step)]
    except ValueError:
        raise FieldAccessError(
            f"{reached} is a list, so {step!r} must be a number", fix=f"use {reached}[0], for example"
        ) from None
    except IndexError:
        raise FieldAccessError(f"{reached} has {len(values)} elements, there is no [{step}]") from None


def _has(wanted: str, there: Iterable[object]) -> str:
    names = [str(name) for name in there]
    return did_you_mean(wanted, names, f"it has: {listed([*map(repr, names)], 20) or 'nothing'}", always=True)


@dataclass(frozen=True)
class FieldMap:
    """A compiled field map: for each field the alternatives, in order.

    Attributes:
        fields: ``((field name, (access, ...)), ...)``.
    """

    fields: tuple[tuple[str, tuple[Access, ...]], ...]

    @property
    def parts(self) -> frozenset[str]:
        """Names of all parts that the map may read."""
        return frozenset(access.part for _, accesses in self.fields for access in accesses)

    def check_parts(self, part_names: Collection[str], where: str | None = None) -> None:
        """Refuse a map with a field that no sample can fill, given the names of all parts in the data set.

        Args:
            part_names: the names of the parts.
            where: the document of the map; None: it is not in a file.

        Raises:
            ConfigError: the message names the field and its part, and the nearest part or the parts of the data set.
        """
        for field, accesses in self.fields:
            wanted = [access.part for access in accesses]
            if not any(part in part_names for part in wanted):
                raise ConfigError(
                    f"field {field!r}: no sample has a part {' or '.join(map(repr, wanted))}",
                    file=where,
                    at=f"field_map.{field}",
                    fix=_has(wanted[0], part_names),
                )

    def apply(self, decoded: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a sample from its decoded parts.

        Raises:
            FieldAccessError: a field's value does not exist (nor any of its alternatives).

        Example:
            >>> compile_field_map({"caption": "json[text][0]"}).apply({"json": {"text": ["hi"]}})
            {'caption': 'hi'}
        """
        return {field: self._value(field, accesses, decoded) for field, accesses in self.fields}

    def _value(self, field: str, accesses: tuple[Access, ...], decoded: Mapping[str, Any]) -> Any:
        for access in accesses:
            try:
                return access.follow(decoded)
            except FieldAccessError as error:
                what, fix = error.what, error.fix
        others = f" (nor is there {', '.join(map(str, accesses[:-1]))})" if len(accesses) > 1 else ""
        raise FieldAccessError(f"field {field!r}: {what}{others}", fix=fix)


def compile_field_map(field_map: Mapping[str, str]) -> FieldMap:
    """Parse a field map.

    Args:
        field_map: an expression per field: ``part``, ``part[key]``, ``part[key][0]``, alternatives separated by commas.

    Raises:
        ConfigError: an expression cannot be parsed.

    Example:
        >>> sorted(compile_field_map({"image": "jpg,png", "caption": "json[text]"}).parts)
        ['jpg', 'json', 'png']
    """
    return FieldMap(tuple((str(field), _parse(str(field), text)) for field, text in field_map.items()))


def _parse(field: str, text: object) -> tuple[Access, ...]:
    options = text.split(",") if isinstance(text, str) else [""]
    matches = [match for option in options if (match := _OPTION.fullmatch(option.strip()))]
    if len(matches) < len(options):
        raise ConfigError(
            "this is not a field access",
            at=f"field_map.{field}",
            expected="a part name such as 'jpg', with accesses as in 'json[text][0]', alternatives as in 'jpg,png'",
            found=repr(text),
        )
    return tuple(Access(match[1].strip(), tuple(_STEP.findall(match[2]))) for match in matches)


# -- columns of a table ----------------------------------------------------------------------------------------------

#: Extensions whose decoder turns text into another type.
_OF_TEXT = frozenset(["json", "jsn", "cls", "cls2", "index", "inx", "id"])


def compile_columns(columns: Mapping[str, str]) -> Renaming:
    """Compile the rules by which columns of a source become parts.

    Args:
        columns: for each part its column, with an access into it if it is a struct or a list.

    Raises:
        ConfigError: an access cannot be read, or names alternatives.

    Example:
        >>> renaming = compile_columns({"jpg": "image[bytes]"})
        >>> column, make = renaming["jpg"]
        >>> column, make({"bytes": b"...", "path": "a.jpg"})
        ('image', b'...')
    """
    made = {}
    for name, accesses in compile_field_map(columns).fields:
        if len(accesses) != 1:
            raise ConfigError("a part is made of one column", at=f"columns.{name}", fix="write one, without a comma")
        is_text = name.rpartition(".")[2] in _OF_TEXT
        made[name] = accesses[0].part, partial(_made, accesses[0], is_text)
    return made


def _made(access: Access, is_text: bool, value: Any) -> Any:
    if access.steps:
        value = access.follow({access.part: value})
    return value.encode() if is_text and isinstance(value, str) else value


class Loader(Protocol):
    """Maker of the samples of a leaf; see :class:`SampleLoader`."""

    @property
    def sample_type(self) -> type[Sample] | None: ...

    @property
    def parts(self) -> frozenset[str] | None: ...

    @property
    def subflavors(self) -> Mapping[str, Any]: ...

    def reader(self, source: AnySource) -> Reader:
        """Return the reader of the parts that this loader makes samples of."""

    def load(self, raw: RawSample, restore_key: tuple[Any, ...]) -> Any:
        """Make one sample of its parts."""


@dataclass(frozen=True)
class SampleLoader:
    """Maker of samples from the parts that a source reads.

    Args:
        sample_type: class of the samples; None makes :class:`CrudeSample` of all parts.
        field_map: the part for each field; required with ``sample_type`` unless ``sample_loader`` is given.
        part_filter: the parts of a crude sample, or those that ``sample_loader`` needs; None for all.
        subflavors: each sample gets its own copy.
        decoder: None leaves the parts as bytes.
        sample_loader: the user's own function from a crude sample to fields, used instead of ``field_map``.

    Example:
        >>> loader = SampleLoader(CaptioningSample, compile_field_map({"image": "png", "caption": "txt"}))
        >>> sample = loader.load(SampleReader(source, loader.parts).sample(0), ("sample", 0))
    """

    sample_type: type[Sample] | None = None
    field_map: FieldMap | None = None
    part_filter: frozenset[str] | None = None
    subflavors: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    decoder: SampleDecoder | None = dataclasses.field(default_factory=SampleDecoder)
    sample_loader: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    @property
    def parts(self) -> frozenset[str] | None:
        """Names of the parts to read; None for all."""
        return self.part_filter if self.field_map is None else self.field_map.parts

    @cached_property
    def labels(self) -> Callable[[], dict[str, Any]]:
        """Function that copies the subflavors, for a sample."""
        own = dict(self.subflavors)
        is_nested = any(isinstance(value, (dict, list)) for value in own.values())
        return partial(copy.deepcopy, own) if is_nested else own.copy

    def reader(self, source: AnySource) -> SampleReader:
        """Return the reader of the parts that samples are made of."""
        assert isinstance(source, WebdatasetSource)
        streamed = None if self.decoder is None else self.decoder.streamed(source.part_names)
        return SampleReader(source, self.parts, streamed)

    def load(self, raw: RawSample, restore_key: tuple[Any, ...]) -> Sample | CrudeSample:
        """Make one sample.

        Args:
            raw: the sample as the source read it.
            restore_key: becomes ``__restore_key__``.

        Raises:
            DecodeError, FieldAccessError: with part, key and shard.
        """
        try:
            decode = None if self.decoder is None else self.decoder.decode
            decoded: dict[str, Any] = {
                name: decode(name, data) if decode is not None and isinstance(data, (bytes, PartRange)) else data
                for name, data in raw.parts.items()
            }
            base: dict[str, Any] = {
                "__key__": raw.key,
                "__restore_key__": restore_key,
                "__subflavors__": self.labels(),
                "__sources__": (raw.source,),
            }
            if self.field_map is not None and self.sample_type is not None:
                return self.sample_type(**self.field_map.apply(decoded), **base)
        except (DecodeError, FieldAccessError) as error:
            place = f"sample {raw.key!r} in {folder_of_shards(raw.source.dataset_path)}/{raw.source.shard_name}"
            raise type(error)(error.what, where=place, fix=error.fix) from error.__cause__
        crude = CrudeSample(decoded, __shard__=raw.source.shard_name, **base)
        if self.sample_type is None:
            return crude
        if self.sample_loader is None:
            raise SampleError(f"{self.sample_type.__name__} needs a field_map or a sample_loader", where=raw.key)
        # The user's function may rename a sample, but not change its origin.
        own_key = {"__key__": base.pop("__key__")}
        return self.sample_type(**(own_key | self.sample_loader(crude) | base))
