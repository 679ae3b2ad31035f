"""Ranks of a model's parallel layout that use the same batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Share = Literal["load", "broadcast"]
Stages = Literal["first", "ends", "all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """Ranks that use the same batches as this one: its peers along the axes ``pp``, ``cp`` and ``tp``.

    Args:
        coordinates: this rank's coordinate on each of these axes; an axis that is not named has one rank.
        groups: the process group of each axis with more than one rank.
        stages: number of pipeline stages.
        share: ``load``: every rank that needs the batch loads it; ``broadcast``: one loads it, and sends it to others.
        stages_with_data: the stages that need batches: the first, the first and the last, or all.
        last_stage_fields: the fields of a batch that the last stage needs; None: all.
    """

    coordinates: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)
    stages: int = 1
    share: Share = "load"
    stages_with_data: Stages = "first"
    last_stage_fields: tuple[str, ...] | None = None

    @property
    def is_first(self) -> bool:
        """True on the rank that represents the replica: it saves the state."""
        return not any(self.coordinates.values())

    @property
    def needs_data(self) -> bool:
        """True if this rank's stage needs batches."""
        return self.coordinates.get("pp", 0) in self.fed_stages

    @property
    def fed_stages(self) -> tuple[int, ...]:
        """Numbers of the stages that need batches."""
        last = {"first": 1, "ends": 2, "all": self.stages}[self.stages_with_data]
        return tuple(range(self.stages)) if last >= self.stages else (0, self.stages - 1)[:last]

    @property
    def reads(self) -> bool:
        """True if this rank makes batches itself."""
        return self.is_first if self.share == "broadcast" else self.needs_data

    @property
    def is_last_stage(self) -> bool:
        return self.stages > 1 and self.coordinates.get("pp", 0) == self.stages - 1


class RankMesh(Protocol):
    """A mesh that has torch's with the same axes, or None if there is one rank, such as the trainer's."""

    @property
    def device_mesh(self) -> DeviceMesh | None: ...
