"""torch's collectives that cut one tensor over the ranks, and put it together again, by their newer names.

torch 2.13 renamed them and warns of the former names, which are the only ones that torch 2.6 has. They are called with
torch's own arguments: ``reduce_scatter(part, whole, group=group)`` sums ``whole`` over the ranks and puts the part that
has this rank's number into ``part``; ``all_gather(whole, part, ...)`` puts the ranks' parts one after the other into
``whole``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
