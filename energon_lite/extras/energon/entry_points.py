"""Entry points of the extra ``energon``."""

METADATASET_KEYS = {"join": "energon_lite.extras.energon.joins.opening:JOIN"}
