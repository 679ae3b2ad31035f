"""Draw what the stages of a pipeline did in a step of a real run, and how much of the time they waited.

    python examples/train.py run.yaml mesh.pp=4 train.profile=[5,6]
    python tools/draw_schedule.py output/profile schedule.png --trace schedule.json

The picture has a row for each stage and a bar for each pass of a micro-batch. What is white is the bubble. ``--trace``
also writes the passes of all stages as one Chrome trace, for chrome://tracing or ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FORWARD, _BACKWARD = ("#7fb2dd", "#3f78ab"), ("#f2b56b", "#c97f1e")


@dataclass(frozen=True)
class Pass:
    """One pass of a micro-batch through a chunk of a stage; ``began`` and ``ended`` in seconds."""

    step: int
    stage: int
    chunk: int
    micro_batch: int
    backward: bool
    began: float
    ended: float


def read_passes(folder: Path) -> list[Pass]:
    """The passes of one pipeline: of the ranks that are first on all other axes."""
    found: list[Pass] = []
    for path in sorted(folder.glob("passes-rank*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if any(document["place"][axis] for axis in ("dp", "cp", "tp")):
            continue
        for event in document["traceEvents"]:
            if event["ph"] == "X":
                began, where = event["ts"] / 1e6, event["args"]
                ended = began + event["dur"] / 1e6
                place = (where["step"], where["stage"], where["chunk"], where["micro_batch"])
                found.append(Pass(*place, event["cat"] == "backward", began, ended))
    if not found:
        raise SystemExit(f"{folder} has no passes-rank*.json: train with train.profile=[first,last]")
    return found


def bubble(passes: Sequence[Pass]) -> float:
    """The share of a step's time in which a stage does nothing, on average over stages."""
    stages = {one.stage for one in passes}
    return 1 - sum(one.ended - one.began for one in passes) / (span(passes) * len(stages))


def span(passes: Sequence[Pass]) -> float:
    """Seconds from the first pass to the end of the last."""
    return max(one.ended for one in passes) - min(one.began for one in passes)


def ideal_bubble(stages: int, micro_batches: int, chunks: int) -> float:
    """The same if all passes took equally long and messages no time (Narayanan et al., arXiv:2104.04473)."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def draw(path: Path, passes: Sequence[Pass]) -> str:
    """Draw a step; returns the caption."""
    from matplotlib.figure import Figure

    first = min(one.began for one in passes)
    stages = max(one.stage for one in passes) + 1
    chunks = max(one.chunk for one in passes) + 1
    count = max(one.micro_batch for one in passes) + 1
    figure = Figure(figsize=(12, 1.3 + 0.7 * stages), layout="constrained")
    axes = figure.subplots()
    for one in passes:
        colour = (_BACKWARD if one.backward else _FORWARD)[one.chunk % 2]
        start, length = (one.began - first) * 1e3, (one.ended - one.began) * 1e3
        axes.barh(one.stage, length, left=start, height=0.82, color=colour, edgecolor="white", lw=0.8)
        axes.text(start + length / 2, one.stage, str(one.micro_batch), ha="center", va="center", fontsize=9)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.margins(x=0.005)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    kind = "1F1B" if chunks == 1 else f"interleaved, {chunks} chunks a stage (the second one darker)"
    caption = (
        f"{kind}: {stages} stages, {count} micro-batches; blue forward, orange backward. "
        f"Bubble {bubble(passes):.0%}, with equal passes {ideal_bubble(stages, count, chunks):.0%}"
    )
    axes.set_title(caption, fontsize=11)
    figure.savefig(path, dpi=120)
    return caption


def merged_trace(folder: Path) -> dict[str, Any]:
    """The passes of all ranks in one Chrome trace."""
    documents = [json.loads(path.read_text()) for path in sorted(folder.glob("passes-rank*.json"))]
    return {"traceEvents": [event for document in documents for event in document["traceEvents"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a measured pipeline schedule.")
    parser.add_argument("folder", type=Path, help="output/profile of a run with train.profile")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    parser.add_argument("--step", type=int, help="which step; by default the quickest one")
    parser.add_argument("--trace", type=Path, help="also write one Chrome trace of all ranks")
    arguments = parser.parse_args()
    by_step: dict[int, list[Pass]] = {}
    for one in read_passes(arguments.folder):
        by_step.setdefault(one.step, []).append(one)
    step = min(by_step, key=lambda number: span(by_step[number])) if arguments.step is None else arguments.step
    if step not in by_step:
        raise SystemExit(f"step {step} was not profiled; there are {sorted(by_step)}")
    print(f"step {step}: {draw(arguments.picture, by_step[step])}")
    if arguments.trace is not None:
        arguments.trace.write_text(json.dumps(merged_trace(arguments.folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
