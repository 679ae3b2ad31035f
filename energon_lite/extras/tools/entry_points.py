"""Entry points of the tools that stand alone."""

from energon_lite.entry_points import Command

COMMANDS = {
    "doctor": Command(
        "energon_lite.extras.tools.doctor.command:command",
        "Examine this machine, and the ranks of a launch: what is wrong, and what to do.",
        "Trainer",
    ),
}
