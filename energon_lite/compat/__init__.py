"""Energon's names over ours: code that cannot change its imports finds energon_lite under ``megatron.energon``.

    import energon_lite.compat
    energon_lite.compat.install()                       # before anything imports megatron.energon

    python -m energon_lite.compat train.py --lr 1e-4    # or so, without a change to the script
    torchrun --nproc-per-node 8 -m energon_lite.compat train.py

What each name is here stands in ``names.py``, which is data.
"""

from energon_lite.compat.install import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
