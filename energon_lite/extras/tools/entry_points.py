"""Entry points of the extra ``tools``."""

from energon_lite.entry_points import Command

COMMANDS = {
    "completion": Command(
        "energon_lite.extras.tools.completion_command:command",
        "Write the completion script of a shell.",
        "Other commands",
    ),
}
