"""Counterpart of each public name of Energon 7.4.1, as data. The guide is generated from it, and tests read it.

A name without an entry is a name of ``energon_lite.extras.energon`` with the same meaning. An entry gives another
place, and whether the object is the same, better (with the difference), or another thing (with the reason). A name that
is absent has an entry without a place: importing it raises an ImportError with that reason.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from energon_lite.cli.main import all_commands
from energon_lite.extras.energon.compat.modules import COMMANDS, MODULES, NODES

__all__ = ["NAMES", "Name", "Verdict", "meaning"]

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
    """Return the counterpart in ``energon_lite`` itself."""
    return Name(f"energon_lite.extras.energon:{name}", verdict, note)


def _compat(name: str, verdict: Verdict = "same", note: str = "") -> Name:
    """Return the counterpart in ``energon_lite.extras.energon``, for names that only code for Energon needs."""
    return Name(f"energon_lite.extras.energon.compat.{name}", verdict, note)


def _command(module: str) -> Name:
    """Return the command of a module of Energon's, such as ``tools.prepare_media``."""
    command = all_commands().get(module.removeprefix("tools.").replace("_", "-"))
    return _absent("its extra of energon_lite is not installed") if command is None else Name(command.target)


def _absent(why: str) -> Name:
    return Name(None, "other", why)


_TYPED = "deprecated there; as `__class__` in dataset.yaml it means StandardWebdatasetFactory with this sample type"
_NO_STREAM = "items are planned, not pulled through a chain of iterators: it has no state of its own"

