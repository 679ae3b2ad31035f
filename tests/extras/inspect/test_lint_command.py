from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from energon_lite import Cooker, DefaultTaskEncoder, SkipSample, cooker
from energon_lite.errors import WorkerError
from energon_lite.storage import sharded_work as helpers
from energon_lite.storage.read import source
from energon_lite.storage.tar_headers import TarHeaders
from tests.accidents import interrupted
from tests.broken_set import FIELDS, KINDS, write_broken_set
from tests.servers import upload
from tests.testing import CRUDE_YAML, in_time, invoke, output_of, refusal_of, text_dataset, write_dataset, write_tar


def energon_lite(*arguments: object) -> tuple[int, str]:
    result = invoke(*arguments)
    return result.exit_code, result.stdout


def lint(path: Path | str, *options: object) -> tuple[int, dict[str, Any]]:
    code, output = energon_lite("lint", path, "--json", "--no-progress", "--num-workers", 1, *options)
    found: dict[str, Any] = json.loads(output)
    assert found["ok"] == (code == 0)
    return code, found


def named(found: dict[str, Any]) -> dict[tuple[str, str], tuple[str, str]]:
    problems = [one for one in found["problems"] if one["key"] and not one["note"]]
    return {(one["shard"], one["key"]): (one["kind"], one["part"]) for one in problems}


