from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.testing import invoke, write_dataset


def info(*arguments: object) -> tuple[str, str]:
    """What is printed, and the warnings."""
    result = invoke("info", *arguments)
    assert not result.exit_code, result.output
    return result.stdout, result.stderr


def quiet(*arguments: object) -> str:
    """What is printed without a warning."""
    output, warnings = info(*arguments)
    assert not warnings
    return output


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """Data sets of 10, 20 and 40 samples, the last with an excluded one, and what blends them."""
    for name, count in (("ten", 10), ("sub/twenty", 20), ("forty", 41)):
        samples = [(str(number), {"txt": b"x"}) for number in range(count)]
        write_dataset(tmp_path / name, {"a.tar": samples}, exclude=["a.tar/40"] if count == 41 else [])
    (tmp_path / "in.yaml").write_text(
        "splits:\n  train:\n    blend:\n    - {path: sub/twenty, weight: 1}\n    - {path: forty, weight: 3}\n"
        "  epochs:\n    blend_epochized:\n    - {path: forty, split_part: val, repetitions: 1.5}\n"
    )
    (tmp_path / "top.yaml").write_text(
        "splits:\n  train:\n    blend:\n    - {path: in.yaml, weight: 4}\n    - {path: ten, weight: 1}\n"
        "    - {path: in.yaml, weight: 3, subset: {range: [50%, 100%]}}\n"
        "  epochs:\n    blend_epochized:\n    - {path: in.yaml, repetitions: 2}\n"
        "    - {path: ten, split_part: train, subset: {range: [2, end]}, repetitions: 0.25}\n"
    )
    return tmp_path


def test_a_tree_of_blends_by_weight(room: Path) -> None:
    output, warnings = info(room / "top.yaml", "--samples", 800)
    assert output == textwrap.dedent(f"""\
        {room}/top.yaml [train]: 5 data sets, blended by weight

        data set                           samples  weight  epochs
        in.yaml [train]                         60     50%
          sub/twenty [train]                    20   12.5%    5.00
          forty [train]                         40   37.5%    7.50
        ten [train]                             10   12.5%   10.00
        in.yaml [train]                         30   37.5%
          sub/twenty [train, 50% to 100%]       10  9.375%    7.50
          forty [train, 50% to 100%]            20  28.12%   11.25
        total                                  100    100%

        Epochs: how often 800 samples of the blend show each sample of the data set.
        """)
    assert len(warnings.splitlines()) == 5


def test_a_tree_of_blends_by_repetitions(room: Path) -> None:
    output = quiet(room / "top.yaml", "--split-parts", "epochs", "--samples", 244, "--max-epochs", "6")
    assert output == textwrap.dedent(f"""\
        {room}/top.yaml [epochs]: 2 data sets, blended by repetitions

        data set                    samples  repetitions   share  epochs
        in.yaml [epochs]                 40               98.36%
          forty [val]                    40            3  98.36%    6.00
        ten [train, samples 2:end]        8         0.25  1.639%    0.50
        total                            48                 100%

        An epoch of the blend has 122 samples.
        Epochs: how often 244 samples of the blend show each sample of the data set.
        """)


def test_a_folder(room: Path) -> None:
    assert quiet(room / "forty", "--split-parts", "val", "--samples", 40) == textwrap.dedent(f"""\
        {room}/forty [val]: 1 data set

        data set     samples  epochs
        forty [val]       40    1.00

        Epochs: how often 40 samples of the run show each sample of the data set.
        """)


def test_a_folder_whose_run_has_no_known_length(room: Path) -> None:
    assert quiet(room / "ten") == textwrap.dedent(f"""\
        {room}/ten: 10 samples in 1 shard
          prepared by  energon 7.4.1
          sample type  TextSample
          split        train: 10 samples in 1 shard, 100%
          split        val: 10 samples in 1 shard, 100%
        """)


