from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from energon_lite.extras.inspect.preview import command as preview_command
from energon_lite.extras.inspect.preview.command import picture_lines, sample_lines
from tests.testing import CRUDE_YAML, command, text_dataset, write_dataset


def run(*arguments: object, answers: str | None = None) -> tuple[int, str]:
    return command("preview", "--text", *arguments, answers=answers)


class TestCommand:
    def test_the_first_samples_of_each_split(self, tmp_path: Path) -> None:
        text_dataset(tmp_path / "a", 5)
        code, output = run(tmp_path / "a", "-n", 2)
        assert code == 0 and output.count("TextSample") == 4 and f"{tmp_path}/a [train]: 5 samples" in output
        assert "Sample 4" in run(tmp_path / "a", "--start", 4, "--split-parts", "val")[1]

    def test_crude_samples_json_lines_and_blends(self, tmp_path: Path) -> None:
        write_dataset(
            tmp_path / "crude", {"a.tar": [("k", {"txt": b"words", "bin": b"\0" * 20})]}, dataset_yaml=CRUDE_YAML
        )
        (tmp_path / "b.jsonl").write_text('{"q": "why"}\n')
        (tmp_path / "all.yaml").write_text("splits: {train: {blend: [{path: crude}, {path: b.jsonl}]}}")
        code, output = run(tmp_path / "all.yaml")
        assert code == 0 and "txt (<class 'str'>): 'words'" in output
        assert "bin (<class 'bytes'>): 20 bytes" in output and "json (<class 'dict'>): {'q': 'why'}" in output
        assert run(tmp_path / "b.jsonl")[1].count("Sample 0") == 1

    def test_a_broken_sample_and_an_empty_split(self, tmp_path: Path) -> None:
        splits = {"train": ["a.tar"], "val": []}
        write_dataset(tmp_path / "x", {"a.tar": [("0", {"txt": b"\xff"}), ("1", {"txt": b"fine"})]}, splits=splits)
        code, output = run(tmp_path / "x")
        assert code == 0 and "[val]" not in output
        assert ": DecodeError" in output and "text (<class 'str'>): 'fine'" in output

    def test_no_such_split(self, tmp_path: Path) -> None:
        code, output = run(text_dataset(tmp_path / "a", 5), "--split-parts", "trian")
        assert code == 1 and "did you mean 'train'?" in output

    def test_steps_and_samples_by_their_places(self, tmp_path: Path) -> None:
        file = tmp_path / "b.jsonl"
        file.write_text("".join(f'{{"n": {number}}}\n' for number in range(9)))

        def said(*arguments: object) -> list[str]:
            code, output = run(file, *arguments)
            assert code == 0, output
            return [line for line in output.splitlines() if line and "__key__" not in line]

        def samples(*places: tuple[int, int]) -> list[str]:
            lines = (
                [f"Sample '{n}' (b.jsonl, number {n}, epoch {epoch})", f"  json (<class 'dict'>): {{'n': {n}}}"]
                for n, epoch in places
            )
            return sum(lines, [])

        both = said("--step", 2, "--ranks", 2, "--batch-size", 2)
        assert both[0] == "Step 2, rank 0: 2 samples" and both[5] == "Step 2, rank 1: 2 samples" and len(both) == 10
        assert said("--key", '["batch", 0, 5]', "--ranks", 2, "--batch-size", 2) == both
        in_order = ("--split-parts", "val", "--batch-size", 4)
        assert said("--step", 1, *in_order) == ["Step 1: 4 samples", *samples(*((n, 0) for n in range(4, 8)))]
        assert said("--leaf", 0, "--start", 7, "-n", 4) == samples((7, 0), (8, 0))
        assert said("--leaf", "b.jsonl") == samples((0, 0), (1, 0), (2, 0))
        assert said("--key", 4) == said("--key", '["sample", 0, 4]') == samples((4, 0))
        for arguments, words in (
            (["--step", 1, "--key", 4], "--step together with --key"),
            (["--leaf", 0, "--html", tmp_path / "page.html"], "--html together with options of the terminal"),
            (["--chunk", 3], "the batches of this run have no chunks"),
            (["--key", '["sample", 0]'], "is not a restore key"),
            (["--key", '["word", 0, 1]'], "is not a restore key"),
            (["--key", '["sample", 0, true]'], "is not a restore key"),
            (["--key", "[0"], "no sample has the key '[0'"),
            (["--key", '["sample", 0, 9]'], "there are 9 samples in b.jsonl, counted from 0"),
            (["--key", '["sample", 1, 0]'], "there are 1 data set, counted from 0"),
        ):
            code, output = run(file, *arguments)
            assert code == 1 and words in output and not (tmp_path / "page.html").exists()

    def test_on_a_terminal_each_sample_waits(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Terminal:
            def isatty(self) -> bool:
                return True

        monkeypatch.setattr(preview_command, "sys", type("sys", (), {"stdin": Terminal(), "stdout": Terminal()}))
        _, output = run(text_dataset(tmp_path / "a", 5), answers="y\nn\n")
        assert output.count("TextSample") == 2


class TestText:
    def lines(self, sample: object, colours: bool = False) -> list[str]:
        return [*sample_lines(sample, width=80, colours=colours)]

    def test_values(self) -> None:
        sample = {
            "tensor": torch.arange(3),
            "matrix": np.array([[0.5, 2.0]]),
            "nothing": None,
            "__restore_key__": (1,),
            "image": Image.new("L", (4, 2)),
            "nested": {"a": [torch.zeros(2, 2), b"12"]},
            "empty": torch.zeros(0, 3),
            "flags": np.zeros((2, 2), dtype=bool),
            "deep": [[[[[b"1"]]]]],
            "many": [b"1"] * 9,
            "bytes": b"0123456789abcdef",
            "cut": b"0123456789abcdefg",
            "long": "x" * 1000,
        }
        assert self.lines(sample)[:-1] == [
            "  tensor (<class 'torch.Tensor'>): int64 [3]: 0, 1, 2",
            "  matrix (<class 'numpy.ndarray'>): float64 [1×2], 0.5 to 2",
            "  image (<class 'PIL.Image.Image'>): image 4x2 L",
            "  nested:",
            "    a: (list of 2)",
            "      0: float32 [2×2], 0 to 0",
            "      1: 2 bytes b'12'",
            "  empty (<class 'torch.Tensor'>): float32 [0×3]",
            "  flags (<class 'numpy.ndarray'>): bool [2×2], False to False",
            "  deep: (list of 1)",
            "    0: (list of 1)",
            "      0: (list of 1)",
            "        0: (list of 1)",
            "          0: [b'1']",
            "  many: (list of 9)",
            *(f"    {number}: 1 bytes b'1'" for number in range(8)),
            "    ... and 1 more",
            "  bytes (<class 'bytes'>): 16 bytes b'0123456789abcdef'",
            "  cut (<class 'bytes'>): 17 bytes b'0123456789abcdef'...",
        ]
        assert "1,002 characters" in self.lines(sample)[-1]

    @pytest.mark.parametrize(
        "image",
        [
            torch.zeros(3, 4, 6),
            torch.zeros(1, 4, 6, dtype=torch.uint8),
            np.zeros((4, 6, 4), dtype=np.uint8),
            Image.new("RGB", (6, 4)),
        ],
    )
    def test_images_are_drawn(self, image: object) -> None:
        lines = self.lines({"image": image}, colours=True)
        assert len(lines) == 3 and all(line.count("▀") == 6 for line in lines[1:])

    def test_a_picture(self) -> None:
        pixels = np.zeros((2, 2, 3), dtype=np.uint8)
        pixels[0, 0], pixels[1, 0] = (1, 2, 3), (4, 5, 6)
        (line,) = picture_lines(pixels, 10)
        assert line.startswith("\x1b[38;2;1;2;3m\x1b[48;2;4;5;6m▀\x1b[38;2;0;0;0m") and line.endswith("\x1b[0m")
        assert len([*picture_lines(np.zeros((100, 400, 3), dtype=np.uint8), 40)]) == 5
