"""Storage: reading the bytes of samples, and the indexes of their places.

Its folders, each of which uses those before it: ``files``, ``index`` (the places of samples, and columns of measured
values), ``read``, ``samples`` (decoding of parts). Its modules scan tars (``tar_scan``), share the units of long jobs
among ranks and processes (``sharded_job``), and prepare data sets (``prepare``).
"""

from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