def test_json(room: Path) -> None:
    found = json.loads(quiet(room / "ten", "--json"))
    assert found["folder"]["splits"]["val"] == {"shards": 1, "samples": 10}
    assert [one["samples"] for one in found["data_sets"]] == [10]
    found = json.loads(info(room / "top.yaml", "--split-parts", "epochs", "--samples", 244, "--json")[0])
    assert found["folder"] is None and [one["epochs"] for one in found["data_sets"]] == [6.0, 0.5]


def test_a_split_without_shards_and_exclusions(room: Path) -> None:
    text = "split_parts: {train: [shard-000.tar], val: []}\nexclude: [shard-000.tar/3]\n"
    (room / "ten/.nv-meta/few.yaml").write_text(text)
    output = quiet(room / "ten", "--split-config", "few.yaml", "--split-parts", "val")
    assert output.endswith("val: 0 samples in 0 shards, 0%\n  excluded     1 of shards and samples, by split.yaml\n")
    assert "excluded" not in quiet(room / "ten")
    (room / "ten/.nv-meta/few.yaml").write_text("split_parts: {train: [gone.tar]}\n")
    result = invoke("info", room / "ten", "--split-config", "few.yaml")
    assert result.exit_code == 1 and "lists shard 'gone.tar', which the data set does not have" in result.output


def test_crude_folders_and_folders_of_code(room: Path) -> None:
    meta = room / "ten/.nv-meta"
    (meta / "crude.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    (meta / "code.yaml").write_text("sample_type: {__module__: mine, __class__: Mine}\nfield_map: {text: txt}\n")
    for name, words in (
        ("crude.yaml", "crude"),
        ("code.yaml", "decided by code"),
        ("none.yaml", "there is no none.yaml"),
    ):
        assert words in info(room / "ten", "--dataset-config", name)[0]


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_split_that_is_read_once_has_no_weights(room: Path, split: str) -> None:
    (room / "checks.yaml").write_text(
        f"splits:\n  {split}:\n    blend:\n    - {{path: ten, weight: 3, split_part: train}}\n"
        "    - {path: forty, weight: 1, split_part: train}\n"
    )
    assert quiet(room / "checks.yaml", "--split-parts", split) == textwrap.dedent(f"""\
        {room}/checks.yaml [{split}]: 2 data sets, one after the other

        data set       samples
        ten [train]         10
        forty [train]       40
        total               50

        Validation shows each sample once; weights do not count. For a training run on this split, give --samples.
        """)


def test_a_blend_whose_run_has_no_known_length(room: Path) -> None:
    assert quiet(room / "in.yaml") == textwrap.dedent(f"""\
        {room}/in.yaml [train]: 2 data sets, blended by weight

        data set            samples  weight
        sub/twenty [train]       20     25%
        forty [train]            40     75%
        total                    60    100%

        With --samples, the length of the run: how often it shows each sample of a data set.
        """)


def test_warnings_begin_with_the_worst_and_say_where(room: Path) -> None:
    lines = info(room / "top.yaml", "--samples", 800, "--max-epochs", 9)[1].splitlines()
    assert [line.split()[1] for line in lines] == ["forty", "ten"]
    said = "800 samples of the blend show it 11.25 times, more than 9; lower its weight"
    assert f"({room}/in.yaml:5): {said}" in lines[0]


def test_a_folder_that_is_too_small_for_the_run(room: Path) -> None:
    _, warnings = info(room / "ten", "--samples", 10**6)
    assert "1,000,000 samples of the run show it 100,000.00 times, more than 4; give it more data" in warnings


def test_many_warnings_are_counted(room: Path) -> None:
    entries = "".join("    - path: ten\n" for _ in range(13))
    (room / "many.yaml").write_text(f"splits:\n  train:\n    blend:\n{entries}")
    _, warnings = info(room / "many.yaml", "--samples", 10**6)
    assert len(warnings.splitlines()) == 11 and "... and 3 more data sets" in warnings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("top.yml",), "the metadataset is missing"),
        (("top.yaml", "--split-parts", "trian"), "did you mean 'train'?"),
        (("ten", "--split-parts", "test"), "the data set has no split 'test'"),
        (("nowhere",), "there is no such data set"),
        (("top.yaml", "--samples", "0"), "--samples"),
        (("top.yaml", "--max-epochs", "0"), "--max-epochs"),
    ],
)
def test_mistakes(room: Path, arguments: tuple[str, ...], message: str) -> None:
    result = invoke("info", room / arguments[0], *arguments[1:])
    assert result.exit_code in (1, 2) and message in result.stderr and not result.stdout


