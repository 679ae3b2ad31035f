"""Energon's modules and names over ours: what stands where under ``megatron.energon``.

Here are the public modules of Energon 7.4.1, and the names of each. ``names.py`` has the counterparts of the names.
"""

from __future__ import annotations

import re

PACKAGE = "megatron.energon"
#: Version of Energon whose names are provided.
VERSION = "7.4.1"

_SAMPLES = """CaptioningSample CaptioningWebdataset CrudeSample CrudeWebdataset ImageClassificationSample
ImageClassificationWebdataset ImageSample ImageWebdataset InterleavedSample InterleavedWebdataset MultiChoiceVQASample
MultiChoiceVQAWebdataset OCRSample OCRWebdataset Sample SimilarityInterleavedSample SimilarityInterleavedWebdataset
TextSample TextWebdataset VidQASample VidQAWebdataset VQAOCRWebdataset VQASample VQAWebdataset SavableDataset"""
_FLAVORS = "Captioning Crude Image ImageClassification Interleaved OCR SimilarityInterleaved Text VidQA VQA"
_FACTORIES = """BaseWebdatasetFactory DefaultDecoderWebdatasetFactory DefaultGenericWebdatasetFactory
JoinedWebdatasetFactory SampleDecoder StandardWebdatasetFactory"""
_JSONL = "CrudeJsonlDatasetFactory DefaultCrudeJsonlDatasetFactory"
_CACHE = """CachePool DecodeFileStore DirectLazy FileCacheLazy FileStore FileStoreCachePool FileStoreDecoder Lazy
MockLazy NoCachePool PrimaryFileStore SystemFileStore"""
_WRAPPERS = """BatchDataset BlendDataset ConcatDataset EpochizeDataset FilterDataset GcDataset GroupBatchDataset
IterMapDataset LimitDataset LogSampleDataset MapDataset MixBatchDataset PackingDataset RepeatDataset
ShuffleBufferDataset concat_pad generic_concat homogeneous_concat_mix"""
_COLLATION = "batch_list batch_pad_stack batch_stack generic_batch"
_RECIPES = "get_train_dataset get_val_dataset get_val_datasets"
_LOADERS = "get_loader get_savable_loader"
_METADATASETS = """DatasetLoader DatasetLoaderInterface Metadataset MetadatasetV2 load_dataset prepare_metadataset
traverse_metadataset"""
_AV = "AVData AVDecoder"
_FLAVORS_AV = "AVDecoderType ImageDecoderType WebdatasetMeta EmptyDatasetError"
_MEDIA = """AVMetadata ImageMetadata MediaMetadataBase MediaMetadataType deserialize_media_metadata
serialize_media_metadata"""
_TRANSFORMS = """TransformMapper ResizeMapper RandomResizedCropMapper CenterCropMapper RandomCropMapper
RandomHorizontalFlipMapper RandomVerticalFlipMapper RandomRotationMapper RandomPerspectiveMapper"""

_NODES = """AuxDatasetReference AuxFilesystemReference BlendDatasetReference BlendEpochizedDatasetReference
BlendEpochizedJoinDatasetReference BlendJoinDatasetReference BlendRepetitionsMixin BlendWeightMixin DatasetReference
JoinDatasetReference MetadatasetBlend MetadatasetBlendEpochized MetadatasetJoin Subset SubsetRatioMixin"""


