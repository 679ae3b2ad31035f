"""Entry points of the extra ``device``."""

BATCH_PATHS = {
    "copy": "energon_lite.extras.device.copies:copies_ahead",
    "replica": "energon_lite.extras.device.replica:ReplicaPath",
}
