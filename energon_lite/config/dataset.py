"""Readers of a data set's documents: ``dataset.yaml``, which maps the parts of a sample to its fields; and
``split.yaml``, which assigns shards to splits and lists exclusions."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from energon_lite.config.class_names import CLASS_KEYS, dataset_class, foreign_dataset_class, sample_type, script_name
from energon_lite.documents import Node, read
from energon_lite.documents.paths import MAX_NAMES, expand_braces, missing_file_fix
from energon_lite.errors import ConfigError
from energon_lite.samples import SAMPLE_TYPES, Sample
from energon_lite.samples.sample import is_required, own_fields

logger = logging.getLogger(__name__)

#: Keys of Energon that tune how its workers iterate over shards. They have no effect here: workers do not own shards.
_IGNORED_KEYS = frozenset({"parallel_shard_iters", "shuffle_over_epochs", "max_samples_per_sequence"})

#: Keys of decoder settings that older versions of Energon read from this file.
_DECODER_KEYS = ("auto_decode", "image_decode", "av_decode", "video_decode_audio", "ignore_decoder_errors")


@dataclass(frozen=True)
class DatasetConfig:
    """Contents of a ``dataset.yaml``.

    Args:
        kind: ``"standard"`` makes samples of ``sample_type``, ``"crude"`` returns the parts unchanged.
        sample_type: a key of ``SAMPLE_TYPES``; a class if the document names one of the user's own; None if crude.
        field_map: field of the sample -> part (and entry in it) that fills it.
        sample_loader: ``file.py:function`` relative to the document's folder, instead of a field map (trusted code).
        columns: for a table (Parquet, Arrow, Lance): part -> column.
        part_filter: names of the parts to read; or ``file.py:function`` (trusted code); None: all, or by field map.
        subflavors: labels for every sample of this data set.
        origin: the file, for messages.
        factory: a data set class of the user's own (trusted code); then the rest of the document is its
            ``arguments``, and ``kind`` has no meaning.
        image_size: size of decoded images, in place of the decoder's.
    """

    kind: Literal["standard", "crude"]
    sample_type: str | type[Sample] | None = None
    field_map: dict[str, str] | None = None
    sample_loader: str | None = None
    part_filter: str | list[str] | None = None
    subflavors: dict[str, Any] = field(default_factory=dict)
    origin: str = ""
    factory: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, str] | None = None
    image_size: Node | None = None


def load_dataset_config(path: str | os.PathLike[str], *, trust_code: bool = False) -> DatasetConfig:
    """Read and check a ``dataset.yaml``, written by hand or by either library's ``prepare``.

    Args:
        path: the file.
        trust_code: allow the document to name Python code (a sample type of another module, a ``sample_loader``).

    Raises:
        ConfigError: the document has a mistake; the message has its line, place and fix.
        TrustError: the document names code and ``trust_code`` is False.

    Example:
        >>> load_dataset_config("digits/.nv-meta/dataset.yaml").field_map
        {'image': 'png', 'caption': 'txt'}
    """
    from energon_lite.documents import load_yaml  # PyYAML is imported when there is something to parse

    file = os.fspath(path)
    if not os.path.isfile(file):
        what, expected = "the data set's configuration is missing", "a YAML file that says how to load a sample"
        raise missing_meta_file(what, file, "dataset.yaml", "dataset_config", expected)
    document = load_yaml(file)
    if (factory := foreign_dataset_class(document.entries(), trust_code=trust_code)) is not None:
        others = {key: node for key, node in document.entries().items() if key not in CLASS_KEYS}
        arguments = {key: node.plain() for key, node in others.items()}
        if "sample_type" in others:
            named = sample_type(others["sample_type"], trust_code=True)
            arguments["sample_type"] = SAMPLE_TYPES[named] if isinstance(named, str) else named
        return DatasetConfig("standard", origin=file, factory=factory, arguments=arguments)
    kind, typed = dataset_class(document.entries())
    fix = "remove it, and set the task encoder's decoder: decoder = SampleDecoder(...)"
    document.refuse(_DECODER_KEYS, "does not belong in dataset.yaml", fix, "no decoder's settings here")
    given: dict[str, Any] = {}
    if kind == "crude":
        what = "cannot be used with CrudeWebdataset, which keeps the parts unchanged"
        fix = "remove it, or remove '__class__: CrudeWebdataset'"
        given = dict.fromkeys(("sample_loader", "field_map", "sample_type"))
        document.refuse(given, what, fix, "part_filter, subflavors")
    elif typed is not None:
        what = "repeats the sample type, which the class already determines"
        fix = "remove '__module__' and '__class__' at the top"
        given = {"sample_type": None}
        document.refuse(given, what, fix, f"no sample_type (the class means {typed})")
    keys = read(document, _Document, ignored=CLASS_KEYS | _IGNORED_KEYS, **given)
    for key in sorted(_IGNORED_KEYS & document.value.keys()):
        where = document.value[key].origin
        logger.info("%s: %r has no effect here (order does not depend on workers or shards)", where, key)
    if keys.tags is not None and keys.subflavors is not None:
        what, fix = "both 'tags' and 'subflavors', which mean the same", "keep one of them"
        raise document.value["tags"].key_error(what, fix, expected="one of them")
    loader = keys.sample_loader
    parts = keys.part_filter
    labels = keys.tags or keys.subflavors or {}
    chosen = fields = None
    if kind == "standard":
        chosen = typed or sample_type(keys.sample_type, trust_code=trust_code)
        fields = _field_map(document, keys, chosen)
    code = None if loader is None else script_name(loader, trust_code)
    part_filter = None if parts is None else _part_filter(parts, trust_code)
    columns = None if keys.columns is None else _columns(keys.columns)
    size = keys.image_size
    return DatasetConfig(kind, chosen, fields, code, part_filter, labels, file, columns=columns, image_size=size)


def meta_file_name(node: Node) -> str:
    """Read the name of a file in ``.nv-meta`` or in a folder below it."""
    expected = "the name of a file in .nv-meta"
    name = node.string(expected)
    if os.path.isabs(name) or ".." in name.split("/"):
        what = "the configuration is outside of the data set's .nv-meta folder"
        raise node.error(what, "put the file there, and write its name", expected=expected)
    return name


def load_own_splits(path: str | os.PathLike[str]) -> tuple[str | None, str | None]:
    """Read ``split_config`` and ``split_part`` of a ``dataset.yaml``; None for each that is missing.

    They take precedence over those of a reference to the data set, as in Energon. The rest of the document is not read.

    Raises:
        ConfigError: one of them is invalid.
    """
    try:
        with open(path, "rb") as file:
            if b"split_" not in file.read():
                return None, None
    except (OSError, ValueError):
        return None, None  # the error is raised where the whole document is read
    from energon_lite.documents import load_yaml

    entries = load_yaml(path).entries()
    config, part = entries.get("split_config"), entries.get("split_part")
    return (
        None if config is None or config.is_null else meta_file_name(config),
        None if part is None or part.is_null else part.string("the name of a split"),
    )


@dataclass(frozen=True)
class _Document:
    """The keys of a ``dataset.yaml``."""

    sample_type: Node
    field_map: Node | None = None
    sample_loader: Node | None = None
    part_filter: Node | None = None
    subflavors: dict[str, Any] | None = None
    split_config: Annotated[str | None, meta_file_name] = None
    split_part: Annotated[str | None, "the name of a split"] = None
    columns: Node | None = None
    image_size: Node | None = None
    tags: dict[str, Any] | None = None


def missing_meta_file(what: str, file: str, usual: str, option: str, expected: str) -> ConfigError:
    """Make the error for a missing file of ``.nv-meta``.

    Args:
        what: the mistake in one sentence.
        file: the file.
        usual: its default name.
        option: the option that sets another name.
        expected: description of a correct file.
    """
    folder, name = os.path.split(os.path.abspath(file))
    fix = f"write it, or run: energon-lite prepare {os.path.dirname(folder)}"
    if name != usual:
        fix = missing_file_fix(file, f"correct the name ({option}), or write the file")
    return ConfigError(what, file=file, expected=expected, found=f"no such file: {os.path.abspath(file)}", fix=fix)


def _part_filter(node: Node, trust_code: bool) -> str | list[str]:
    if isinstance(node.value, str):
        return script_name(node, trust_code)
    return [part.string("the name of a part, e.g. jpg") for part in node.sequence("names of parts")]


def _columns(node: Node) -> dict[str, str]:
    """Map parts to columns. In a list of columns, each part has the name of its column."""
    expected = "the name of a column, e.g. caption or image[bytes]"
    if isinstance(node.value, list):
        return {name: name for name in (column.string(expected) for column in node.sequence("names of columns"))}
    return {part: column.string(expected) for part, column in node.entries().items()}


def _fields_of(chosen: str | type[Sample]) -> tuple[str, list[str], list[str]]:
    """Name, required and optional fields of a sample type."""
    cls = SAMPLE_TYPES[chosen] if isinstance(chosen, str) else chosen
    own = own_fields(cls)
    required = [field.name for field in own if is_required(field)]
    return cls.__name__, required, [field.name for field in own if not is_required(field)]


def _field_map(document: Node, keys: _Document, chosen: str | type[Sample]) -> dict[str, str] | None:
    """Map fields to parts; None: a sample loader makes samples of the parts."""
    name, required, optional = _fields_of(chosen)
    node = keys.field_map
    loader = keys.sample_loader
    expected = "exactly one of field_map, sample_loader"
    if node is None and loader is None:
        example = ", ".join(f"{field}: <part>" for field in required or optional[:1])
        what, fix = "neither 'field_map' nor 'sample_loader'", f"add 'field_map:' with {{{example}}}"
        raise document.error(what, fix, expected=expected)
    if node is not None and loader is not None:
        what = "both 'field_map' and 'sample_loader'"
        raise loader.key_error(what, "remove one of them", expected=expected, found="both")
    if loader is not None and keys.part_filter is None:
        what, fix = "'sample_loader' without 'part_filter'", "add 'part_filter: [jpg, json]' with the parts it needs"
        raise loader.key_error(what, fix, expected="both keys", found="'sample_loader' alone")
    if node is None:
        return None
    if keys.part_filter is not None:
        what = "'part_filter' cannot be used with 'field_map', which already names the parts"
        raise keys.part_filter.key_error(what, "remove part_filter", expected="no part_filter")
    known, fields = required + optional, {}
    for key, value in node.entries().items():
        if key not in known:
            what = f"{name} has no field {key!r}"
            fix = "map the fields of this sample type, or choose another sample_type"
            raise value.key_error(what, fix, expected=f"the fields {', '.join(known)}", choices=known)
        if isinstance(value.value, list):
            raise value.wrong("text that names a part of the sample", 'write alternatives as one text: "jpg,png"')
        fields[key] = value.string("text that names a part of the sample, e.g. jpg or json[text]")
    for key in required:
        if key not in fields:
            what, fix = f"field_map leaves out the field {key!r} of {name}", f"add '{key}: <part>'"
            expected, found = f"the fields {', '.join(required)}", node.describe()
            raise node.key_error(what, fix, expected=expected, found=found)
    return fields


@dataclass(frozen=True)
class SplitConfig:
    """Contents of a ``split.yaml``, with brace patterns expanded.

    Args:
        split_parts: the shards of each split, in order, relative to the data set's folder.
        exclude: shards and samples (``shard/key``) to leave out, in every split.
        origin: the file, for messages.

    Example:
        >>> config = SplitConfig({"train": ("a.tar", "b.tar", "c.tar")}, exclude=("b.tar", "c.tar/0007"))
        >>> config.shards("train")
        ('a.tar', 'c.tar')
        >>> config.excluded_samples
        (('c.tar', '0007'),)
    """

    split_parts: dict[str, tuple[str, ...]]
    exclude: tuple[str, ...] = ()
    origin: str = ""

    def shards(self, split_part: str) -> tuple[str, ...]:
        """Shards of a split without the excluded ones; may be empty.

        Raises:
            ConfigError: there is no such split; the message lists the splits.
        """
        if split_part not in self.split_parts:
            raise ConfigError(
                f"the data set has no split {split_part!r}",
                file=self.origin or None,
                at="split_parts",
                expected="one of: " + (", ".join(self.split_parts) or "(it has no splits at all)"),
                found=repr(split_part),
                choices=list(self.split_parts),
                suggest_for=split_part,
                fix=None if self.split_parts else "add the split, or run energon-lite prepare again",
            )
        left_out = set(self.exclude)
        return tuple(shard for shard in self.split_parts[split_part] if shard not in left_out)

    @property
    def excluded_samples(self) -> tuple[tuple[str, str], ...]:
        """Excluded samples as pairs (shard, key)."""
        shards = {shard for part in self.split_parts.values() for shard in part}
        pairs = (split_exclusion(entry, shards) for entry in self.exclude if entry not in shards)
        return tuple(pair for pair in pairs if pair is not None)


def split_exclusion(entry: str, shards: set[str]) -> tuple[str, str] | None:
    """Split ``"shards/a.tar/some/key"`` into ``("shards/a.tar", "some/key")``; None if it names no sample.

    Both halves may contain slashes, so the boundary is found by the list of shards.
    """
    end = entry.find("/")
    while end != -1:
        if entry[:end] in shards and entry[end + 1 :]:
            return entry[:end], entry[end + 1 :]
        end = entry.find("/", end + 1)
    return None


def load_split_config(path: str | os.PathLike[str]) -> SplitConfig:
    """Read and check a ``split.yaml``. If it is missing, a ``split.json`` in the same folder is used, as in Energon.

    Raises:
        ConfigError: the document has a mistake; the message has its line, place and fix.

    Example:
        >>> load_split_config("digits/.nv-meta/split.yaml").shards("val")
        ('shard-000009.tar',)
    """
    from energon_lite.documents import load_yaml

    file = os.fspath(path)
    if not os.path.isfile(file) and os.path.basename(file) == "split.yaml":
        alternative = os.path.join(os.path.dirname(file), "split.json")
        file = alternative if os.path.isfile(alternative) else file
    if not os.path.isfile(file):
        what = "the data set's list of splits is missing"
        raise missing_meta_file(what, file, "split.yaml", "split_config", "a YAML file with split_parts")
    document = read(load_yaml(file), _SplitDocument)
    patterns = _Patterns()
    split_parts = {name: patterns.shards(entries) for name, entries in document.split_parts.items()}
    shards = {shard for part in split_parts.values() for shard in part}
    return SplitConfig(split_parts, patterns.exclusions(document.exclude or [], shards), origin=file)


@dataclass(frozen=True)
class _SplitDocument:
    split_parts: dict[str, Annotated[list[Node], "shards or brace patterns, e.g. shard-{000..007}.tar"]]
    exclude: Annotated[list[Node] | None, "shards, or samples as shard/key"] = None


class _Patterns:
    """Expansion of a document's patterns, with a bound on the total number of names."""

    def __init__(self) -> None:
        self._left = MAX_NAMES

    def shards(self, entries: list[Node]) -> tuple[str, ...]:
        """Shards of one split."""
        seen: dict[str, Node] = {}
        for entry in entries:
            for shard in self._names(entry):
                if shard in seen:
                    raise entry.error(
                        f"the shard {shard!r} is listed twice in one split, so an epoch would show its samples twice",
                        "remove one of them; to show data more often, give it more weight in a blend",
                        expected="each shard once",
                        found=f"it is also in {seen[shard].path} ({seen[shard].origin})",
                    )
                seen[shard] = entry
        return tuple(seen)

    def exclusions(self, entries: list[Node], shards: set[str]) -> tuple[str, ...]:
        """Names of the excluded shards and samples."""
        excluded: dict[str, None] = {}
        for entry in entries:
            names = self._names(entry)
            if not any(name in shards or split_exclusion(name, shards) for name in names):
                # A warning, not an error: Energon accepts it, and the shards may have been removed since.
                logger.warning("%s: the exclusion %r matches no shard of any split", entry.origin, entry.value)
            excluded.update(dict.fromkeys(names))
        return tuple(excluded)

    def _names(self, node: Node) -> list[str]:
        """Names that the pattern of an entry expands to."""
        pattern = node.string("the name of a shard, or a brace pattern")
        try:
            names = expand_braces(pattern, self._left)
        except ValueError as error:
            fix = f"write what the data set has: at most {MAX_NAMES:,} shards and samples in a document"
            if str(error) == "do not match":
                fix = "close the brace, or put a backslash before a brace that is part of the name"
            expected = "a pattern such as shard-{000..007}.tar"
            raise node.error(f"the braces of the pattern {error}", fix, expected=expected) from error
        self._left -= len(names)
        return names