def _module_of(name: str) -> str:
    """Return the name of the module of a class."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()


#: Modules with a click command.
COMMANDS = tuple(
    f"tools.{name}"
    for name in ("analyze_debug", "checkpoint", "info", "lint", "mount", "prepare", "prepare_media", "preview")
)

#: Public names by module (below :data:`PACKAGE`; the empty name is the package itself).
MODULES: dict[str, str] = {
    "": f"""__version__ {_SAMPLES} {_FACTORIES} {_JSONL} {_CACHE} {_WRAPPERS} {_COLLATION} {_RECIPES} {_LOADERS}
        {_METADATASETS} AugmentTaskEncoder BaseCoreDatasetFactory Batch Cooker DefaultTaskEncoder SavableDataLoader
        SkipSample SourceInfo TaskEncoder WorkerConfig basic_sample_keys cooker edataclass log_exception
        reraise_exception stateless""",
    "av": f"{_AV} AVWebdatasetDecoder get_clips_uniform get_single_frames_uniform",
    "av.av_data": "AVData",
    "av.av_decoder": "AVDecoder AVIndexMode AVWebdatasetDecoder AV_DECODE_AVAILABLE",
    "av.utils": "get_clips_uniform get_single_frames_uniform",
    "cache": _CACHE,
    "cache.base": "CachePool FileStore FileStoreDecoder FileStoreWrapper Lazy MockLazy PrimaryFileStore",
    "cache.file_cache_pool": "CacheFileLazy FileCacheLazy FileStoreCachePool",
    "cache.file_store": "DecodeFileStore JsonlFileStore SystemFileStore WebdatasetFileStore",
    "cache.no_cache": "DirectLazy NoCachePool",
    "dataset_config": "get_dataset_from_config load_config",
    "edataclass": "edataclass",
    "epathlib": "EPath DEFAULT_PROFILE_NAME",
    "epathlib.epath": "EPath DEFAULT_PROFILE_NAME NVDATASET_CACHE_DIR",
    "errors": """FatalSampleError SampleException SkipSample SYSTEM_EXCEPTIONS ErrorContext handle_restore_errors
        log_exception reraise_exception""",
    "flavors": f"{_SAMPLES} {_FACTORIES} {_JSONL} {_AV} {_FLAVORS_AV} BaseCoreDatasetFactory PinMemoryMixin",
    "flavors.base_dataset": """BaseCoreDatasetFactory ExtendableDataclassMixin PinMemoryMixin Sample SavableDataset
        State add_sample_restore_key legacy_handler set_sample_restore_key""",
    **{f"flavors.{_module_of(kind)}": f"{kind}Sample {kind}Webdataset" for kind in _FLAVORS.split()},
    "flavors.jsonl": _JSONL,
    "flavors.jsonl.crude_jsonl_dataset": _JSONL,
    "flavors.multichoice_vqa": "MultiChoiceVQASample MultiChoiceVQAWebdataset",
    "flavors.vqa_and_ocr": "VQAOCRSample VQAOCRWebdataset",
    "flavors.webdataset": f"{_FACTORIES} {_AV} {_FLAVORS_AV}",
    "flavors.webdataset.base_webdataset": "BaseWebdatasetFactory",
    "flavors.webdataset.config": """MAIN_FOLDER_NAME INDEX_SQLITE_FILENAME INDEX_UUID_FILENAME INFO_JSON_FILENAME
        INFO_YAML_FILENAME SPLIT_YAML_FILENAME""",
    "flavors.webdataset.default_decoder_webdataset": "DefaultDecoderWebdatasetFactory DEFAULT_DECODER",
    "flavors.webdataset.default_generic_webdataset": "DefaultGenericWebdatasetFactory",
    "flavors.webdataset.empty_dataset_error": "EmptyDatasetError",
    "flavors.webdataset.field_access": "FieldAccessError field_access split_field_access",
    "flavors.webdataset.joined_webdataset": "JoinedWebdatasetFactory",
    "flavors.webdataset.metadata": """EnergonDatasetType WebdatasetMeta check_dataset_info_present get_dataset_info
        get_dataset_type get_info_shard_files""",
    "flavors.webdataset.sample_decoder": """SampleDecoder DEFAULT_DECODER AVDecoderType GuessingHandlerWrapper
        ImageDecoderType""",
    "flavors.webdataset.standard_webdataset": "StandardWebdatasetFactory",
    "flavors.webdataset.structs": "DatasetSubset FilteredSample ShardInfo WebdatasetInfo WebdatasetSplits",
    "loader": _LOADERS,
    "media": _MEDIA,
    "media.extractor": "MediaFilterConfig MediaFilterStrategy",
    "media.filesystem_prepare": "prepare_filesystem_dataset",
    "media.metadata": _MEDIA,
    "metadataset": _METADATASETS,
    "metadataset.dataset_loader": "DatasetLoader",
    "metadataset.loader": "MockJsonParser load_dataset prepare_metadataset traverse_metadataset",
    "metadataset.loader_interface": """DatasetBlendMode DatasetLoaderInterface LoadedDataset LoadedDatasetList
        TraversedDatasetReference""",
    "metadataset.metadataset": "DatasetReference Metadataset MetadatasetBlender",
    "metadataset.metadataset_v2": f"{_NODES} MetadatasetV2",
    "rng": "SystemRng SystemRngState WorkerRng",
    "sample_utils": "default_get_batch_keys format_sample_compact format_sample_detailed",
    "savable": "Savable",
    "savable_loader": """BasicDataLoader SavableCheckpoint SavableDataLoader SavableDataLoaderState
        SavableDatasetCheckpoint SavableDatasetState SavableDatasetWrapper SimpleSavableDatasetWrapper""",
    "source_info": "SourceInfo add_source_info get_source_info",
    "state": "FlexState",
    "task_encoder": f"""{_COLLATION} {_RECIPES} AugmentTaskEncoder Batch Cooker DefaultTaskEncoder TaskEncoder
        basic_sample_keys cooker stateless""",
    "task_encoder.base": f"""{_COLLATION} AugmentTaskEncoder Batch DefaultTaskEncoder TaskEncoder stateless
        get_stateless get_failure_tolerance""",
    "task_encoder.cooking": "Cooker basic_sample_keys cooker get_cooker_need_cache get_cooker_need_primary",
    "task_encoder.loader": _RECIPES,
    **dict.fromkeys(COMMANDS, "command"),
    "tools.checkpoint": "command command_info command_redist",
    "transforms": f"{_TRANSFORMS} MergeTransform CustomTransform",
    "transforms.custom": "CustomTransform",
    "transforms.mappers": _TRANSFORMS,
    "transforms.merge": "MergeTransform",
    "typed_converter": "JsonParser JsonValueError to_json_object",
    "worker": "WorkerConfig",
    "wrappers": f"{_WRAPPERS} SkipSample",
    **{f"wrappers.{_module_of(name)}": name for name in _WRAPPERS.split() if name.endswith("Dataset")},
    "wrappers.base": "BaseWrapperDataset SampleIndex get_sample_restore_key",
    "wrappers.gc_dataset": "GcDataset GcFreezeError gc_init_worker",
    "wrappers.group_batch_dataset": "Bucket GroupBatchDataset",
    "wrappers.mix_batch_dataset": "MixBatchDataset concat_pad generic_concat homogeneous_concat_mix",
    "wrappers.skip": "SkipSample",
    "wrappers.watchdog_dataset": "WatchdogDataset",
}

#: Names of internal modules that programs and tests import.
PARTLY: dict[str, str] = {
    "av.av_reader": "AVProbeIndex",
    "cli.main": " ".join(["main", *(f"{name.removeprefix('tools.')}_command" for name in COMMANDS)]),
    "flavors.jsonl.ijsonl": "IJsonlIndexReader IJsonlIndexWriter",
    "flavors.webdataset.prepare": "WebdatasetPreparator",
}

#: Internal modules of Energon, by the start of their names, and their replacements.
INTERNAL: dict[str, str] = {
    "av.av_init": "opens containers for AVDecoder: use AVDecoder",
    "av.av_reader": "seeks in containers for AVDecoder: use AVDecoder",
    "bracecollapse": "writes brace patterns for prepare: the braceexpand package reads them",
    "cli": "runs the commands, which are those of energon-lite",
    "deprecation": "warns of Energon's own old names",
    "epathlib.rclone_config": "reads rclone's settings: write the store's credentials as fsspec or boto3 take them",
    "eyaml": "reads YAML: use the yaml package",
    "flavors.jsonl": "reads lines by their offsets: load_dataset, or a loader, of the .jsonl file",
    "flavors.webdataset": "reads and indexes tars: a data set, `energon-lite prepare`, or energon_lite.storage.Source",
    "fork_hook": "mends Energon's threads after a fork: there are none to be mended",
    "local_copy": "copies remote indexes: they are kept in the cache of energon_lite",
    "metadataset.join_dataset_loader": "opens joins: write a join in the metadataset",
    "module_loader": "imports code that YAML names: importlib, and trust_code=True",
    "retry_stream": "reads again after errors: readers here do so by themselves",
    "tools": "has no such module: the commands are those of energon-lite",
    "watchdog": "watches workers: get_loader(watchdog_timeout_seconds=...)",
    "wrappers.buffer": "keeps samples for Energon's wrappers, which have no buffers here",
}

#: Classes of entries of a metadataset.
NODES = (*_NODES.split(), "MetadatasetBlender")
