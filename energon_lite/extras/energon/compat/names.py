"""Counterpart of each public name of Energon 7.4.1, as data. The guide is generated from it, and tests read it.

A name without an entry is a name of ``energon_lite.extras.energon`` with the same meaning. An entry gives another
place, and whether the object is the same, better (with the difference), or another thing (with the reason). A name that
is absent has an entry without a place: importing it raises an ImportError with that reason.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from energon_lite.cli.main import all_commands
from energon_lite.extras.energon.compat import COMMANDS, MODULES, NODES

Verdict = Literal["same", "better", "other"]


class Name(NamedTuple):
    """Counterpart of a name of Energon's.

    Args:
        ours: ``module:name``; None if it is absent.
        verdict: comparison with Energon's.
        note: the improvement, or the reason for the difference.
    """

    ours: str | None
    verdict: Verdict = "same"
    note: str = ""


def _here(name: str, verdict: Verdict = "same", note: str = "") -> Name:
    """Return the counterpart in this package."""
    return Name(f"{_ROOM}:{name}", verdict, note)


def _compat(name: str, verdict: Verdict = "same", note: str = "") -> Name:
    """Return the counterpart in ``compat``, for names that only code for Energon needs."""
    return Name(f"{_ROOM}.compat.{name}", verdict, note)


def _same(module: str, names: str) -> dict[str, Name]:
    """Return the counterparts that a module has under the same names, with the same meanings."""
    return {name: Name(f"{module}:{name}") for name in names.split()}


def _command(module: str) -> Name:
    """Return the command of a module of Energon's, such as ``tools.prepare_media``."""
    command = all_commands().get(module.removeprefix("tools.").replace("_", "-"))
    return _absent("its extra of energon_lite is not installed") if command is None else Name(command.target)


def _absent(why: str) -> Name:
    return Name(None, "other", why)


_ROOM = "energon_lite.extras.energon"
_TYPED = "deprecated in Energon; in dataset.yaml StandardWebdatasetFactory with this sample type"
_PLAIN = "states are plain dicts"
_SAME_ITEMS = "the same items"
_NO_KEY = "the sample is returned unchanged; the loader makes keys"
_PREVIEW = Name("energon_lite.extras.inspect.preview.command:in_terminal")

