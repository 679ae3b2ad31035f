"""The commands of docs/with_torchtitan.md on real text: the source of the standard library."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
import sysconfig
from pathlib import Path

import pytest

from energon_lite.extras.frameworks.torchtitan import LoaderRequest, TitanLoader
from tests.house.docs.pages import DOCS, blocks
from tests.testing import ALONE, invoke
from tests.trainer.tokenizing.conftest import tokenizer_folder as tokenizer_folder

PAGE = DOCS / "with_torchtitan.md"
#: Of torchtitan's llama3_debugmodel.
SEQ_LEN = 2048


@pytest.mark.slow
def test_its_commands_work_on_real_text(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-h]*.py"))
    (tmp_path / "corpus").mkdir()
    for number in range(20):
        texts = [json.dumps({"text": one.read_text(errors="replace")[:20_000]}) for one in modules[number::20]]
        (tmp_path / "corpus" / f"{number:02d}.jsonl").write_text("\n".join(texts))
    (command,) = re.findall(r"^energon-lite (tokenize .*?[^\\])$", PAGE.read_text(), re.M | re.S)
    words = shlex.split(command.replace("\\\n", " ").replace("assets/hf/llama", str(tokenizer_folder)))
    done = invoke(*words, "--num-workers", "1", "--no-progress")
    assert done.exit_code == 0, done.output
    code = next(block.code for block in blocks(PAGE, "python") if block.mark == "file: my_runs.py")
    (tmp_path / "titan_page_runs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    runs = importlib.import_module("titan_page_runs")
    request = LoaderRequest(worker_config=ALONE, dataset_path="tokens", seq_len=SEQ_LEN)
    for make in (runs.train, runs.validate):
        inputs, labels = next(iter(TitanLoader(make, request)))
        assert inputs["input"].shape == labels.shape == (1, SEQ_LEN) and int((labels >= 0).sum()) > SEQ_LEN // 2
    sys.modules.pop("titan_page_runs")


def test_it_says_first_what_it_needs() -> None:
    before_the_first_command = PAGE.read_text().partition("```")[0]
    for need in ("GPU", "Triton", "Python 3.11", "torch"):
        assert need in before_the_first_command