Broken = tuple[Path, dict[tuple[str, str], tuple[str, str]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Broken:
    path = tmp_path_factory.mktemp("broken")
    truth = write_broken_set(path)
    options = ["--split-ratio", "2,1,1", "--sample-type", "CaptioningSample", "--field-map", FIELDS, "--no-progress"]
    output_of("prepare", path, "--non-interactive", *options)
    assert set(truth.values()) == set(KINDS)
    return path, {place: KINDS[kind] for place, kind in truth.items()}


@pytest.fixture
def broken(made: Broken, tmp_path: Path) -> Broken:
    """A copy that a test may damage further."""
    return Path(shutil.copytree(made[0], tmp_path / "set")), made[1]


class TestSamples:
    def test_each_broken_one_is_named(self, broken: Broken) -> None:
        path, truth = broken
        code, found = lint(path)
        assert code == 1 and found["samples"] == 700 and found["broken_samples"] == len(truth) == 7
        assert named(found) == truth

    def test_crude_ones_too(self, broken: Broken) -> None:
        path, truth = broken
        (path / ".nv-meta/dataset.yaml").write_text(CRUDE_YAML)
        _, found = lint(path)
        assert named(found) == truth
        _, found = lint(path, "--optional", "txt")
        assert named(found) == {place: what for place, what in truth.items() if "part" not in what[0]}

    def test_in_words(self, broken: Broken) -> None:
        code, output = energon_lite("lint", broken[0], "--no-progress", "--parallel", 1)
        assert code == 1
        for words in ("s0.tar: 000050.jpg: decode: ", "7 broken samples; 7 problems: ", "exclude: [s0.tar/000050]"):
            assert words in output

    def test_the_exclusion_is_yaml(self, tmp_path: Path) -> None:
        write_dataset(tmp_path, {"s.tar": [("a, [b]: #", {"txt": b""}), ("c", {"txt": b"c"})]}, dataset_yaml=CRUDE_YAML)
        _, output = energon_lite("lint", tmp_path, "--no-progress")
        assert yaml.safe_load(output.splitlines()[-1]) == {"exclude": ["s.tar/a, [b]: #"]}

    def test_what_is_excluded_is_not_examined(self, broken: Broken) -> None:
        path, truth = broken
        exclude = [shard if kind == "duplicate key" else f"{shard}/{key}" for (shard, key), (kind, _) in truth.items()]
        split = {"split_parts": {"train": ["s{0..3}.tar"]}, "exclude": exclude}
        (path / ".nv-meta/split.yaml").write_text(json.dumps(split))
        code, found = lint(path)
        assert code == 0 and found["samples"] < 700 and found["data_sets"][0]["excluded"] > 0

    def test_only_some_splits(self, broken: Broken) -> None:
        path, truth = broken
        _, found = lint(path, "--split-parts", "val,test")
        assert found["samples"] == 350
        assert named(found) == {place: what for place, what in truth.items() if place[0] in ("s2.tar", "s3.tar")}


class TestShards:
    @pytest.mark.parametrize("has_index", [True, False])
    def test_damaged_ones(self, broken: Broken, has_index: bool) -> None:
        path, truth = broken
        size = os.path.getsize(path / "s1.tar")
        os.truncate(path / "s1.tar", size - 20_000)
        with open(path / "s2.tar", "r+b") as file:  # one header of the eleventh sample rots
            member = list(TarHeaders(file.fileno(), os.path.getsize(path / "s2.tar"), ""))[40]
            os.pwrite(file.fileno(), b"\xff" * 30, member.header_offset)
        if not has_index:  # as Energon leaves it
            os.unlink(path / ".nv-meta/energon_lite.idx")
        code, found = lint(path)
        kinds = [(one["shard"], one["kind"], one["key"], one["what"]) for one in found["problems"]]
        whole = [what for shard, kind, key, what in kinds if shard == "s1.tar" and kind == "shard" and not key]
        assert code == 1 and any("truncated" in what for what in whole)
        # Those of the whole shards, and those in front of the damage, are found all the same.
        places = {place: what for place, what in truth.items() if place[1] < "000340" or place[0] > "s1.tar"}
        assert places.items() <= named(found).items()
        if has_index:
            keys = [key for shard, kind, key, _ in kinds if shard == "s1.tar" and kind == "shard" and key]
            lost = list(dict.fromkeys(keys))
            assert lost[-1] == "000349" and lost == [f"{number:06d}" for number in range(int(lost[0]), 350)]
            assert ("s2.tar", member.name.partition(".")[0]) in named(found)
        else:
            assert "sample 174, at byte " in whole[-2] and found["samples"] < 700

    def test_the_last_shard_of_a_set_is_gone_and_a_count_is_wrong(self, broken: Broken) -> None:
        path, _ = broken
        os.unlink(path / "s3.tar")
        info = json.loads((path / ".nv-meta/.info.json").read_text())
        info["shard_counts"]["s0.tar"] = 170
        (path / ".nv-meta/.info.json").write_text(json.dumps(info))
        _, found = lint(path)
        words = {one["shard"]: one["what"] for one in found["problems"] if one["kind"] == "shard"}
        assert words["s3.tar"] == "the shard does not exist" and "it has 175 samples, and had 170" in words["s0.tar"]

    def test_indexes_that_are_of_other_shards(self, broken: Broken) -> None:
        path, _ = broken
        os.replace(path / "s1.tar.idx", path / "s0.tar.idx")
        os.truncate(path / "s2.tar.idx", 8 * 100)
        _, found = lint(path)
        words = {(one["shard"], one["note"]): one["what"] for one in found["problems"] if one["kind"] == "index"}
        assert ".tar.idx has other places" in words["s0.tar", False] and "no .tar.idx" in words["s1.tar", True]
        assert words["s2.tar", False] == ".tar.idx has 99 samples, the shard has 175 samples"


class TestKindsOfData:
    def test_a_good_one(self, tmp_path: Path) -> None:
        output = output_of("lint", text_dataset(tmp_path / "good", 20, shards=2), "--no-progress")
        assert "20 samples in 2 shards" in output and "nothing is broken" in output
        assert not (tmp_path / "good/.nv-meta/energon_lite.lint").exists()

    def test_jsonl(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a":\n"\xff"\n')
        code, found = lint(tmp_path / "a.jsonl")
        assert code == 1 and named(found) == {("a.jsonl", key): ("decode", "json") for key in "12"}

    def test_a_metadataset(self, tmp_path: Path) -> None:
        text_dataset(tmp_path / "good", 20, shards=2)
        write_dataset(tmp_path / "bad", {"a.tar": [("0", {"txt": b"\xff"})]})
        (tmp_path / "none").mkdir()
        blend = tmp_path / "blend.yaml"
        members = "[{path: good, aux: {for_cookers: good}}, {path: bad}, {path: none}]"
        blend.write_text(f"splits: {{train: {{blend: {members}}}, val: {{path: good}}}}")
        code, found = lint(blend)
        assert code == 1 and found["samples"] == 21
        assert [(one["dataset"], one["kind"]) for one in found["problems"] if not one["note"]] == [
            (str(tmp_path / "none"), "data set"),
            (str(tmp_path / "bad"), "decode"),
        ]

    def test_behind_a_url(self, broken: Broken) -> None:
        path, truth = broken
        url = upload(path, "lint_set")
        try:
            code, found = lint(url)
            for command in (["info"], ["preview", "--text"]):
                assert url in output_of(*command, url)
        finally:
            fsspec.filesystem("memory").rm("/lint_set", recursive=True)
        assert code == 1 and named(found) == truth

    def test_a_source_of_ones_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Rows:
            identity = "rows"

            def __len__(self) -> int:
                return 5

            def read(self, index: int) -> dict[str, bytes]:
                return {"json": b"{" if index == 3 else b"{}"}

        monkeypatch.setattr(source, "_registered", dict(source._registered))
        source.register_source("lintrows", lambda url, split: Rows())
        code, found = lint("lintrows://x")
        assert code == 1 and named(found) == {("", "3"): ("decode", "json")}

    @pytest.mark.parametrize("name", ["s1.tar", "s1.tar.idx"])
    def test_a_pipe_in_place_of_a_file(self, broken: Broken, name: str) -> None:
        path, _ = broken
        os.unlink(path / name)
        os.mkfifo(path / name)
        code, output = in_time(lambda: energon_lite("lint", path, "--no-progress", "--num-workers", 1), 60)
        assert code == 1 and "s1.tar" in output

    def test_samples_are_not_blamed_for_a_document(self, broken: Broken) -> None:
        path, _ = broken
        (path / ".nv-meta/dataset.yaml").write_bytes(b"\xff: [")
        code, found = lint(path)
        assert code == 1 and not named(found) and not found["broken_samples"]
        assert {one["kind"] for one in found["problems"]} == {"data set"}
        assert {one["shard"] for one in found["problems"]} == {f"s{number}.tar" for number in range(4)}

    def test_samples_are_not_blamed_for_a_store_that_lacks_a_shard(self, broken: Broken) -> None:
        path, _ = broken
        (path / ".nv-meta/dataset.yaml").write_text(CRUDE_YAML)
        (path / "s1.tar").unlink()
        code, found = lint(path, "--task-encoder", "tests.extras.inspect.test_lint_command:WithPrimary")
        assert code == 1 and not named(found) and not found["broken_samples"]
        whats = {one["shard"]: one["what"] for one in found["problems"] if one["kind"] == "data set"}
        assert whats.keys() == {"s0.tar", "s2.tar", "s3.tar"}
        assert all("store 'primary' cannot be opened" in what and "s1.tar" in what for what in whats.values())

    def test_mistakes(self, tmp_path: Path) -> None:
        text_dataset(tmp_path / "good", 20)
        for arguments in (["nowhere"], ["good", "--split-parts", "trian"], ["good", "--task-encoder", "no:One"]):
            code, _ = energon_lite("lint", tmp_path / arguments[0], *arguments[1:])
            assert code == 1


@cooker(need_primary=True)
def cook(sample: Any, primary: Any) -> Any:
    return sample


class WithPrimary(DefaultTaskEncoder):
    cookers = (Cooker(cook),)


class Picky(DefaultTaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        if sample.text.endswith("3"):
            raise ValueError("a three")
        if sample.text.endswith("4"):
            raise SkipSample("a four")
        return sample


class Many(Picky):
    def encode_sample(self, sample: Any) -> Any:
        yield super().encode_sample(sample)


@pytest.mark.parametrize("name", ["Picky", "Many"])
def test_with_a_task_encoder(tmp_path: Path, name: str) -> None:
    good = text_dataset(tmp_path / "good", 20)
    code, found = lint(good, "--task-encoder", f"tests.extras.inspect.test_lint_command:{name}")
    assert code == 1 and found["data_sets"][0]["skipped"] == 2
    assert {kind for kind, _ in named(found).values()} == {"encode_sample"} and len(named(found)) == 2


class TestTogether:
    def test_ranks_share_the_work(self, broken: Broken) -> None:
        path, truth = broken
        assert energon_lite("lint", path, "--rank", 1, "--world-size", 2, "--num-workers", 1)[0] == 0
        code, found = lint(path, "--rank", 0, "--world-size", 2)
        assert code == 1 and named(found) == truth

    def test_it_goes_on_where_it_was(self, broken: Broken) -> None:
        with interrupted(helpers, "_perform", lambda *_: len(done) == 2) as done:
            refusal_of("lint", broken[0], "--num-workers", "1")
        with interrupted(helpers, "_perform") as rest:
            _, found = lint(broken[0])
        names = {work.name(unit) for work, unit in done + rest}
        assert len(names) == 4 and len(done) == len(rest) == 2 and found["broken_samples"] == 7

    @pytest.mark.parametrize("kind", ["parquet", "offsets"])
    def test_results_of_other_files_are_not_used(
        self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

        def write(is_good: bool) -> Path:
            if kind == "parquet":
                cells = [b"{}", *[b"{}" if is_good else b"{ "], *[b"{}"] * 998]
                parquet.write_table(pyarrow.table({"json": cells}), tmp_path / "a.parquet")
                return tmp_path / "a.parquet"
            os.truncate(tmp_path / "set/a.tar.idx", len(offsets) - 8)
            if is_good:
                (tmp_path / "set/a.tar.idx").write_bytes(offsets)
            return tmp_path / "set"

        if kind == "offsets":
            write_tar(tmp_path / "set/a.tar", [(f"{number:04d}", {"txt": b"t"}) for number in range(1000)])
            options = ["--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--no-progress"]
            output_of("prepare", tmp_path / "set", "--non-interactive", *options)
            offsets = (tmp_path / "set/a.tar.idx").read_bytes()
        with interrupted(helpers, "_perform", lambda _, unit: unit.start > 0):
            assert "Aborted" in refusal_of("lint", write(False), "--num-workers", "1")
        code, found = lint(write(True))
        assert code == 0 and found["problems"] == []

    def test_a_decoder_that_dies_is_told(self, broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
        perform = helpers._perform

        def died(work: Any, unit: Any) -> Any:
            return WorkerError("the process died", fix="-") if unit.shard == "s1.tar" else perform(work, unit)

        monkeypatch.setattr(helpers, "_perform", died)
        code, found = lint(broken[0])
        assert code == 1 and "s1.tar[0:512]: the process died" in [one["what"] for one in found["problems"]]


class TestPrepare:
    def test_it_names_what_it_can_see(self, tmp_path: Path) -> None:
        truth = write_broken_set(tmp_path)
        output = output_of("prepare", tmp_path, "--non-interactive", "--split-ratio", "1,0,0")
        words = {
            "missing part": "1 sample has no part 'txt', which nearly all others have: ",
            "empty part": "1 sample has a part without bytes: ",
            "double key": "1 sample has the key of another one: ",
        }
        for (shard, key), kind in truth.items():
            if kind in words:
                assert f"{words[kind]}{shard}: {key}" in output
