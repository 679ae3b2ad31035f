"""The data sets of the run: charts, digits and pictures with questions, and text.

<folder>/charts/    a chart, a question, an answer
<folder>/digits/    a handwritten digit, "Which digit is this?", an answer
<folder>/pictures/  a crop of a picture, "What is this picture of?", an answer
<folder>/stdlib/    source text
<folder>/blend.yaml
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence

from examples.charts import photographs
from examples.charts.drawing import Chart, Painter, different_charts, hold_out
from examples.charts.questions import KINDS, TRAINED, ask
from examples.demo import blend, digits
from examples.demo.blend import SPLITS, DatasetRecipe, RawSample

#: Charts to train on, and held out; all different.
TRAIN_CHARTS, HELD_OUT_CHARTS = 10_000, 400
#: Crops of each picture to train on, and held out.
TRAIN_CROPS, HELD_OUT_CROPS = 200, 20

BLEND = """\
# Nine of ten training samples are charts. There are few texts, since of these each byte is learned: with more,
# they have most of the gradient. Held-out loss is measured on charts alone.
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {path: ./charts, weight: 54}
      - {path: ./digits, weight: 3}
      - {path: ./pictures, weight: 2}
      - {path: ./stdlib, weight: 1}
  val:
    path: ./charts
"""
_FIELDS = {"image": "png", "context": "json[question]", "answers": "json[answers]"}


def recipes(train: int = TRAIN_CHARTS, held_out: int = HELD_OUT_CHARTS) -> list[DatasetRecipe]:
    """All data sets, with the given numbers of charts."""
    random_ = random.Random(2)
    learned, asked = hold_out(different_charts(train + held_out, seed=1), held_out)
    read = digits.hold_out(digits.load_digits())
    crops = (photographs.crops(TRAIN_CROPS, seed=3), photographs.crops(HELD_OUT_CROPS, seed=4))
    by_name = {recipe.name: recipe for recipe in blend.recipes()}
    return [
        _recipe(
            "charts",
            [chart_samples(learned, TRAINED, random_), chart_samples(asked, [[kind] for kind in KINDS], random_)],
        ),
        _recipe(
            "digits",
            [
                (vqa_sample(one.key, one.png, "Which digit is this?", digits.NAMES[one.label]) for one in part)
                for part in read
            ],
        ),
        _recipe(
            "pictures",
            [(vqa_sample(one.key, one.png, "What is this picture of?", one.subject) for one in part) for part in crops],
        ),
        by_name["stdlib"],
    ]


def chart_samples(
    charts: Iterable[Chart], kinds: Iterable[Sequence[str]], random_: random.Random
) -> Iterator[RawSample]:
    """Questions about each chart, one out of each of some groups of kinds."""
    painter = Painter()
    for chart in charts:
        png = painter.png(chart)
        for kind in map(random_.choice, kinds):
            asked = ask(chart, kind, random_)
            yield vqa_sample(f"{chart.name}-{kind.replace(' ', '-')}", png, asked.text, asked.answer)


def vqa_sample(key: str, png: bytes, question: str, answer: str) -> RawSample:
    """A sample for ``VQASample``."""
    return {"__key__": key, "png": png, "json": json.dumps({"question": question, "answers": [answer]}).encode()}


def _recipe(name: str, parts: Iterable[Iterable[RawSample]]) -> DatasetRecipe:
    return DatasetRecipe(name, "VQASample", _FIELDS, dict(zip(SPLITS, parts, strict=True)), shard_size=2000)
