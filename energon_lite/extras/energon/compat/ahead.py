"""Names of Energon's development branch: its modules, and the counterpart of each name."""

from __future__ import annotations

from energon_lite.extras.energon.compat.names import Name

__all__ = ["AHEAD", "AHEAD_MODULES", "ForkDataLoaderWorker", "ThreadDataLoaderWorker"]

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
    "ForkDataLoaderWorker": Name("energon_lite.extras.energon.compat.ahead:ForkDataLoaderWorker"),
    "ThreadDataLoaderWorker": Name("energon_lite.extras.energon.compat.ahead:ThreadDataLoaderWorker"),
    "Recipe": Name("energon_lite.extras.energon.factories.loaders:MetadatasetV2"),
    "prepare_recipe": Name("energon_lite.extras.energon:prepare_metadataset"),
    "traverse_recipe": Name("energon_lite.extras.energon:traverse_metadataset"),
}