NAMES: dict[str, Name] = {
    # -- the same things in other places
    **_same(
        f"{_ROOM}.compat.hooks",
        """log_exception reraise_exception get_stateless get_failure_tolerance get_cooker_need_cache
        get_cooker_need_primary get_sample_restore_key legacy_handler get_source_info default_get_batch_keys
        format_sample_compact format_sample_detailed SYSTEM_EXCEPTIONS handle_restore_errors""",
    ),
    **_same(
        f"{_ROOM}.compat.loaders",
        "get_val_datasets BasicDataLoader get_loader get_savable_loader SystemRng SystemRngState",
    ),
    **_same(
        f"{_ROOM}.compat.documents",
        """field_access split_field_access to_json_object prepare_filesystem_dataset MAIN_FOLDER_NAME AVProbeIndex
        INDEX_SQLITE_FILENAME INDEX_UUID_FILENAME INFO_JSON_FILENAME INFO_YAML_FILENAME SPLIT_YAML_FILENAME
        DEFAULT_DECODER AVDecoderType ImageDecoderType AV_DECODE_AVAILABLE""",
    ),
    **_same(
        f"{_ROOM}.factories.loaders",
        """DatasetBlendMode LoadedDataset LoadedDatasetList TraversedDatasetReference DatasetSubset
        get_dataset_from_config""",
    ),
    **_same(
        f"{_ROOM}.factories.kinds",
        """EnergonDatasetType WebdatasetMeta get_dataset_type ShardInfo WebdatasetInfo WebdatasetSplits
        check_dataset_info_present get_dataset_info get_info_shard_files IJsonlIndexReader IJsonlIndexWriter""",
    ),
    **_same(f"{_ROOM}.factories.webdataset", "WebdatasetPreparator"),
    **_same(f"{_ROOM}.epath", "DEFAULT_PROFILE_NAME"),
    **_same("energon_lite.errors", "SampleException FatalSampleError EmptyDatasetError FieldAccessError"),
    **_same("energon_lite.storage.stores", "FileStoreWrapper"),
    **_same(
        "energon_lite.extras.media",
        """MediaFilterConfig MediaFilterStrategy AVDecoder AVData AVWebdatasetDecoder get_clips_uniform
        get_single_frames_uniform AVMetadata ImageMetadata MediaMetadataBase MediaMetadataType JsonlFileStore
        serialize_media_metadata deserialize_media_metadata WebdatasetFileStore""",
    ),
    **_same("energon_lite.extras.tools.transforms", MODULES["transforms"]),
    # -- task encoder and collation
    "TaskEncoder": _compat(
        "hooks:TaskEncoder", "better", "with `padding = 0`; random numbers are seeded for each sample"
    ),
    "DefaultTaskEncoder": _compat("hooks:DefaultTaskEncoder", "same", "with `padding = 0`"),
    "generic_batch": _compat("hooks:generic_batch", "same", "with `padding=0`"),
    "stateless": _here("stateless", "better", "seeded from the sample"),
    "ErrorContext": _compat("hooks:ErrorContext", "same", "hooks need none"),
    # -- data sets, loaders and their states
    "get_train_dataset": _compat(
        "loaders:get_train_dataset",
        "better",
        "exact blends; equal leaves have different seeds; the task encoder's decoder is not changed",
    ),
    "get_val_dataset": _compat("loaders:get_val_dataset", "better", "equal numbers of steps on all ranks"),
    "SavableDataLoader": _compat(
        "loaders:SavableDataLoader", "better", "states are small dicts, for any ranks and workers"
    ),
    "SavableDataLoaderState": _compat(
        "loaders:SavableDataLoaderState", "better", "a plain dict, loadable with `weights_only=True`"
    ),
    **dict.fromkeys(
        ("FlexState", "State", "SavableCheckpoint", "SavableDatasetCheckpoint", "SavableDatasetState"),
        _compat("loaders:FlexState", "other", _PLAIN),
    ),
    "Savable": _compat("loaders:Savable", "other", "a base class; unused here"),
    "SavableDataset": _here(
        "SavableDataset",
        "other",
        "immutable, iterated by loaders only; for your own format write an `energon_lite.storage.Source`",
    ),
    "BaseWrapperDataset": _here("WrapperDataset", "other", "write an `energon_lite.storage.Source`, or hooks"),
    "WorkerConfig": _here("WorkerConfig", "better", "with `from_mesh`"),
    "WorkerRng": _compat("loaders:WorkerRng", "other", "hooks use `self.rng`"),
    # -- wrappers
    "BlendDataset": _here("BlendDataset", "better", "exact within one item at each block's end"),
    "EpochizeDataset": _here("EpochizeDataset", "better", "restarts a data set that has ended"),
    "FilterDataset": _here(
        "FilterDataset", "other", "a place left out has a replacement in training, None in validation"
    ),
    "GcDataset": _here("GcDataset", "other", _SAME_ITEMS),
    "GroupBatchDataset": _here("GroupBatchDataset", "same", "around a data set of single samples"),
    "IterMapDataset": _here("IterMapDataset", "other", "refused; write a generator as `encode_sample`"),
    "LimitDataset": _here("LimitDataset", "same", "each pass repeats the first"),
    "LogSampleDataset": _here("LogSampleDataset", "other", "the same items; use the loader's `trace=`"),
    "MapDataset": _here("MapDataset", "other", "generators are refused: write hooks; skipped items keep their place"),
    "PackingDataset": _here("PackingDataset", "same", "around a data set of single samples"),
    "RepeatDataset": _here("RepeatDataset", "better", "fractions of `repeats` are exact over all ranks"),
    "ShuffleBufferDataset": _here("ShuffleBufferDataset", "better", "a window in closed form"),
    "WatchdogDataset": _compat("loaders:WatchdogDataset", "other", "the same items; use `watchdog_timeout_seconds`"),
    "SimpleSavableDatasetWrapper": _compat("loaders:SimpleSavableDatasetWrapper", "other", _SAME_ITEMS),
    "GcFreezeError": _compat("loaders:GcFreezeError", "other", "never raised"),
    "gc_init_worker": _compat("loaders:gc_init_worker", "other", "does nothing"),
    "Bucket": _compat("loaders:Bucket", "other", "unused: groups are lanes"),
    "SampleIndex": _absent("the loader has the position"),
    "SavableDatasetWrapper": _absent("the loader has the state"),
    # -- samples
    "PinMemoryMixin": _compat("hooks:PinMemoryMixin", "same", "base of every Sample and Batch"),
    "ExtendableDataclassMixin": _compat("hooks:ExtendableDataclassMixin", "same", "base of every Sample and Batch"),
    "FilteredSample": _compat("hooks:FilteredSample", "same", "the argument of `load_sample`"),
    **dict.fromkeys(
        ("add_sample_restore_key", "set_sample_restore_key"),
        _compat("hooks:set_sample_restore_key", "other", _NO_KEY),
    ),
    # -- documents and files
    "EPath": Name(f"{_ROOM}.epath:EPath", "other", "over fsspec; `msc://` needs multi-storage-client"),
    "NVDATASET_CACHE_DIR": _compat("documents:NVDATASET_CACHE_DIR", "other", "read only; set the environment variable"),
    "load_config": _compat("documents:load_config", "other", "imports no class"),
    "JsonParser": _compat("documents:JsonParser", "other", "imports no class; no `override`"),
    "JsonValueError": Name("energon_lite.errors:ConfigError"),
    "MockJsonParser": _absent("use yaml"),
    "AVIndexMode": _absent("seeking depends on the container"),
    "CacheFileLazy": _absent("use `cache.get_lazy`"),
    "GuessingHandlerWrapper": _absent("use `SampleDecoder(guess_content=True)`"),
    **dict.fromkeys(NODES, Name(f"{_ROOM}.factories.kinds:MetadatasetNode", "same", "the dict of the YAML document")),
    **{
        name: _here(name, "other", _TYPED)
        for name in MODULES["flavors"].split()
        if name.endswith("Webdataset") and name != "CrudeWebdataset"
    },
    "__version__": Name(f"{_ROOM}.compat:VERSION"),
    # -- commands, which have the names of their modules
    **{f"{module}.command": _command(module) for module in COMMANDS},
    **{f"{module.removeprefix('tools.')}_command": _command(module) for module in COMMANDS},
    "tools.preview.command": _PREVIEW,
    "preview_command": _PREVIEW,
    "main": Name("energon_lite.cli.main:main", "better", "commands of `energon-lite`"),
    "command_info": Name("energon_lite.cli.checkpoint:info"),
    "command_redist": Name(
        "energon_lite.extras.energon.commands:redist", "same", "rarely needed: any number of ranks can resume"
    ),
}


