"""From a path to leaves: the documents are read, the shards are found, and every leaf is made ready for reading."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from energon_lite.config.dataset import DatasetConfig, load_dataset_config, load_own_splits, load_split_config
from energon_lite.config.leaf_spec import FoundLeaves, LeafSpec
from energon_lite.config.metadataset import is_metadataset, load_metadataset
from energon_lite.documents import located
from energon_lite.documents.paths import is_data_path, is_url, local_path, missing_file_fix, static_folder
from energon_lite.errors import ConfigError, NotPreparedError, UsageError, did_you_mean, listed
from energon_lite.hooks import Cooker, TaskEncoder
from energon_lite.loading.iterators.dataset import LeafIdentity
from energon_lite.loading.makers.leaf import Leaf, leaf_key, leaf_name, measure_arguments
from energon_lite.loading.metadataset_keys import filters_of, join_guest, stores_of
from energon_lite.samples import SAMPLE_TYPES, CrudeSample, Sample
from energon_lite.storage.files.byte_ranges import url_files
from energon_lite.storage.index.index_cache import local_meta
from energon_lite.storage.index.nv_meta import META_FOLDER, is_jsonl, is_prepared, meta_path, read_info
from energon_lite.storage.read.opened_source import AnySource, OpenedSource, Renaming, data_digest, data_digests
from energon_lite.storage.read.source import has_own_scheme, source_opener
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import FieldMap, Loader, SampleLoader, compile_columns, compile_field_map
from energon_lite.storage.samples.image_size import read_image_size
from energon_lite.trust import load_function

logger = logging.getLogger(__name__)

PathOrDict = str | os.PathLike[str] | Mapping[str, Any] | FoundLeaves


def find_leaves(
    path: PathOrDict,
    split_part: str,
    dataset_config: str,
    split_config: str,
    subflavors: Mapping[str, Any] | None,
    missing_ok: bool = False,
) -> list[LeafSpec]:
    """Return the leaves of a folder or a metadataset, without opening them. With ``missing_ok``, the data sets of a
    metadataset need not exist.

    Raises:
        ConfigError: a mistake in a metadataset.
        NotPreparedError: there is no such folder or file.
    """
    if isinstance(path, FoundLeaves):
        return [spec.labelled(subflavors or {}) for spec in path.specs]
    if is_metadataset(path):
        specs = list(
            load_metadataset(
                path,
                split_part=split_part,
                read_url=lambda url: url_files(url).read_file(url),
                missing_ok=missing_ok,
            )
        )
    else:
        folder = local_path(os.fspath(path))  # type: ignore[arg-type]
        if not is_url(folder):
            folder = os.path.abspath(folder)
            if not (os.path.exists(folder) or is_data_path(folder)):
                what = "JSONL file" if is_jsonl(folder) else "data set"
                fix = missing_file_fix(folder, "check the path")
                raise NotPreparedError(f"there is no such {what}", where=folder, fix=fix)
        specs = [LeafSpec(folder, split_part, dataset_config=dataset_config, split_config=split_config)]
    return [_with_own_splits(spec).labelled(subflavors or {}) for spec in specs]


def _with_own_splits(spec: LeafSpec) -> LeafSpec:
    """Return a leaf with the splits that the data set's own document chooses."""
    if spec.join is not None:
        members = tuple(map(_with_own_splits, spec.join.members))
        return replace(spec, join=replace(spec.join, members=members), split_part=members[0].split_part)
    if is_jsonl(spec.path) or source_opener(spec.path) is not None:
        return spec
    config, part = load_own_splits(meta_path(local_meta(spec.path), spec.dataset_config))
    return replace(spec, split_config=config or spec.split_config, split_part=part or spec.split_part)


