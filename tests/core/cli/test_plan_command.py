from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import invoke, write_dataset


def plan(*arguments: object, code: int = 0) -> tuple[list[str], str]:
    """The lines that are printed, and the errors."""
    result = invoke("plan", *arguments)
    assert result.exit_code == code, result.output
    return result.stdout.splitlines(), result.stderr


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """The lengths 1 to 100, ten times."""
    np.save(tmp_path / "lengths.npy", np.tile(np.arange(1, 101), 10))
    return tmp_path / "lengths.npy"


def cells(lines: list[str]) -> dict[str, list[str]]:
    """The rows of the table by strategy."""
    return {row.split()[0]: row.split()[1:] for row in lines[3:]}


def test_strategies_side_by_side(lengths: Path) -> None:
    lines, errors = plan(lengths, "--capacity", 1000)
    assert lines[0] == (
        f"{lengths}: 1,000 samples, 50,500 tokens, mean 50.5, longest 100; 19.8 samples fill the capacity"
    )
    table = cells(lines)
    assert [*table] == ["fixed", "capacity", "sorted_window", "best_fit", "bfd", "concat_split"]
    # 100 micro-batches of 10, since ten samples of 100 tokens fill the capacity.
    assert table["fixed"][:3] == ["100", "13", "0.5050"]
    assert table["concat_split"][:4] == ["51", "7", "0.9902", "1.0000"]
    assert float(table["best_fit"][2]) > 0.97 and float(table["sorted_window"][3]) > 0.97
    assert re.fullmatch(r"concat_split: \d+ samples split", errors.strip())
    lines, _ = plan(lengths, "--capacity", 1000, "-s", "fixed", "-s", "bfd", "--json")
    found = json.loads("\n".join(lines))
    assert (found["samples"], found["tokens"]) == (1000, 50_500)
    assert (found["plans"][0]["micro-batches"], round(found["plans"][0]["fill"], 4)) == (100, 0.505)
    assert [one["strategy"] for one in found["plans"]] == ["fixed", "bfd"]


def test_steps_depend_on_ranks_and_micro_batches(lengths: Path) -> None:
    lines, _ = plan(lengths, "-c", 1000, "-s", "concat_split", "--ranks", 4, "--micro-batches-per-step", 3)
    assert cells(lines)["concat_split"][:2] == ["51", "5"]


def test_a_strategy_with_keys_of_its_own(lengths: Path) -> None:
    lines, errors = plan(lengths, "-c", 90, "-s", "best_fit:open_bins=2,max_age=10", "--oversize", "drop")
    assert lines[3].startswith("best_fit:open_bins=2,max_age=10 ")
    assert errors.strip() == "best_fit:open_bins=2,max_age=10: 100 samples dropped, with 9,550 tokens"
    for policy, words in (
        ("truncate", "100 samples truncated, by 550 tokens"),
        ("split", "100 samples split"),
        ("own_batch", "100 samples in batches of their own, above the capacity"),
    ):
        assert words in plan(lengths, "-c", 90, "-s", "best_fit", "--oversize", policy)[1]


def test_text_and_key_lengths(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("5\n9\n5\n9\n")
    (tmp_path / "keys.txt").write_text("1\n4\n1\n4\n")
    strategy = "length_difference:batch_size=2,max_difference=0,key=prompt"
    keys = ("--key-lengths", tmp_path / "keys.txt")
    lines, _ = plan(tmp_path / "lengths.txt", "-c", 18, "-s", strategy, *keys, "--ranks", 1)
    assert lines[3].split()[1:5] == ["2", "2", "0.7778", "1.0000"]


def test_the_stored_order_can_be_kept(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.repeat([1, 10], 50))
    stored = cells(plan(tmp_path / "lengths.npy", "-c", 10, "-s", "capacity", "--in-order")[0])
    shuffled = cells(plan(tmp_path / "lengths.npy", "-c", 10, "-s", "capacity")[0])
    assert stored["capacity"][0] == "55" and int(shuffled["capacity"][0]) > 60


def test_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [(str(number), {"txt": b"x"}) for number in range(6)]
    write_dataset(tmp_path / "data", {"a.tar": names})
    asked: list[str] = []

    def column(self: WebdatasetSource, name: str) -> np.ndarray:
        asked.append(name)
        return np.arange(1, len(self) + 1)

    monkeypatch.setattr(WebdatasetSource, "column", column)
    lines, _ = plan(tmp_path / "data", "-c", 7, "-s", "bfd", "--length-column", "tokens")
    assert asked == ["tokens"]
    assert lines[0].startswith(f"{tmp_path / 'data'}: 6 samples, 21 tokens")
    assert cells(lines)["bfd"][0] == "3"


def test_a_data_set_without_lengths(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", {"a.tar": [("0", {"txt": b"x"})]})
    assert "length" in plan(tmp_path / "data", "-c", 7, code=1)[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-s", "bestfit"], "did you mean 'best_fit'"),
        (["-s", "best_fit:bins=3"], "unknown key 'bins'"),
        (["-s", "best_fit:open_bins=x"], "expected a whole number"),
        (["-s", "best_fit:open_bins=" + "[" * 50_000], "nested too deeply"),
        (["-s", "best_fit:open_bins=!!python/name:os.system x"], "tags that make objects are not allowed"),
        (["-s", "best_fit", "-c", "50"], 'oversize="drop" (leave them out)'),
        (["-s", "length_difference:batch_size=2,max_difference=1,key=prompt"], "give its lengths as key_lengths"),
    ],
)
def test_mistakes(lengths: Path, arguments: list[str], words: str) -> None:
    assert words in plan(lengths, "-c", 1000, *arguments, code=1)[1]


def test_files_that_are_no_lengths(tmp_path: Path) -> None:
    for name, content, words in (
        ("words.txt", "five\n", "this is not a list of lengths"),
        ("floats.txt", "0.5\n", "this is not a list of lengths"),
        ("minus.txt", "3\n-1\n", "the lengths in the file[1] is -1"),
        ("empty.txt", "", "there are no lengths"),
    ):
        (tmp_path / name).write_text(content)
        assert words in plan(tmp_path / name, "-c", 10, code=1)[1], name
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    assert "this is not a list of lengths" in plan(tmp_path / "objects.npy", "-c", 10, code=1)[1]


def test_lengths_in_a_file_need_no_torch(lengths: Path) -> None:
    code = (
        "import sys; from energon_lite.cli.main import main\n"
        f"main(['plan', {str(lengths)!r}, '-c', '1000'], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")


def test_a_picture_in_which_plans_that_are_alike_do_not_hide_each_other(lengths: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "plan.png"
    lines, _ = plan(lengths, "-c", 1000, "--plot", path, "-s", "best_fit", "-s", "best_fit:open_bins=32")
    assert lines[-1] == f"The picture is in {path}."
    pixels = (imread(path)[:, :, :3] * 255).round()
    first, second = (int((pixels == color).all(axis=2).sum()) for color in ((31, 119, 180), (255, 127, 14)))
    assert first > 500 and 0.8 < first / second < 1.25
    _, errors = plan(lengths, "-c", 1000, "--plot", tmp_path / "plan.xyz", code=1)
    assert "the picture cannot be written" in errors
