from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from energon_lite.extras.inspect.analyze_debug import save_heat_map
from tests.testing import command, take, text_dataset, train_loader


def analyze(*arguments: object) -> tuple[int, str]:
    return command("analyze-debug", *arguments)


class TestHeatMap:
    def drawn(self, folder: Path, seen: Any, last: tuple[int, int], steps: int = 4, colours: int = 1) -> Any:
        path = str(folder / "a.png")
        assert save_heat_map(path, seen, samples=4, steps=steps, colours=colours, gain=1.0) == last
        return np.asarray(Image.open(path))

    def test_small_ones_by_hand(self, tmp_path: Path) -> None:
        pixels = self.drawn(tmp_path, [(0, 0, 5), (1, 0, 5), (1, 0, 5), (3, 1, 5)], (3, 1), steps=2)
        assert pixels[:, :, 0].tolist() == [[127, 0], [255, 0], [0, 0], [0, 127]]

    def test_it_becomes_coarser(self, tmp_path: Path) -> None:
        pixels = self.drawn(tmp_path, [(number, number, 0) for number in range(16)], (15, 15))
        assert (pixels[:, :, 0] == 255 * np.eye(4)).all()  # nothing is lost: each cell has four of them

    def test_ranks_have_colours(self, tmp_path: Path) -> None:
        pixels = self.drawn(tmp_path, [(rank, 0, rank) for rank in range(3)], (2, 0), colours=3)
        assert len({tuple(pixel) for pixel in pixels[:, 0].tolist()}) == 3


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """The traces of two ranks, which see ten samples twice."""
    path = text_dataset(tmp_path / "data", 10)
    (tmp_path / "traces").mkdir()
    for rank in range(2):
        trace = str(tmp_path / f"traces/{rank}.jsonl")
        with train_loader(path, rank=rank, world_size=2, batch_size=1, trace=trace) as loader:
            take(loader, 10)
    return tmp_path / "traces"


class TestCommand:
    def test_traces_of_two_ranks(self, traces: Path) -> None:
        picture = traces / "seen.png"
        code, output = analyze(traces, "--heatmap-path", picture, "--json", "--heatmap-gain", 1, "--no-colors")
        assert code == 0
        found: dict[str, Any] = json.loads(output)
        assert (found["ranks"], found["samples"], found["sightings"], found["steps"]) == (2, 10, 20, 10)
        pixels = np.asarray(Image.open(picture))[:, :, 0]
        assert pixels.shape == (10, 10)
        assert (pixels > 0).sum(axis=0).tolist() == [2] * 10 and (pixels > 0).sum(axis=1).tolist() == [2] * 10

    def test_skipped_steps_and_single_files(self, traces: Path) -> None:
        picture = traces / "seen.png"
        code, output = analyze(sorted(traces.glob("*.jsonl"))[0], "--heatmap-path", picture, "--skip", 6)
        assert code == 0 and "Analyzing 1 log\nFound 4 unique sample keys, 10 steps, 1 rank; seen 4 times" in output

    def test_debug_files_of_energon(self, tmp_path: Path) -> None:
        lines = [
            {"t": "SavableLoader.__init__", "r": 0, "id": 1},
            {"t": "SavableDataLoader.yield", "r": 0, "global_idx": 0, "keys": ["a.tar/1", "a.tar/2"]},
            {"t": "SavableDataLoader.yield", "r": 1, "global_idx": 1, "keys": ["a.tar/1"]},
        ]
        text = "\n".join(map(json.dumps, lines)) + '\n{"t": "SavableDataLoader.yield", "r": 1, "glo'
        (tmp_path / "log.jsonl").write_text(text)
        code, output = analyze(tmp_path, "--heatmap-path", tmp_path / "a.png")
        assert code == 0 and "Found 2 unique sample keys, 2 steps, 2 ranks; seen 3 times" in output

    def test_mistakes(self, tmp_path: Path, traces: Path) -> None:
        (tmp_path / "empty").mkdir()
        for arguments, message in [
            ([tmp_path / "empty"], "there are no files *.jsonl"),
            ([tmp_path / "none"], "does not exist"),
            ([traces, "--skip", 100], "give a smaller --skip"),
            ([traces, "--heatmap-path", tmp_path / "a.nothing"], "ends with .png"),
        ]:
            code, output = analyze(*arguments)
            assert code != 0 and message in output
