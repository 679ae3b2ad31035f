"""Blends of very many data sets, with a cache of their properties, weights that are shares of tokens, and rebases."""

from energon_lite.entry_points import Command
from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)

COMMANDS = {
    "checkpoint rebase": Command(
        "energon_lite.extras.blends.rebase:command",
        "Continue a run with a changed blend or batch size.",
    ),
}
BLEND_OPENERS = {"very_large": "energon_lite.extras.blends.opening:open_blend"}
METADATASET_KEYS = {
    "weight": "energon_lite.extras.blends.staged_run:SCHEDULES",
    "weight_unit": "energon_lite.extras.blends.token_weights:WEIGHTS",
}
