"""Entry points of the extra ``remote_workers``."""

from energon_lite.entry_points import Command

COMMANDS = {
    "serve": Command(
        "energon_lite.extras.remote_workers.serve_command:command",
        "Run workers for trainers on other machines.",
        "Machines",
    ),
}
WORKERS = {
    "tcp": "energon_lite.extras.remote_workers.tcp_workers:open_pool",
    "ray": "energon_lite.extras.remote_workers.ray_workers:open_pool",
}
