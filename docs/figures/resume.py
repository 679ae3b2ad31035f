"""Draw a run that is killed on two ranks and goes on with three, as a moving picture.

    python docs/figures/resume.py            # writes docs/figures/resume.svg

The samples and the state are those of real loaders, over two small data sets that are made for it.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moving import MovingPicture

FOLDER = Path(__file__).parent
BATCH, STEPS_BEFORE, STEPS_AFTER, BEFORE, AFTER = 2, 5, 2, 2, 3
#: Units of the picture.
CELL, HIGH, GAP, WIDTH, HEIGHT = 21, 21, 4, 800, 306
STRIP_TOP, ROWS_TOP, ROW = 62, 138, 34
#: Seconds: of a round, of the first batch, from step to step, of the end and of the new beginning.
ROUND, FIRST, STEP, KILLED, RESUMED = 13.0, 0.6, 0.8, 5.2, 7.6
COLOURS = {"a": "#0072B2", "b": "#b35c00"}


@dataclass(frozen=True)
class Run:
    """What the loaders handed out.

    Args:
        before: for each rank of the first run, the keys of its batches.
        after: the same of the second one.
        state: of the first run, when it was killed.
    """

    before: list[list[list[str]]]
    after: list[list[list[str]]]
    state: dict[str, Any]

    def micro_batches(self) -> list[list[str]]:
        """All of them, in their order over the ranks of both runs."""
        return [batch for run in (self.before, self.after) for step in zip(*run, strict=True) for batch in step]


def observe(folder: Path) -> Run:
    """Run loaders on two ranks, and go on with three."""
    blend = _make_blend(folder)
    first = [_loader(blend, rank, BEFORE) for rank in range(BEFORE)]
    before = [_keys(loader, STEPS_BEFORE) for loader in first]
    state = first[0].state_dict()
    second = [_loader(blend, rank, AFTER).with_restored_state_rank(state) for rank in range(AFTER)]
    return Run(before, [_keys(loader, STEPS_AFTER) for loader in second], state)


def _make_blend(folder: Path) -> dict[str, Any]:
    import webdataset

    from energon_lite.storage.prepare import prepare_dataset

    for name in ("a", "b"):
        (folder / name).mkdir()
        with webdataset.ShardWriter(f"{folder}/{name}/%d.tar", maxcount=20, verbose=0) as writer:
            for number in range(20):
                writer.write({"__key__": f"{name}{number:02d}", "txt": "text"})
        prepare_dataset(
            folder / name, split_parts=["train:.*"], sample_type="TextSample", field_map={"text": "txt"}, workers=1
        )
    parts = [{"path": str(folder / "a"), "weight": 2}, {"path": str(folder / "b"), "weight": 1}]
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"blend": parts}}}


def _loader(blend: dict[str, Any], rank: int, world_size: int) -> Any:
    from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset

    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0)
    return get_savable_loader(get_train_dataset(blend, batch_size=BATCH, worker_config=config))


def _keys(loader: Any, steps: int) -> list[list[str]]:
    return [batch.__key__ for batch in itertools.islice(loader, steps)]


def picture(run: Run) -> str:
    """The moving picture, as SVG."""
    said = "A run on two ranks is killed; three ranks go on with the next samples, from a state of a few integers."
    image = MovingPicture(WIDTH, HEIGHT, ROUND, said)
    image.add(image.text(20, 30, "The order of a blend of two data sets: arithmetic, known to every rank"))
    image.add(image.text(20, STRIP_TOP + HIGH + 18, f"micro-batches of {BATCH} samples", "small"))
    right = 600
    for title, ranks, x in (("2 ranks", BEFORE, 20), ("3 ranks", AFTER, right)):
        rows = [image.text(x, ROWS_TOP + 31 + rank * ROW, f"rank {rank}", "small") for rank in range(ranks)]
        image.add(image.text(x, ROWS_TOP, title) + "".join(rows), f"ranks{ranks}")
    image.show(f"ranks{AFTER}", RESUMED - 0.6)
    for number, keys in enumerate(run.micro_batches()):
        early = number < BEFORE * STEPS_BEFORE
        step, rank = divmod(number if early else number - BEFORE * STEPS_BEFORE, BEFORE if early else AFTER)
        first = 20 + number * (BATCH * CELL + GAP)
        x, y = (20 if early else right) + 52 + step * (BATCH * CELL + GAP), ROWS_TOP + 16 + rank * ROW
        image.add(_cells(keys, first, STRIP_TOP), "ghost")
        image.add(_cells(keys, x, y), f"batch{number}")
        at = (FIRST if early else RESUMED) + step * STEP + rank * 0.08
        image.move(f"batch{number}", (first - x, STRIP_TOP - y), at)
    _state(image, run.state, 356)
    return image.svg()


def _state(image: MovingPicture, state: dict[str, Any], x: int) -> None:
    """The kill, and what is left of the run."""
    y = ROWS_TOP + 12
    crosses = [
        f'<path class="cross" d="M{x - 28} {y + 8 + rank * ROW} l14 14 m0 -14 l-14 14"/>' for rank in range(BEFORE)
    ]
    image.add("".join(crosses) + image.text(x, ROWS_TOP, "kill -9", "red"), "kill")
    image.show("kill", KILLED)
    lines = (f'{{"position": {state["position"]},', f' "kind": "{state["kind"]}", ...}}')
    box = [f'<rect class="box" x="{x}" y="{y}" width="216" height="86" rx="6"/>']
    box += [image.text(x + 12, y + 24 + 18 * number, line, "code") for number, line in enumerate(lines)]
    box.append(image.text(x + 12, y + 70, f"the whole state: {len(json.dumps(state))} bytes of JSON", "small"))
    image.add("".join(box), "state")
    image.show("state", KILLED + 0.7)
    image.add(image.text(20, HEIGHT - 22, "Nothing is replayed, lost or shown twice."), "end")
    image.show("end", RESUMED + STEPS_AFTER * STEP + 0.6)


def _cells(keys: list[str], x: float, y: float) -> str:
    """The samples of a micro-batch, coloured by data set."""
    parts = []
    for number, key in enumerate(keys):
        left = x + number * CELL
        parts.append(
            f'<rect fill="{COLOURS[key[0]]}" x="{left}" y="{y}" width="{CELL - 2}" height="{HIGH}" rx="3"/>'
            f'<text class="number" x="{left + CELL / 2 - 1}" y="{y + 14.5}">{key[1:]}</text>'
        )
    return "".join(parts)


def draw() -> str:
    """The picture of a run that is made for it."""
    with tempfile.TemporaryDirectory() as folder:
        return picture(observe(Path(folder)))


if __name__ == "__main__":
    (FOLDER / "resume.svg").write_text(draw())
