"""Object stores: data sets behind URLs, ranges read ahead, caches on local disks, and preparation there."""

from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)

_HERE = "energon_lite.extras.remote"
STORAGE_GUESTS = {
    "url_files": f"{_HERE}.remote_files:FILES",
    "url_datasets": f"{_HERE}.remote_index:DATASETS",
    "range_cache": f"{_HERE}.read_ahead:shared_range_cache",
    "reader_ahead": f"{_HERE}.read_ahead:RunReader",
    "prepare_url": f"{_HERE}.prepare_url:prepare_url",
}