def open_leaves(
    specs: Sequence[LeafSpec],
    encoder: TaskEncoder,
    trust_code: bool,
    skips: str | None = None,
    sample_type: type | None = None,
    *,
    digests: Sequence[str] | None = None,
    asked: Sequence[str] = (),
) -> tuple[tuple[Leaf, ...], list[LeafIdentity]]:
    """Open the leaves. A leaf's key comes from its data, not from its place, so other leaves may be added or removed.
    Only leaves with the same data get their keys by their order.

    Args:
        specs: the leaves as the documents describe them.
        encoder: the user's hooks.
        trust_code: see :func:`~energon_lite.get_train_dataset`.
        skips: column of flags by which samples are left out; None: none are. If samples are left out, the leaf counts
            as another data set, with another key.
        sample_type: required type of the samples; None: any.
        digests: digests of the data, if they are known.
        asked: the requested path as arguments of ``energon-lite measure``; empty: each leaf by itself.

    Raises:
        ConfigError, DatasetError: something is wrong with a leaf's files.
        UsageError: the encoder has cookers, but none for a leaf; or the samples of a leaf have another type.
    """
    seen: Counter[str] = Counter()
    leaves = []
    identities = []
    sources = [open_source(spec, skips, asked) for spec in specs]
    for spec, whole, data in zip(specs, sources, digests or data_digests(sources), strict=True):
        if skips is not None:
            _tell_skips(whole, skips, encoder)
        source, loader, cooker = _loader_and_cooker(spec, whole, encoder, trust_code)
        aux = stores_of(spec, source, cooker, encoder)
        if spec.join is None or loader.sample_type is not None:  # the result type of a joiner function is not known
            _check_sample_type(spec, loader.sample_type or CrudeSample, sample_type)
        key = leaf_key(data, seen[data])
        seen[data] += 1
        leaves.append(Leaf(leaf_name(spec), source, loader, key, cooker, aux))
        identities.append(LeafIdentity(spec.path, len(source), data, contents=f"{data} {source.contents}"))
    return tuple(leaves), identities


def open_whole(
    spec: LeafSpec, encoder: TaskEncoder, trust_code: bool, source: AnySource | None = None, is_damaged: bool = False
) -> Leaf:
    """Return the folder of a leaf without its splits and exclusions, or another ``source``, read as the leaf is. If
    it is damaged, the key of the leaf is made without reading samples.

    Raises:
        ConfigError, DatasetError, UsageError: as :func:`open_leaves`.
    """
    if source is None:
        check_measurable(spec)
    source = source or WebdatasetSource.open(spec.path, verified=False)
    whole, loader, cooker = _loader_and_cooker(spec, source, encoder, trust_code)
    aux = stores_of(spec, whole, cooker, encoder)
    name = os.path.basename(spec.path.rstrip("/")) or spec.path
    data = whole.fingerprint if is_damaged else data_digest(whole)
    return Leaf(name, whole, loader, leaf_key(data, 0), cooker, aux)


def check_measurable(spec: LeafSpec) -> None:
    """Check that the samples of a leaf belong to a folder of tars or to a JSONL file, which can store columns.

    Raises:
        UsageError: the leaf is a join, or has another format.
    """
    if spec.join is not None:
        raise UsageError(
            "joined samples are not measured: they belong to no folder",
            where=spec.origin or spec.path,
            fix="batch by tokens with length_column=None, or measure each folder by itself",
        )
    if source_opener(spec.path) is not None:
        raise UsageError(
            "a data set of this format has no place for what is measured",
            where=spec.path,
            fix="give it a column of lengths, and name that (length_column=...); or make tars of it with energon-lite "
            "convert",
        )


def open_source(spec: LeafSpec, skips: str | None = None, asked: Sequence[str] = ()) -> AnySource:
    """Return the source of a leaf: its samples, not yet interpreted; arguments as those of :func:`open_leaves`.

    Raises:
        ConfigError, DatasetError: something is wrong with the leaf's files.
    """
    if spec.join is not None:
        if skips is not None:
            what = "joined data sets have no measured skips"
            fix = "leave out use_measured_skips"
            raise UsageError(what, where=spec.origin or spec.path, fix=fix)
        return join_guest(spec).source(spec)
    filters = filters_of(spec)
    asked = asked or measure_arguments(spec)
    if (opener := source_opener(spec.path)) is not None:
        if skips is not None:
            raise UsageError(
                "a source of your own has no measured skips",
                where=spec.path,
                fix="leave out use_measured_skips; let the source have the other samples only",
            )
        return OpenedSource(spec.path, opener, spec.split_part, spec.subset, filters=filters)
    chosen: dict[str, Any] = {}
    if not is_jsonl(spec.path):  # a file has no splits: each split is the whole file
        meta = local_meta(spec.path)
        read_info(meta)  # first, because a folder that is not prepared has none of the other files either
        split = load_split_config(os.path.join(meta, ".nv-meta", spec.split_config))
        chosen = {"shards": split.shards(spec.split_part), "excluded_samples": split.excluded_samples}
    return WebdatasetSource.open(
        spec.path,
        **chosen,
        split_part=spec.split_part,
        subset=spec.subset,
        skips=skips,
        filters=filters,
        asked=asked,
    )


