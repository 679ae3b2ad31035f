"""Paths of batches: copies to a device ahead of the step, and broadcasts within a replica."""

BATCH_PATHS = {
    "copy": "energon_lite.extras.device.copies:copies_ahead",
    "replica": "energon_lite.extras.device.replica:ReplicaPath",
}
