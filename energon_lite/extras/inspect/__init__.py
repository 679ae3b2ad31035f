"""Tools to look at data and runs: preview, lint, audit, traces, plans, tuning, profiles, and sinks of metrics."""

from energon_lite.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