def _tell_skips(source: AnySource, skips: str, encoder: TaskEncoder) -> None:
    made_by = source.column(skips).maker.get("encoder_class")
    here = type(encoder).__name__
    if source.skipped:
        logger.info("%s: %d samples are left out, as column %r says", source, source.skipped, skips)
    if made_by and made_by != here:
        logger.warning(
            "%s: use_measured_skips leaves out what %s skipped, but the task encoder is %s, which may skip others; "
            "measure again with %s",
            source.path,
            made_by,
            here,
            here,
        )


def _loader_and_cooker(
    spec: LeafSpec, source: AnySource, encoder: TaskEncoder, trust_code: bool
) -> tuple[AnySource, Loader, Cooker | None]:
    """Return the source of a leaf, restricted to the needed parts, the loader of its samples, and the cooker."""
    if spec.join is not None:
        return source, join_guest(spec).loader(spec, source, encoder, trust_code), None
    source, loader = sample_loader(spec, source, encoder, trust_code)
    return source, loader, _cooker(spec, loader, encoder)


def sample_loader(
    spec: LeafSpec, source: AnySource, encoder: TaskEncoder, trust_code: bool
) -> tuple[AnySource, SampleLoader]:
    """Return the source of one data set, restricted to the needed parts, and the loader of its samples.

    Raises:
        ConfigError, UsageError: as :func:`open_leaves`.
    """
    config = dataset_config_of(spec, trust_code)
    folder = os.path.join(_meta_root(spec.path) or "", META_FOLDER)
    source, renaming = _renamed(source, config)
    subflavors = config.subflavors | spec.subflavors
    if config.factory is not None:
        decoder = {} if "decoder" in config.arguments else {"decoder": encoder.decoder}
        made = config.factory.at_path(spec.path, split_part=spec.split_part, **decoder, **config.arguments)
        made.subflavors = {**(made.subflavors or {}), **subflavors}
        return source, made.sample_loader_of(source)
    loader = SampleLoader(
        sample_type=_sample_type(config),
        field_map=_field_map(config, source),
        part_filter=_part_filter(config, source, folder),
        subflavors=subflavors,
        decoder=_decoder(spec, config, encoder),
        sample_loader=load_function(folder, config.sample_loader, "sample_loader") if config.sample_loader else None,
    )
    if loader.decoder is not None:
        wanted = source.part_names if loader.parts is None else source.part_names & loader.parts
        loader.decoder.check_parts(wanted, spec.path)
    if isinstance(source, OpenedSource):
        source = source.selected(loader.parts, renaming)
    return source, loader


def _decoder(spec: LeafSpec, config: DatasetConfig, encoder: TaskEncoder) -> SampleDecoder | None:
    # As in Energon, a line is decoded to an object, also if the decoder leaves other parts as bytes.
    decoder = SampleDecoder() if encoder.decoder is None and is_jsonl(spec.path) else encoder.decoder
    if config.image_size is None:
        return decoder
    size = read_image_size(config.image_size)
    with located(config.image_size):
        return replace(decoder or SampleDecoder(image_decode=None), image_size=size)