NAMES: dict[str, Name] = {
    # -- task encoder and collation
    "TaskEncoder": _compat(
        "task_encoder:TaskEncoder",
        "better",
        "`energon_lite.TaskEncoder` with `padding = 0`, "
        "Energon's rule for tensors of unequal shape; generators of random numbers are seeded for each sample",
    ),
    "DefaultTaskEncoder": _compat("task_encoder:DefaultTaskEncoder", "same", "with `padding = 0`"),
    "basic_sample_keys": _compat("task_encoder:basic_sample_keys"),
    "batch_list": _compat("task_encoder:batch_list"),
    "batch_pad_stack": _compat("task_encoder:batch_pad_stack"),
    "batch_stack": _compat("task_encoder:batch_stack"),
    "log_exception": _compat("errors:log_exception"),
    "reraise_exception": _compat("errors:reraise_exception"),
    "generic_batch": _compat("task_encoder:generic_batch", "same", "with `padding=0`"),
    "stateless": _here("stateless", "better", "the seed is that of the sample, not the first one that a worker saw"),
    "get_stateless": _compat("task_encoder:get_stateless"),
    "get_failure_tolerance": _compat("task_encoder:get_failure_tolerance"),
    "get_cooker_need_cache": _compat("task_encoder:get_cooker_need_cache"),
    "get_cooker_need_primary": _compat("task_encoder:get_cooker_need_primary"),
    # -- data sets and loaders
    "get_train_dataset": _compat(
        "recipes:get_train_dataset",
        "better",
        "blends are exact, seeds of equal leaves differ, "
        "`image_decode=` and the like make a copy of the task encoder's decoder instead of changing it",
    ),
    "get_val_dataset": _compat("recipes:get_val_dataset", "better", "all ranks make equally many steps"),
    "get_val_datasets": _compat("recipes:get_val_datasets", "same"),
    "SavableDataLoader": _compat(
        "loaders:SavableDataLoader",
        "better",
        "a state is a dict of a few integers, and goes on on any number of ranks and workers",
    ),
    "BasicDataLoader": _compat("loaders:BasicDataLoader"),
    "get_loader": _compat("loaders:get_loader"),
    "get_savable_loader": _compat("loaders:get_savable_loader"),
    "SavableDataLoaderState": _compat(
        "states:SavableDataLoaderState", "better", "a plain dict: `torch.load` takes it with `weights_only=True`"
    ),
    "FlexState": _compat("states:FlexState", "other", "states are plain dicts"),
    "State": _compat("states:FlexState", "other", "states are plain dicts"),
    "Savable": _compat("states:Savable", "other", "a base class for code of your own; nothing here asks for it"),
    "SavableDataset": _here(
        "SavableDataset",
        "other",
        "immutable: a loader has the position. Not to be derived from: a "
        "format of your own is an `energon_lite.storage.Source`",
    ),
    "BaseWrapperDataset": _here(
        "WrapperDataset",
        "other",
        "wrappers are plans over items; derive from `energon_lite.storage.Source`, or write hooks",
    ),
    "WorkerConfig": _here("WorkerConfig", "better", "`from_mesh`; the worker's own methods answer what is known"),
    # -- wrappers
    "BatchDataset": _here("BatchDataset"),
    "BlendDataset": _here(
        "BlendDataset", "better", "exact within one item at each block's end; no worker may be empty"
    ),
    "ConcatDataset": _here("ConcatDataset"),
    "EpochizeDataset": _here("EpochizeDataset", "better", "begins again when the data set inside has ended"),
    "FilterDataset": _here(
        "FilterDataset",
        "other",
        "what is left out keeps its place: in training another item stands "
        "there, in validation None; all others stay where they are",
    ),
    "GcDataset": _here("GcDataset", "other", "the same items: workers have nothing to collect"),
    "GroupBatchDataset": _here("GroupBatchDataset", "same", "around a data set of single samples"),
    "IterMapDataset": _here(
        "IterMapDataset",
        "other",
        "refused: what a function makes of a whole stream cannot be planned; write a generator as `encode_sample`",
    ),
    "LimitDataset": _here("LimitDataset", "same", "each pass is the first one again, as there"),
    "LogSampleDataset": _here(
        "LogSampleDataset", "other", "the same items; the loader's `trace=` writes which samples are in which batch"
    ),
    "MapDataset": _here(
        "MapDataset",
        "other",
        "functions of one result; generators are refused: write them as hooks. Skipped items keep their place",
    ),
    "MixBatchDataset": _here("MixBatchDataset"),
    "PackingDataset": _here("PackingDataset", "same", "around a data set of single samples"),
    "RepeatDataset": _here("RepeatDataset", "better", "a fraction of `repeats` is exact over all ranks and workers"),
    "ShuffleBufferDataset": _here("ShuffleBufferDataset", "better", "a window in closed form; no buffer to fill"),
    "WatchdogDataset": _compat(
        "states:WatchdogDataset", "other", "the same items; every loader has a watchdog: `watchdog_timeout_seconds`"
    ),
    "GcFreezeError": _compat("states:GcFreezeError", "other", "nothing raises it: no garbage is frozen here"),
    "gc_init_worker": _compat("states:gc_init_worker", "other", "does nothing: workers do not inherit tensors"),
    "Bucket": _compat("states:Bucket", "other", "groups are lanes of the plan; nothing here makes one"),
    "SampleIndex": _absent("a wrapper here has no count of its own: the position of the loader says it all"),
    "get_sample_restore_key": _compat("samples:get_sample_restore_key"),
    **dict.fromkeys(
        ("SavableCheckpoint", "SavableDatasetCheckpoint", "SavableDatasetState"),
        _compat("states:FlexState", "other", "there are no snapshots: a state is a few integers, made when asked for"),
    ),
    "SavableDatasetWrapper": _absent("there is no process to be wrapped: the state is the loader's"),
    "SimpleSavableDatasetWrapper": _compat("states:SimpleSavableDatasetWrapper", "other", "the same items"),
    # -- samples and their sources
    "PinMemoryMixin": _compat("samples:PinMemoryMixin", "same", "every Sample and Batch is one"),
    "ExtendableDataclassMixin": _compat("samples:ExtendableDataclassMixin", "same", "every Sample and Batch is one"),
    "add_sample_restore_key": _compat(
        "samples:set_sample_restore_key", "other", "keys are the loader's; the sample is returned as it is"
    ),
    "legacy_handler": _compat("errors:legacy_handler"),
    "set_sample_restore_key": _compat(
        "samples:set_sample_restore_key", "other", "keys are the loader's; the sample is returned as it is"
    ),
    "add_source_info": _compat("samples:add_source_info"),
    "get_source_info": _compat("samples:get_source_info"),
    "default_get_batch_keys": _compat("samples:default_get_batch_keys"),
    "format_sample_compact": _compat("samples:format_sample_compact"),
    "format_sample_detailed": _compat("samples:format_sample_detailed"),
    # -- errors
    "SampleException": Name("energon_lite.errors:SampleException"),
    "FatalSampleError": Name("energon_lite.errors:FatalSampleError"),
    "EmptyDatasetError": Name("energon_lite.errors:EmptyDatasetError"),
    "FieldAccessError": Name("energon_lite.errors:FieldAccessError"),
    "SYSTEM_EXCEPTIONS": _compat("errors:SYSTEM_EXCEPTIONS"),
    "ErrorContext": _compat("errors:ErrorContext", "same", "for wrappers of your own; hooks here need none"),
    "handle_restore_errors": _compat("errors:handle_restore_errors"),
    # -- documents
    "EPath": Name(
        "energon_lite.storage.files.epath:EPath", "other", "over fsspec; `msc://` needs multi-storage-client"
    ),
    "DEFAULT_PROFILE_NAME": Name("energon_lite.storage.files.epath:DEFAULT_PROFILE_NAME"),
    "NVDATASET_CACHE_DIR": _compat(
        "fields:NVDATASET_CACHE_DIR", "other", "to be read; the environment variable says where `dss://` is"
    ),
    "DatasetBlendMode": Name("energon_lite.extras.energon.factories.loaders:DatasetBlendMode"),
    "LoadedDataset": Name("energon_lite.extras.energon.factories.loaders:LoadedDataset"),
    "LoadedDatasetList": Name("energon_lite.extras.energon.factories.loaders:LoadedDatasetList"),
    "TraversedDatasetReference": Name("energon_lite.extras.energon.factories.loaders:TraversedDatasetReference"),
    "DatasetSubset": Name("energon_lite.extras.energon.factories.loaders:DatasetSubset"),
    "FilteredSample": _compat("samples:FilteredSample", "same", "what `load_sample` of a data set class is given"),
    "EnergonDatasetType": Name("energon_lite.extras.energon.factories.kinds:EnergonDatasetType"),
    "WebdatasetMeta": Name("energon_lite.extras.energon.factories.kinds:WebdatasetMeta"),
    "get_dataset_type": Name("energon_lite.extras.energon.factories.kinds:get_dataset_type"),
    "get_dataset_from_config": Name("energon_lite.extras.energon.factories.loaders:get_dataset_from_config"),
    "load_config": _compat(
        "json_parser:load_config", "other", "a data set's `dataset.yaml`, or data of a dataclass; no class is imported"
    ),
    "WebdatasetPreparator": Name("energon_lite.extras.energon.factories.webdataset:WebdatasetPreparator"),
    "MockJsonParser": _absent("it is for YAML that names classes which are not there; use yaml"),
    "AVIndexMode": _absent("how to seek is decided for each container"),
    "CacheFileLazy": _absent("it is a part of the cache pool: `cache.get_lazy` makes lazy values"),
    "GuessingHandlerWrapper": _absent("give `SampleDecoder(guess_content=True)`"),
    **dict.fromkeys(
        NODES,
        Name("energon_lite.extras.energon.factories.nodes:MetadatasetNode", "same", "the dict that stands in YAML"),
    ),
    "ShardInfo": Name("energon_lite.extras.energon.factories.kinds:ShardInfo"),
    "WebdatasetInfo": Name("energon_lite.extras.energon.factories.kinds:WebdatasetInfo"),
    "WebdatasetSplits": Name("energon_lite.extras.energon.factories.kinds:WebdatasetSplits"),
    "check_dataset_info_present": Name("energon_lite.extras.energon.factories.kinds:check_dataset_info_present"),
    "get_dataset_info": Name("energon_lite.extras.energon.factories.kinds:get_dataset_info"),
    "get_info_shard_files": Name("energon_lite.extras.energon.factories.kinds:get_info_shard_files"),
    "field_access": _compat("fields:field_access"),
    "split_field_access": _compat("fields:split_field_access"),
    "JsonParser": _compat("json_parser:JsonParser", "other", "imports nothing that data names; no `override`"),
    "JsonValueError": Name("energon_lite.errors:ConfigError"),
    "to_json_object": _compat("fields:to_json_object"),
    "SystemRng": _compat("rng:SystemRng"),
    "SystemRngState": _compat("rng:SystemRngState"),
    "WorkerRng": _compat("rng:WorkerRng", "other", "for wrappers of your own; hooks have `self.rng`, the sample's own"),
    # -- commands, which have the names of their modules
    **{f"{module}.command": _command(module) for module in COMMANDS},
    "tools.preview.command": Name("energon_lite.extras.inspect.preview.command:in_terminal"),
    "main": Name("energon_lite.cli.main:main", "better", "the commands of `energon-lite`"),
    **{f"{module.removeprefix('tools.')}_command": _command(module) for module in COMMANDS},
    "preview_command": Name("energon_lite.extras.inspect.preview.command:in_terminal"),
    "MediaFilterConfig": Name("energon_lite.extras.media:MediaFilterConfig"),
    "MediaFilterStrategy": Name("energon_lite.extras.media:MediaFilterStrategy"),
    "prepare_filesystem_dataset": _compat("media:prepare_filesystem_dataset"),
    "command_info": Name("energon_lite.cli.checkpoint:info"),
    "command_redist": Name(
        "energon_lite.cli.checkpoint:redist", "same", "rarely needed: states go on on any number of ranks"
    ),
    # -- constants
    "MAIN_FOLDER_NAME": _compat("fields:MAIN_FOLDER_NAME"),
    "INDEX_SQLITE_FILENAME": _compat("fields:INDEX_SQLITE_FILENAME"),
    "INDEX_UUID_FILENAME": _compat("fields:INDEX_UUID_FILENAME"),
    "INFO_JSON_FILENAME": _compat("fields:INFO_JSON_FILENAME"),
    "INFO_YAML_FILENAME": _compat("fields:INFO_YAML_FILENAME"),
    "SPLIT_YAML_FILENAME": _compat("fields:SPLIT_YAML_FILENAME"),
    "DEFAULT_DECODER": _compat("fields:DEFAULT_DECODER"),
    "AVDecoderType": _compat("fields:AVDecoderType"),
    "ImageDecoderType": _compat("fields:ImageDecoderType"),
    "AV_DECODE_AVAILABLE": _compat("fields:AV_DECODE_AVAILABLE"),
    # -- audio, video, media, stores
    "AVDecoder": Name("energon_lite.extras.media:AVDecoder"),
    "AVData": Name("energon_lite.extras.media:AVData"),
    "AVProbeIndex": _compat("media:AVProbeIndex"),
    "AVWebdatasetDecoder": Name("energon_lite.extras.media:AVWebdatasetDecoder"),
    "get_clips_uniform": Name("energon_lite.extras.media:get_clips_uniform"),
    "get_single_frames_uniform": Name("energon_lite.extras.media:get_single_frames_uniform"),
    "AVMetadata": Name("energon_lite.extras.media:AVMetadata"),
    "ImageMetadata": Name("energon_lite.extras.media:ImageMetadata"),
    "MediaMetadataBase": Name("energon_lite.extras.media:MediaMetadataBase"),
    "MediaMetadataType": Name("energon_lite.extras.media:MediaMetadataType"),
    "serialize_media_metadata": Name("energon_lite.extras.media:serialize_media_metadata"),
    "deserialize_media_metadata": Name("energon_lite.extras.media:deserialize_media_metadata"),
    "FileStoreWrapper": Name("energon_lite.storage.stores:FileStoreWrapper"),
    "JsonlFileStore": Name("energon_lite.extras.media:JsonlFileStore"),
    "WebdatasetFileStore": Name("energon_lite.extras.media:WebdatasetFileStore"),
    **{
        name: _here(name, "other", _TYPED)
        for name in MODULES["flavors"].split()
        if name.endswith("Webdataset") and name != "CrudeWebdataset"
    },
    **{name: Name(f"energon_lite.extras.tools.transforms:{name}") for name in MODULES["transforms"].split()},
}


def meaning(name: str, module: str = "") -> Name:
    """Return the counterpart of a public name; for a name with several meanings, that in the given module.

    Example:
        >>> meaning("SkipSample")
        Name(ours='energon_lite.extras.energon:SkipSample', verdict='same', note='')
    """
    return NAMES.get(f"{module}.{name}") or NAMES.get(name) or _here(name)