def meaning(name: str, module: str = "") -> Name:
    """Return the counterpart of a public name; for a name with several meanings, that in the given module.

    Example:
        >>> meaning("SkipSample")
        Name(ours='energon_lite.extras.energon:SkipSample', verdict='same', note='')
    """
    return NAMES.get(f"{module}.{name}") or NAMES.get(name) or _here(name)


#: Values of ``worker_type``.
ForkDataLoaderWorker = "fork"
ThreadDataLoaderWorker = "thread"

_FILTERS = "build_filter_index build_filter_index_from_shard_indexes"
_JOBS = "get_processing_dataset get_processing_datasets"
_LOADERS = "DataLoader ForkDataLoaderWorker ThreadDataLoaderWorker"
_RECIPES = "Recipe load_dataset prepare_recipe traverse_recipe"

AHEAD_MODULES: dict[str, str] = {
    "": f"ByteRangeStore DataLoader PackedSamplesOutput Recipe prepare_recipe traverse_recipe {_FILTERS} {_JOBS}",
    "cache": "ByteRangeStore",
    "cache.file_store": "ByteRangeStore",
    "dataloader": _LOADERS,
    "dataloader.dataloader": "DataLoader",
    "flavors.common.filter_index": _FILTERS,
    "flavors.common.manifest.paths": "MAIN_FOLDER_NAME",
    "recipe": f"{_RECIPES} DatasetLoader DatasetLoaderInterface",
    "recipe.dataset_loader": "DatasetLoader",
    "recipe.loader": "load_dataset prepare_recipe traverse_recipe",
    "recipe.loader_interface": "DatasetBlendMode DatasetLoaderInterface LoadedDataset LoadedDatasetList",
    "recipe.recipe": "Recipe",
    "task_encoder": _JOBS,
    "task_encoder.loader": _JOBS,
    "wrappers": "PackedSamplesOutput",
    "wrappers.packing_dataset": "PackedSamplesOutput",
}

#: Names with another counterpart; all others have the same name in ``energon_lite``.
AHEAD: dict[str, Name] = {
    "DataLoader": Name("energon_lite.extras.energon.compat.loaders:SavableDataLoader"),
    "ForkDataLoaderWorker": Name("energon_lite.extras.energon.compat.names:ForkDataLoaderWorker"),
    "ThreadDataLoaderWorker": Name("energon_lite.extras.energon.compat.names:ThreadDataLoaderWorker"),
    "Recipe": Name("energon_lite.extras.energon.factories.loaders:MetadatasetV2"),
    "prepare_recipe": Name("energon_lite.extras.energon:prepare_metadataset"),
    "traverse_recipe": Name("energon_lite.extras.energon:traverse_metadataset"),
}
