"""Which sample is the n-th: integers only, closed form, no I/O, no torch.

``permutation`` shuffles, ``blend`` mixes, ``stages`` lets the weights of a blend change, ``shuffle`` orders one leaf,
``orders`` puts them together. Every function here gives the same values in every process, on every machine, for ever;
if that ever has to change, ``ORDER_VERSION`` changes with it, and states saved under another version are refused.
"""

from energon_lite.order.orders import Addresses, BlendOrder, ConcatOrder, EpochBlendOrder, Order
from energon_lite.order.stages import WeightStage

__all__ = [
    "ORDER_VERSION",
    "Addresses",
    "BlendOrder",
    "ConcatOrder",
    "EpochBlendOrder",
    "Order",
    "WeightStage",
]

#: Written into every saved state.
ORDER_VERSION = 2
