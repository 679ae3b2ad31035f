"""Entry points of the extra ``remote_workers``."""

from energon_lite.entry_points import Command, UnitRunner

COMMANDS = {
    "serve": Command(
        "energon_lite.extras.remote_workers.serve_command:command",
        "Run workers for trainers on other machines.",
        "Machines",
    ),
}
UNIT_RUNNERS = {
    "ray": UnitRunner(
        "energon_lite.extras.remote_workers.ray_tasks:run_units",
        "Work in tasks of Ray.",
        "[=ADDRESS]",
    )
}
WORKERS = {
    "tcp": "energon_lite.extras.remote_workers.tcp_workers:open_pool",
    "ray": "energon_lite.extras.remote_workers.ray_workers:open_pool",
}