def test_two_references_in_one_line_are_two_branches(room: Path) -> None:
    (room / "line.yaml").write_text("splits: {train: {blend: [{path: in.yaml}, {path: in.yaml}]}}\n")
    assert info(room / "line.yaml")[0].count("in.yaml [train]") == 2


def test_weights_that_change(room: Path) -> None:
    (room / "ramp.yaml").write_text(
        "splits:\n  train:\n    blend:\n    - {path: in.yaml, weight: {linear: {0: 0.9, 1e3: 0.1}}}\n"
        "    - {path: ten, weight: {linear: {0: 0.1, 1e3: 0.9}}}\n"
    )
    output, warnings = info(room / "ramp.yaml", "--samples", 2000, "--max-epochs", 50)
    assert output == textwrap.dedent(f"""\
        {room}/ramp.yaml [train]: 3 data sets, blended by weight

        data set              samples  mean weight  epochs
        in.yaml [train]            60          30%
          sub/twenty [train]       20         7.5%    7.50
          forty [train]            40        22.5%   11.25
        ten [train]                10          70%  140.00
        total                      70         100%

        Weights in each stage, and the epochs of 2,000 samples with these weights:

        from position                     0  epochs  1,000  epochs
        in.yaml [train]          90% to 10%            10%
          sub/twenty [train]  22.5% to 2.5%   12.50   2.5%    2.50
          forty [train]       67.5% to 7.5%   18.75   7.5%    3.75
        ten [train]              10% to 90%  100.00    90%  180.00

        Epochs: how often 2,000 samples of the blend show each sample of the data set.
        """)
    assert "ten [train]" in warnings and "140.00 times, more than 50" in warnings and len(warnings.splitlines()) == 1


def test_weights_that_change_over_a_run_of_no_known_length(room: Path) -> None:
    (room / "steps.yaml").write_text(
        "splits:\n  train:\n    blend:\n    - {path: forty}\n    - {path: ten, weight: {0: 0, 5000: 3}}\n"
    )
    assert quiet(room / "steps.yaml") == textwrap.dedent(f"""\
        {room}/steps.yaml [train]: 2 data sets, blended by weight

        data set       samples
        forty [train]       40
        ten [train]         10
        total               50

        Weights in each stage:

        from position     0  5,000
        forty [train]  100%    25%
        ten [train]      0%    75%

        With --samples, the length of the run: how often it shows each sample of a data set.
        """)


def test_a_data_set_that_comes_in_after_the_run_is_not_warned_of(room: Path) -> None:
    many = ", ".join(f"{1000 * step}: {step + 1}" for step in range(9))
    (room / "late.yaml").write_text(
        "splits:\n  train:\n    blend:\n    - {path: forty}\n"
        f"    - {{path: ten, weight: {{0: 0, 5000: 9}}}}\n    - {{path: sub/twenty, weight: {{{many}}}}}\n"
    )
    output, warnings = info(room / "late.yaml", "--samples", 5000, "--max-epochs", 1)
    assert [line.split()[1] for line in warnings.splitlines()] == ["sub/twenty", "forty"]
    assert "ten [train]              10           0%       0" in output
    assert "... and 1 more stages, up to position 8,000" in output
    assert "Weights change up to position 8,000: give --samples for a longer run." in output
    assert len(info(room / "late.yaml", "--samples", 50000, "--max-epochs", 1)[1].splitlines()) == 3
