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
        (tmp_path / "all.yaml").write_text("splits: {train: {blend: [{path: crude, aux: {a: .}}, {path: b.jsonl}]}}")
        assert "txt (<class 'str'>): 'words'" in run(tmp_path / "all.yaml", "--step", 0)[1]
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
        (tmp_path / "all.yaml").write_text("splits: {train: {blend: [{path: x}, {path: x, split_part: val}]}}")
        assert f"{tmp_path}/x [val]: empty, skipped" in run(tmp_path / "all.yaml")[1]

    def test_no_such_split(self, tmp_path: Path) -> None:
        code, output = run(text_dataset(tmp_path / "a", 5), "--split-parts", "trian")
        assert code == 1 and "did you mean 'train'?" in output

    def test_steps_and_samples_by_their_places(self, tmp_path: Path) -> None:
        file = tmp_path / "b.jsonl"
        file.write_text("".join(f'{{"n": {number}}}\n' for number in range(9)))

        def said(*arguments: object) -> list[str]:
            return [line for line in run(file, *arguments)[1].splitlines() if line[:1].strip()]

        def samples(*numbers: int) -> list[str]:
            return [f"Sample '{number}' (b.jsonl, number {number}, epoch 0)" for number in numbers]

        both = said("--step", 2, "--ranks", 2, "--batch-size", 2)
        assert both[0] == "Step 2, rank 0: 2 samples" and both[3] == "Step 2, rank 1: 2 samples" and len(both) == 6
        assert said("--key", '["batch", 0, 5]', "--ranks", 2, "--batch-size", 2) == both
        in_order = said("--step", 1, "--split-parts", "val", "--batch-size", 4)
        assert in_order == ["Step 1: 4 samples", *samples(4, 5, 6, 7)]
        assert said("--leaf", 0, "--start", 7, "-n", 4) == samples(7, 8)
        assert said("--leaf", "b.jsonl") == samples(0, 1, 2)
        assert said("--key", 4) == said("--key", '["sample", 0, 4]') == samples(4)
        for arguments, words in (
            (["--step", 1, "--key", 4], "--step together with --key"),
            (["--chunk", 3], "the batches of this run have no chunks"), (["--key", "[0"], "no sample has the key '[0'"),
            *((["--key", f'["{key}]'], "not a restore key") for key in ('sample", 0', 'x", 0, 1', 'sample", 0, true')),
            (["--key", '["sample", 0, 9]'], "b.jsonl has 9 samples"), (["--key", '["sample", 1, 0]'], "1 data set, c"),
        ):  # fmt: skip
            code, output = run(file, *arguments)
            assert code == 1 and words in output

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
            "many": [b"1"] * 9,
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
            "  many: (list of 9)",
            *(f"    {number}: 1 byte b'1'" for number in range(8)),
            "    ... and 1 more",
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
