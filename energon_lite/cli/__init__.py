"""Command line of the library, one module for each command.

Commands of guests import from this package: options and progress of a job (``job_options``, ``progress``,
``show_share``), values of options (``ExistingPath``, ``json_object``, ``parse_bytes``, ``make_task_encoder``,
``batching_argument``) and tables (``aligned``).
"""

from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
