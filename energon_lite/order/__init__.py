"""Which sample is the n-th: integers only, closed form, no I/O, no torch.

``permutation`` shuffles, ``blend`` mixes, ``stages`` lets the weights of a blend change, ``shuffle`` orders one leaf,
``tree`` puts them together; ``arrays`` writes a blend down for those who want it as files. Every function here gives
the same values in every process, on every machine, for ever; if that ever has to change, ``ORDER_VERSION`` changes with
it, and states saved under another version are refused.
"""

from energon_lite.order.arrays import build_blend_index, shuffle_ahead
from energon_lite.order.stages import Stage
from energon_lite.order.tree import Addresses, BlendOrder, ConcatOrder, EpochBlendOrder, Order

__all__ = [
    "ORDER_VERSION",
    "Addresses",
    "BlendOrder",
    "ConcatOrder",
    "EpochBlendOrder",
    "Order",
    "Stage",
    "build_blend_index",
    "shuffle_ahead",
]

#: Written into every saved state.
ORDER_VERSION = 2
