"""Energon's names: code that imports ``megatron.energon`` gets energon_lite instead.

    import energon_lite.compat
    energon_lite.compat.install()                       # before anything imports megatron.energon

    python -m energon_lite.compat train.py --lr 1e-4    # the same, without a change to the script
    torchrun --nproc-per-node 8 -m energon_lite.compat train.py

The table of all names is ``names.py``.
"""

from energon_lite.compat.install import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
