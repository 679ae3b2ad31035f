"""Workers on other machines, by TCP or as Ray actors, and the pool that mixes them with local ones."""

from energon_lite.entry_points import Command, UnitRunner
from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)

COMMANDS = {
    "serve": Command(
        "energon_lite.extras.remote_workers.server:command",
        "Run workers for trainers on other machines.",
        "Machines",
    ),
}
UNIT_RUNNERS = {
    "ray": UnitRunner(
        "energon_lite.extras.remote_workers.ray_tasks:run_units",
        "Work in tasks of a Ray cluster.  [default: $RAY_ADDRESS]",
        "[=ADDRESS]",
    )
}
WORKERS = {
    "tcp": "energon_lite.extras.remote_workers.tcp_workers:open_pool",
    "ray": "energon_lite.extras.remote_workers.ray_workers:open_pool",
}
