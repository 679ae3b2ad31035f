from __future__ import annotations

import dataclasses
import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from energon_lite import VQASample
from energon_lite.trainer import Trainer, latest_checkpoint, load_config
from energon_lite.trainer.tokenizing.tokenizer import ByteTokenizer
from examples.charts import answering, figure
from examples.charts.answering import Answer
from examples.charts.drawing import COLOURS, SIZE, Chart, Painter, different_charts, hold_out
from examples.charts.encoder import QuestionEncoder, prompt
from examples.charts.photographs import PICTURES, crops
from examples.charts.questions import KINDS, ask
from examples.charts.recipes import BLEND, recipes
from examples.demo import blend
from examples.demo.steps import Steps
from tests.trainer.parallel.rank_processes import RunRanks

CONFIG = Path(__file__).parents[3] / "examples" / "configs" / "charts.yaml"
CHART = Chart(("red", "blue", "green"), (3, 7, 1))


def pixels(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image)


def area(image: np.ndarray, colour: str) -> int:
    wanted = [int(COLOURS[colour][at : at + 2], 16) for at in (1, 3, 5)]
    return int((np.abs(image.astype(int) - wanted).sum(axis=-1) < 8).sum())


def test_bars_have_their_colours_and_heights() -> None:
    painter = Painter()
    image = pixels(painter.png(CHART))
    assert image.shape == (SIZE, SIZE, 3)
    red, blue, green = (area(image, colour) for colour in CHART.colours)
    assert 0 < green < red < blue
    # Columns of the middle bar, and none beside it.
    assert area(image[:, 15:25], "blue") == blue
    # Nothing of the chart before is left.
    painter.png(Chart(("yellow", "purple"), (8, 8)))
    assert np.array_equal(pixels(painter.png(CHART)), image)


def test_held_out_charts_are_others() -> None:
    charts = list(different_charts(500, seed=1))
    assert charts == list(different_charts(500, seed=1))
    assert len(set(charts)) == len({chart.name for chart in charts}) == 500
    train, val = hold_out(charts, 100)
    assert len(val) == 100 and not set(train) & set(val)


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        ("how many", {"How many bars?": "three"}),
        ("highest", {"Which bar is highest?": "blue"}),
        ("lowest", {"Which bar is lowest?": "green"}),
        ("place", {"Which bar is first?": "red", "Which bar is second?": "blue", "Which bar is third?": "green"}),
    ],
)
def test_questions_and_their_answers(kind: str, answers: dict[str, str]) -> None:
    assert asked(kind) == answers


def asked(kind: str) -> dict[str, str]:
    """Many questions of a kind, each with its answer."""
    random_ = random.Random(0)
    return {one.text: one.answer for one in (ask(CHART, kind, random_) for _ in range(90))}


def test_all_pairs_are_asked() -> None:
    pairs = asked("compare")
    assert len(pairs) == 6
    assert pairs["Is red higher than blue?"] == "no"
    assert pairs["Is blue higher than green?"] == "yes"


def test_crops_are_of_all_pictures() -> None:
    found = list(crops(2, seed=3))
    assert [crop.subject for crop in found] == [subject for subject in PICTURES.values() for _ in range(2)]
    assert all(pixels(crop.png).shape == (SIZE, SIZE, 3) for crop in found)
    assert len({crop.png for crop in found}) == len(found)


def test_the_answer_alone_is_learned() -> None:
    encoder = QuestionEncoder(max_length=32, image_size=8, patch_size=4)
    sample = VQASample(
        __key__="key", __restore_key__=(), image=torch.rand(3, 16, 16), context="Which?", answers=["red"]
    )
    row = encoder.encode_sample(sample)
    asked = prompt(encoder.tokenizer, 4, "Which?")
    assert row.tokens.tolist() == [*asked, *b"red"]
    assert row.loss_mask is not None
    learned = row.labels[row.loss_mask > 0].tolist()
    assert learned == [*b"red", ByteTokenizer.eos]
    assert row.media is not None
    assert torch.as_tensor(row.media["image"]).shape == (1, 3, 8, 8)


def answer(key: str, said: str) -> Answer:
    return Answer(key, torch.rand(3, SIZE, SIZE), "Which bar is highest?", "red", said)


def test_right_answers_are_counted_by_kind(tmp_path: Path) -> None:
    answers = [answer("red3-blue1-highest", "red"), answer("red3-blue1-how-many", "re"), answer("b-highest", "blue")]
    kinds = answering.by_question(answers)
    assert {kind: len(those) for kind, those in kinds.items()} == {"how many": 1, "highest": 2}
    assert answering.accuracy(answers) == pytest.approx(1 / 3)
    assert "1 of     2   50.0%" in answering.table(kinds)
    figure.draw_answers(tmp_path / "answers.png", answers)
    assert pixels((tmp_path / "answers.png").read_bytes()).ndim == 3


def test_as_many_wrong_answers_are_shown_as_there_are() -> None:
    answers = [answer("a-highest", "red")] * 6 + [answer("a-highest", "blue")] * 2
    assert [one.right for one in figure.typical(answers, 4)] == [True, True, True, False]


def test_the_configuration_fits_the_run() -> None:
    steps = Steps.of(CONFIG)
    assert steps.resume < steps.kill < steps.total


def test_it_trains_and_answers(run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    for recipe in recipes(train=12, held_out=2):
        small = {split: list(samples)[:24] for split, samples in recipe.splits.items()}
        blend.write_shards(dataclasses.replace(recipe, splits=small), data)
        blend.prepare(recipe, data)
    blend.write_blend(data, BLEND)
    monkeypatch.chdir(CONFIG.parents[2])
    settings = ["train.steps=3", "train.save_every=3", "train.eval_every=3", "data.workers=0", "model.num_layers=2"]
    settings += [f"output={tmp_path / 'run'}", f"data.path={data / 'blend.yaml'}", "data.micro_batch_size=8"]

    def train(rank: int) -> int:
        with Trainer(load_config(CONFIG, settings)) as trainer:
            return trainer.run()

    assert run_ranks(1, train) == [3]
    newest = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert newest is not None
    answers = answering.answer_held_out(data / "charts", Path(newest))
    # One question of each kind about each of the two charts that are held out.
    assert sorted(len(those) for those in answering.by_question(answers).values()) == [2] * len(KINDS)
    assert all(one.image.shape == (3, SIZE, SIZE) for one in answers)
