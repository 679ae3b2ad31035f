"""Entry points of the extra ``balance``."""

from energon_lite.entry_points import Command

_GROUP = "Costs"

COMMANDS = {
    "profile": Command(
        "energon_lite.extras.balance.profile_command:command",
        "Find the largest capacity with which a training step fits into memory.",
        _GROUP,
    ),
}
