"""Energon's names: code written for Energon finds energon_lite under ``megatron.energon``.

    import energon_lite.extras.energon
    energon_lite.extras.energon.install()                       # before anything imports megatron.energon

    python -m energon_lite.extras.energon train.py --lr 1e-4    # or so, without a change to the script
    torchrun --nproc-per-node 8 -m energon_lite.extras.energon train.py

All public names of Energon can be imported from here, too: the core's own, factories, wrappers of data sets, stores.
``compat/names.py``, which is data, says what each name is here.
"""

from energon_lite.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
