"""Tools to look at data and runs: preview, lint, audit, traces, plans, tuning, profiles, and sinks of metrics."""

from energon_lite.entry_points import Command
from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)

_GROUP = "Looking at data and runs"

COMMANDS = {
    "lint": Command(
        "energon_lite.extras.inspect.lint_command:command",
        "Examine all samples of a data set or a blend: which are broken, and how.",
        _GROUP,
    ),
    "preview": Command(
        "energon_lite.extras.inspect.preview.command:command",
        "A page to look at data: any step, samples before and after the hooks; or in the terminal.",
        _GROUP,
    ),
    "plan": Command(
        "energon_lite.extras.inspect.planning:command",
        "Compare strategies of batching (token capacity, packing) on the lengths of a data set.",
        _GROUP,
    ),
    "tune": Command(
        "energon_lite.extras.inspect.tune_command:command",
        "Find the number and kind of workers that load a data set fastest on this machine.",
        _GROUP,
    ),
    "trace": Command(
        "energon_lite.extras.inspect.trace:command",
        "Show a loader's trace: time by stage, slow samples, uses of a sample; export it for Perfetto.",
        _GROUP,
    ),
    "audit": Command(
        "energon_lite.extras.inspect.audit:command",
        "Show when a sample was trained on; compare a run with its plan, or with another run.",
        _GROUP,
    ),
    "analyze-debug": Command(
        "energon_lite.extras.inspect.analyze_debug:command", "Draw traces as a picture: samples against steps.", _GROUP
    ),
}
OBSERVERS = {
    "trace": "energon_lite.extras.inspect.trace:TraceFile",
    "quarantine": "energon_lite.extras.inspect.quarantine:Quarantine",
    "bottleneck": "energon_lite.extras.inspect.bottleneck:Bottleneck",
    "log_every": "energon_lite.extras.inspect.progress:ProgressLog",
    "metrics": "energon_lite.extras.inspect.progress:MetricsWriter",
}
