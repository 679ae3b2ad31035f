"""What ``energon-lite prepare`` asks, and what it makes of the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from energon_lite.extras.energon.prepare_dialogue import guess_access
from energon_lite.samples import SourceInfo
from energon_lite.storage.read.webdataset import RawSample
from tests.prepare_by_command import FIELDS, document, run, written
from tests.testing import write_tar

CAPTIONS = "y CaptioningSample y png"
OWN = ["  0. CaptioningSample (image, caption)", "caption (str, required) [json[text]]"]
UNFIT = ["json has no key 'txet'", "Please answer again"]
WRONG = [
    "'eight' is not a ratio",
    "sample type '99' is unknown (use one of: CaptioningSample, ",
    "did you mean 'CaptioningSample'?",
    "no sample has a part 'pgn' (did you mean 'png'? it has: 'png', 'json', 'cls')",
    "caption is required",
    "this is not a field access",
]


class TestQuestions:
    def test_accepting_every_guess(self, data: Path) -> None:
        # ratio, create a dataset.yaml, sample type, by a field map, image, label, label_name
        code, output = run(data, answers="\n\n\n\n\ncls\n\n")
        assert code == 0
        assert document(data, "split.yaml")["split_parts"] == {"train": ["s{0..2}.tar"], "val": [], "test": ["s3.tar"]}  # type: ignore
        assert document(data) == {
            "sample_type": {"__module__": "megatron.energon", "__class__": "ImageClassificationSample"},
            "field_map": {"image": "png", "label": "cls"},
        }
        assert "[8,1,1]" in output and "label (int | None, optional, such as cls) [-]" in output

    @pytest.mark.parametrize(
        ("options", "answers", "messages"),
        [
            ([], "2,1,1 y 0 y png json[text] ", OWN),
            ([], "eight 2,1,1 y 99 CaptionSample CaptioningSample y pgn png - json[ json[text] ", WRONG),
            ([], f"1,0,0 {CAPTIONS} json[txet] {CAPTIONS[2:]} json[text] ", UNFIT),
            (["--split-ratio", "1,0,0", "--sample-type", "CaptioningSample"], "   ", []),
        ],
        ids=["own", "wrong ones are asked again", "a map that fits no sample", "what the options leave open"],
    )
    def test_answers(self, data: Path, options: list[str], answers: str, messages: list[str]) -> None:
        code, output = run(data, *options, answers=answers.replace(" ", "\n"))
        assert code == 0 and ("Sample types" in output) == (not options)
        assert all(message in output for message in messages), output
        assert document(data)["field_map"] == json.loads(FIELDS)  # type: ignore[index]

    def test_code_instead_of_a_field_map(self, data: Path) -> None:
        code, output = run(data, answers="1,0,0\ny\nTextSample\nn\n")
        assert code == 0 and "run only with trust_code=True" in output
        assert document(data)["sample_loader"] == "sample_loader.py:sample_loader"  # type: ignore[index]
        loader = data / ".nv-meta/sample_loader.py"
        assert '"text": raw["TODO"],  # str, required' in loader.read_text()
        names: dict[str, Any] = {}
        exec(loader.read_text(), names)
        assert names["part_filter"]("png") and not names["part_filter"]("mp4")
        # Again: the file that is there is replaced only if that is wanted, and even then not lost.
        loader.write_text("mine")
        assert run(data, answers="y\n1,0,0\ny\nTextSample\nn\nn\n")[0] == 0 and loader.read_text() == "mine"
        code, output = run(data, answers="y\n1,0,0\ny\nTextSample\nn\ny\n")
        assert code == 0 and "TODO" in loader.read_text() and "The old one is now sample_loader.py.bak." in output
        assert loader.with_name("sample_loader.py.bak").read_text() == "mine"

    def test_prepared_already(self, data: Path) -> None:
        run(data, "--non-interactive", "--split-ratio", "1,0,0")
        code, output = run(data, answers="n\n")
        assert code == 0 and "Nothing was changed" in output
        assert f"{data} has already been prepared; its splits will be replaced." in output
        code, _ = run(data, answers="y\n0,1,0\nn\n")
        assert code == 0 and document(data, "split.yaml")["split_parts"]["train"] == []  # type: ignore[index]

    def test_no_dataset_yaml(self, data: Path) -> None:
        code, output = run(data, answers="1,0,0\nn\n")
        assert code == 0 and not (data / ".nv-meta/dataset.yaml").exists() and "There is no dataset.yaml yet" in output

    def test_what_is_shown(self, tmp_path: Path) -> None:
        about = {"60": "t" * 60, "61": "t" * 61, "three": [1, 2, 3], "four": [1, 2, 3, 4], **dict.fromkeys("abcd", 0.5)}
        short = about | {"61": "t" * 60 + "...", "four": [1, 2, 3, "..."]}
        many = {str(number): number for number in range(9)}
        previews = {"a.PNG": "", "json": f"  {json.dumps(short)}", "cls": "  7", "x.json": "", "txt": "  '...'"}
        previews |= {"jsn": "  " + json.dumps({**many, "8": 8}).replace('"8": 8', '"...": "..."')}
        parts = {"json": json.dumps(about), "cls": "7", "x.json": "{", "txt": "...", "jsn": json.dumps(many)}
        stored = {name: parts.get(name, "?").encode() for name in [*previews, "p.jpg", "bin", "b", "c"]}
        write_tar(tmp_path / "s.tar", [(str(number), stored) for number in range(3)])
        code, output = run(tmp_path, answers="1,0,0\n\n14\nCaptioningSample\n\n\n\n")
        shown = [f"  {name:<8} {len(data):>8} B{previews.get(name, '')}" for name, data in stored.items()]
        for number in (0, 1):
            assert output.partition(f"Sample {number}, key '{number}':\n")[2].split("\n")[:10] == shown
        assert code == 0 and "Sample 2" not in output
        assert " 11. CrudeWebdataset (a dict of all parts)\n  12. ChatSample (messages, [images], [videos], " in output
        assert " image (torch.Tensor, required) [a.PNG,p.jpg]: \n  caption (str, required) [txt]: \n" in output
        assert "sample type '14' is unknown (use one of" in output
        assert "Parts: a.PNG, json, cls, x.json, txt, jsn, p.jpg, bin, b, c\n  json[text][0] takes" in output

    def test_guessed_sample_types(self, tmp_path: Path) -> None:
        crude = ["txt cls", "bin", "jpg bin", "text a b c d e f g h i j"]
        guesses = {"JPG txt": "CaptioningSample", "jpg cls": "ImageClassificationSample", "txt": "TextSample"}
        for parts, guess in (guesses | dict.fromkeys(crude, "CrudeWebdataset")).items():
            write_tar(tmp_path / parts / "s.tar", [("0", dict.fromkeys(parts.split(), b"1"))])
            _, output = run(tmp_path / parts, answers="1,0,0\n\nTextSample\n")
            assert f"Sample type (number or name) [{guess}]: " in output
            assert ("With 11 names of parts, a field map is not asked for" in output) == (parts == crude[-1])

    def test_when_nobody_answers(self, data: Path) -> None:
        code, output = run(data, answers="8,1,1\n")
        assert code == 1 and "before all questions were answered" in output and "--non-interactive" in output
        assert written(data) == set()


@pytest.mark.parametrize(
    ("field", "parts", "expected"),
    [
        ("image", ["json", "jpg", "png"], "jpg,png"),
        ("image", ["txt"], None),
        ("caption", ["jpg", "caption"], "caption"),
        ("caption", ["jpg", "txt"], "txt"),
        ("caption", ["jpg", "json", "txt"], "txt"),
        ("text", ["json"], "json[text]"),
        ("label", ["cls"], "cls"),
        ("answers", ["json"], "json[answers]"),
        ("answer_weights", ["json"], None),
        ("video", ["txt", "mp4"], "mp4"),
    ],
)
def test_guesses(field: str, parts: list[str], expected: str | None) -> None:
    about = json.dumps({"text": "a", "answers": ["b"]}).encode()
    source = SourceInfo(dataset_path="", index=0, shard_name="", file_names=())
    first = RawSample("0", {name: about if name == "json" else b"" for name in parts}, source)
    assert guess_access(field, dict.fromkeys(parts, 1), first) == expected
