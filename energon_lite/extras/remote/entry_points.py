"""Entry points of the extra ``remote``."""

_DIRECT = "energon_lite.extras.remote.direct_ranges:direct_ranges"
RANGE_READERS = {"s3": _DIRECT, "s3a": _DIRECT, "http": _DIRECT, "https": _DIRECT}
STORAGE_GUESTS = {"prepare_url": "energon_lite.extras.remote.prepare_url:PREPARER"}
