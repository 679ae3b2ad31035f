"""Entry points of the extra ``energon``."""

from energon_lite.entry_points import Command, PrepareStep

COMMANDS = {
    "filter": Command(
        "energon_lite.extras.energon.filter_command:command",
        "Store the samples of a data set that meet a condition, such as tokens <= 4096, under a name.",
        "Filters",
    ),
    "checkpoint redist": Command(
        "energon_lite.extras.energon.redist_command:redist",
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