def _cooker(spec: LeafSpec, loader: SampleLoader, encoder: TaskEncoder) -> Cooker | None:
    """Return the cooker for the crude samples of a leaf."""
    subflavors = dict(loader.subflavors)
    if loader.sample_type is not None or not encoder.cookers:
        return None
    cooker = next((cooker for cooker in encoder.cookers if cooker.is_match(subflavors)), None)
    if cooker is None:
        raise UsageError(
            f"none of the {len(encoder.cookers)} cookers of {type(encoder).__name__} is for a data set with subflavors "
            f"{subflavors}",
            where=spec.path,
            fix="give it those that its cooker looks for (in the YAML, by subflavors=..., or by measure --subflavors), "
            "or add a Cooker whose has_subflavors are among them, or one without has_subflavors",
        )
    return cooker


def _renamed(source: AnySource, config: DatasetConfig) -> tuple[AnySource, Renaming | None]:
    """Return a source whose columns have the names that the document gives them, and the renaming."""
    if config.columns is None:
        return source, None
    if not isinstance(source, OpenedSource):
        raise ConfigError(
            "tar shards have parts, not columns",
            file=config.origin,
            at="columns",
            fix="remove it; field_map or part_filter choose parts",
        )
    renaming = compile_columns(config.columns)
    for name, (column, _) in renaming.items():
        if source.part_names and column not in source.part_names:
            known = f"there are: {listed(sorted(source.part_names))}"
            fix = did_you_mean(column, source.part_names, known, always=True)
            raise ConfigError(f"there is no column {column!r}", file=config.origin, at=f"columns.{name}", fix=fix)
    return source.selected(None, renaming), renaming


def _meta_root(path: str) -> str | None:
    """Return the folder whose ``.nv-meta`` belongs to a path; None: there is none."""
    if source_opener(path) is None:
        return local_meta(path)
    if has_own_scheme(path):
        return None
    folder = static_folder(path)
    if not is_url(folder):
        return folder
    try:
        return local_meta(folder)
    except NotPreparedError:
        return None


def _check_sample_type(spec: LeafSpec, found: type, wanted: type | None) -> None:
    if wanted is not None and not issubclass(found, wanted):
        raise UsageError(
            f"the samples of the data set are {found.__name__}, not {wanted.__name__}",
            where=spec.path,
            fix=f"correct its {spec.dataset_config}, or give sample_type={found.__name__}",
        )


def dataset_config_of(spec: LeafSpec, trust_code: bool) -> DatasetConfig:
    """Return the configuration for making a leaf's samples from their parts. Samples of a JSONL file are crude; so are
    those of other sources, unless there is a document next to their files.

    Raises:
        ConfigError, TrustError: as :func:`~energon_lite.config.dataset.load_dataset_config`.
    """
    crude = DatasetConfig("crude", origin=spec.path)
    if is_jsonl(spec.path) or has_own_scheme(spec.path):
        return crude
    root = _meta_root(spec.path)
    is_usual = source_opener(spec.path) is not None and spec.dataset_config == LeafSpec.dataset_config
    # Files of other formats may have a document next to them, unless it belongs to tar shards in the same folder.
    if is_usual and (root is None or is_prepared(root) or not os.path.isfile(meta_path(root, spec.dataset_config))):
        return crude
    return load_dataset_config(meta_path(root or spec.path, spec.dataset_config), trust_code=trust_code)


def _part_filter(config: DatasetConfig, source: AnySource, folder: str) -> frozenset[str] | None:
    if config.part_filter is None:
        return None
    if isinstance(config.part_filter, str):  # the caller's own function; the document was trusted
        wanted = load_function(folder, config.part_filter, "part_filter")
        return frozenset(name for name in source.part_names if wanted(name))
    return frozenset(config.part_filter)


def _sample_type(config: DatasetConfig) -> type[Sample] | None:
    return SAMPLE_TYPES[config.sample_type] if isinstance(config.sample_type, str) else config.sample_type


def _field_map(config: DatasetConfig, source: AnySource) -> FieldMap | None:
    if not config.field_map:
        return None
    try:
        field_map = compile_field_map(config.field_map)
    except ConfigError as error:  # it names the field; the file is known here
        raise ConfigError(error.what, file=config.origin, at=error.at, fix=error.fix) from None
    if source.part_names or not isinstance(source, OpenedSource):
        field_map.check_parts(sorted(source.part_names), config.origin)
    return field_map
