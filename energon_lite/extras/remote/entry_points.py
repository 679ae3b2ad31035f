"""Entry points of the extra ``remote``."""

_HERE = "energon_lite.extras.remote"
STORAGE_GUESTS = {
    "url_files": f"{_HERE}.url_files:FILES",
    "url_datasets": f"{_HERE}.remote_index:DATASETS",
    "range_cache": f"{_HERE}.range_cache:shared_range_cache",
    "reader_ahead": f"{_HERE}.run_reader:RunReader",
    "prepare_url": f"{_HERE}.prepare_url:prepare_url",
}
