"""Entry points of the extra ``energon``."""

METADATASET_KEYS = {"join": "energon_lite.extras.energon.joins.joined_source:JOIN"}
