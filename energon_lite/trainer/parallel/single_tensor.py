"""torch's collectives that scatter and gather one tensor, by their newer names.

torch 2.13 renamed them and warns about the former names, which are the only ones in torch 2.6. Their arguments are
torch's: ``reduce_scatter(part, whole, group=group)`` sums ``whole`` over the ranks and writes this rank's part of the
sum into ``part``; ``all_gather(whole, part, ...)`` concatenates the ranks' parts into ``whole``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
