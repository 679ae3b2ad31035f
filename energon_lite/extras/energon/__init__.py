"""Energon's names: code written for Energon finds energon_lite under ``megatron.energon``.

    import energon_lite.extras.energon
    energon_lite.extras.energon.install()                       # before anything imports megatron.energon

    python -m energon_lite.extras.energon train.py --lr 1e-4    # or so, without a change to the script
    torchrun --nproc-per-node 8 -m energon_lite.extras.energon train.py

All public names of Energon can be imported from here, too: the core's own, factories, wrappers of data sets, stores.
``compat/names.py``, which is data, says what each name is here.
"""

from energon_lite.entry_points import Command, PrepareStep
from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)

COMMANDS = {
    "filter": Command(
        "energon_lite.extras.energon.commands:command",
        "Store the samples of a data set that meet a condition, such as tokens <= 4096, under a name.",
        "Filters",
    ),
    "checkpoint redist": Command(
        "energon_lite.extras.energon.commands:redist",
        "Divide the state of a run among another number of ranks, with a file for each.",
    ),
}
PREPARE_STEPS = {
    "prepare": PrepareStep(
        "energon_lite.extras.energon.unique_keys:fix_duplicates_option",
        "energon_lite.extras.energon.unique_keys:begin",
        "--fix-duplicates",
    ),
}
STORAGE_GUESTS = {
    "index.sqlite": "energon_lite.extras.energon.index_sqlite:DATABASE",
    "prepare_dialogue": "energon_lite.extras.energon.prepare_dialogue:DIALOGUE",
}
METADATASET_KEYS = {
    "filter": "energon_lite.extras.energon.sample_filters:SampleFilter",
    "join": "energon_lite.extras.energon.joined_source:JOIN",
}
KEYWORDS = {"energon": "energon_lite.extras.energon.keywords:KEYWORDS"}
