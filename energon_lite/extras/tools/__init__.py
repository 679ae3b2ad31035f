"""Tools that stand alone: packed lists, order arrays, merged geometric transforms, rows of images and text."""

from energon_lite.entry_points import Command
from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)

COMMANDS = {
    "completion": Command(
        "energon_lite.extras.tools.completion_command:command",
        "Write the completion script of a shell.",
        "Other commands",
    ),
}
