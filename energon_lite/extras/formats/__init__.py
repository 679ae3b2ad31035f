"""Data sets of other formats than tar: Parquet, Arrow, JSONL, Megatron's ``.bin`` and ``.idx``, MDS, Lance.

Each is a :class:`~energon_lite.storage.read.source.Source`, like a source of the user's; the table ``SOURCES`` maps
paths to formats. ``energon-lite convert`` writes some of them. Packages that a format needs are imported when a data
set of it is opened.
"""

from energon_lite.entry_points import Command, SourceFormat

_GROUP = "Other formats"

COMMANDS = {
    "convert": Command(
        "energon_lite.extras.formats.convert_command:command",
        "Write a data set in another format: tar, MDS, Parquet, JSONL.",
        _GROUP,
    ),
}
SOURCES = {
    "parquet": SourceFormat("energon_lite.extras.formats.tables:open_source", (".parquet",)),
    "arrow": SourceFormat("energon_lite.extras.formats.tables:open_source", (".arrow", ".feather")),
    "lance": SourceFormat("energon_lite.extras.formats.lance:open_source", (".lance",)),
    "megatron": SourceFormat("energon_lite.extras.formats.megatron:open_source", (".idx", ".bin")),
    "megatron_sequences": SourceFormat("energon_lite.extras.formats.megatron:open_sequences"),
    "mds": SourceFormat("energon_lite.extras.formats.mds:open_source", marker="index.json"),
}
STORAGE_GUESTS = {"jsonl": "energon_lite.extras.formats.jsonl_index:index_of"}
