"""Entry points of the extra ``blends``."""

BLEND_OPENERS = {"very_large": "energon_lite.extras.blends.opening:open_blend"}
METADATASET_KEYS = {
    "weight": "energon_lite.extras.blends.staged_run:SCHEDULES",
    "weight_unit": "energon_lite.extras.blends.token_weights:WEIGHTS",
}
