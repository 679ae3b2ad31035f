"""User hooks: functions that process each sample and assemble samples into a batch."""

from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
