"""Rows of any data: records without a type, chats, images among texts; and the encoders that a run names."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from energon_lite import (
    CaptioningSample,
    ChatSample,
    InterleavedSample,
    SkipSample,
    TextSample,
    VQASample,
    pack_sequences,
    pad_sequences,
)
from energon_lite.batching import TokenSequence
from energon_lite.errors import ConfigError, FatalSampleError, SampleError, UsageError
from energon_lite.hooks import HookContext, hook_context
from energon_lite.trainer import (
    ByteTokenizer,
    DataConfig,
    ModelConfig,
    MultimodalBatch,
    MultimodalTaskEncoder,
    RowsTaskEncoder,
    VisionConfig,
    make_task_encoder,
)
from energon_lite.trainer.data.rows import rows_of
from energon_lite.trainer.data.task_encoder import TokenizedSample, cook_record
from tests.testing import examples

BASE: dict[str, Any] = {"__key__": "k", "__restore_key__": ("sample", 0, 0, 0, 0)}
BOS, EOS, PAD = ByteTokenizer.bos, ByteTokenizer.eos, ByteTokenizer.pad
MODEL = ModelConfig(image_size=4, patch_size=2)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=6)


def encoded(sample: Any, *, max_length: int = 1000, image_size: int = 4, training: bool = False) -> TokenSequence:
    encoder = MultimodalTaskEncoder(max_length=max_length, image_size=image_size, patch_size=2, training=training)
    with hook_context(HookContext(0)):
        return encoder.encode_sample(sample)


def learned(row: TokenSequence) -> list[int]:
    """The labels that the loss counts."""
    mask = torch.ones(len(row.labels)) if row.loss_mask is None else row.loss_mask
    return row.labels[mask > 0].tolist()


def cooked(**parts: Any) -> Any:
    fields = {name.replace("_", "."): part for name, part in parts.items()}
    return cook_record(BASE | {"__subflavors__": {}, "__sources__": ()} | fields)  # type: ignore[arg-type]


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_record_is_what_its_fields_say() -> None:
    image, chat = torch.rand(3, 4, 4), [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    assert cooked(json={"text": "a"}).text == cooked(json={"content": "a"}).text == cooked(txt="a").text == "a"
    assert cooked(json={"messages": chat}).messages == chat
    assert cooked(json={"prompt": "Hi", "response": "Yes"}).messages == chat
    others = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    assert cooked(json={"conversations": others}).messages == chat
    parts = [{"type": "image"}, {"type": "text", "text": "Hi"}]
    found = cooked(json={"messages": [{"role": "user", "content": parts}]}, png=image)
    assert found.messages == [{"role": "user", "content": "<image>Hi"}] and found.images == [image]
    assert cooked(txt="a", jpg=image).caption == cooked(json={"caption": "a"}, webp=image).caption == "a"
    tokens = cooked(tokens_npy=torch.tensor([1, 2]).numpy(), mask_npy=torch.tensor([0, 1]).numpy())
    assert tokens.tokens.tolist() == [1, 2] and tokens.mask.tolist() == [0, 1] and tokens.__key__ == "k"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"json": {"title": "x", "body": "y"}}, "there are title, body"),
        ({"json": ["x"]}, "there are no fields"),
        ({"mp4": b"", "json": {"id": 3}}, "there are id, mp4"),
        ({"json": {"messages": [{"content": "Hi"}]}}, "no message with a role"),
        ({"json": {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}}, "no message with a role"),
        ({"json": {"messages": ["Hi"]}}, "no message with a role"),
        ({"json": {"messages": [{"role": "user", "content": ["Hi"]}]}}, "no message with a role"),
        ({"json": {"messages": [{"role": "user", "content": 5}]}}, "no message with a role"),
        ({"json": {"messages": []}}, "there are messages"),
        ({"txt": "a", "jpg": 1, "png": 2}, "there are txt, jpg, png"),
        ({"json": {"text": 5}}, "neither tokens nor messages nor a text"),
    ],
)
def test_a_record_that_is_none_says_what_it_has(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SampleError, match=said):
        cooked(**fields)


# -- what is learned ---------------------------------------------------------------------------------------------------

MESSAGES = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXT), min_size=1, max_size=5)


@settings(max_examples=examples(60))
@given(said=MESSAGES, places=st.lists(st.integers(0, 4), max_size=3), cut=st.integers(1, 60))
@example(said=[("user", "ab"), ("assistant", "c" * 60)], places=[], cut=40)  # cut within an answer
def test_of_a_chat_the_answers_are_learned_wherever_images_are(
    said: list[tuple[str, str]], places: list[int], cut: int
) -> None:
    for place in places:
        role, text = said[place % len(said)]
        said[place % len(said)] = (role, text[:1] + "<image>" + text[1:] if text[:1] != "<" else "<image>" + text)
    sample = ChatSample(**BASE, messages=[{"role": role, "content": text} for role, text in said])
    sample.images = [torch.full((3, 4, 4), number / 10) for number in range(len(places))]
    answers = [[*text.replace("<image>", "").encode(), EOS] for role, text in said if role == "assistant"]
    if not answers:
        with pytest.raises(SkipSample, match="counts in the loss"):
            encoded(sample)
        return
    row = encoded(sample)
    assert learned(row) == [token for answer in answers for token in answer]
    spoken = "".join(f"{role}:\n{text}" + "\n" * (role != "assistant") for role, text in said).replace("<image>", "")
    whole = [*row.tokens.tolist(), int(row.labels[-1])]
    inside = set()
    if row.media is not None:
        starts = row.media["image_starts"].tolist()
        inside = {start + offset for start in starts for offset in range(4)}
        assert len(inside) == 4 * len(starts) and max(inside) < len(row.tokens), "each has its places in the row"
        assert [round(float(image[0, 0, 0]) * 10) for image in row.media["image"]] == list(range(len(starts)))
        assert all(whole[place] == PAD for place in inside)
        assert row.loss_mask is not None and not any(row.loss_mask[place - 1] for place in inside if place)
    text = [token for place, token in enumerate(whole) if place not in inside and token < 256]
    assert bytes(text).decode() == spoken[: len(bytes(text).decode())], "what follows the last answer may be left out"
    assert row.loss_mask is not None
    counts = [place + 1 for place, counted in enumerate(row.loss_mask) if counted]
    fits = [whole[place] for place in counts if place - sum(one <= place for one in inside) <= cut]
    if not fits:
        with pytest.raises(SkipSample, match="counts in the loss"):
            encoded(sample, max_length=cut)
        return
    short = encoded(sample, max_length=cut)
    assert torch.equal(short.tokens, row.tokens[: len(short.tokens)]), "what is over is cut at the end"
    images = 0 if short.media is None else len(short.media["image"])
    assert len(short.tokens) <= cut + 4 * images and learned(short) == fits


def test_images_and_places_must_be_as_many() -> None:
    sample = ChatSample(
        **BASE, messages=[{"role": "assistant", "content": "<image> a"}], images=[torch.rand(3, 4, 4)] * 2
    )
    with pytest.raises(SampleError, match="1 places for images, of which there are 2"):
        encoded(sample)
    sample.messages[0]["content"] = "a"
    row = encoded(sample)
    assert row.media is not None and row.media["image_starts"].tolist() == [0, 4], "without places, they stand in front"
    with pytest.raises(SkipSample, match="takes none"):
        encoded(sample, image_size=0)
    sample = dataclasses.replace(sample, images=[])
    sample.messages[0]["content"] = "<image>"
    assert bytes(learned(encoded(sample))[:-1]) == b"<image>", "without images, it is a text as any other"


def test_texts_among_images_are_learned() -> None:
    image = torch.rand(3, 4, 4)
    row = encoded(InterleavedSample(**BASE, sequence=["ab", image, "c", image]))
    assert row.tokens.tolist() == [BOS, 97, 98, *[PAD] * 4, 99, *[PAD] * 4] and learned(row) == [97, 98, 99, EOS]
    assert row.media is not None and row.media["image_starts"].tolist() == [3, 8]
    row = encoded(VQASample(**BASE, image=image, context="how many", answers=["two", "3"]))
    assert learned(row) == [*b"two", EOS] and row.media is not None and row.media["image_starts"].tolist() == [7]


@given(tokens=st.lists(st.integers(0, 258), max_size=12), masked=st.booleans(), seed=st.integers(0, 9))
def test_stored_tokens_are_taken_as_they_are(tokens: list[int], masked: bool, seed: int) -> None:
    mask = [number % 3 > 0 for number in range(len(tokens))]
    kept = torch.tensor(mask, dtype=torch.uint8) if masked else None
    sample = TokenizedSample(**BASE, tokens=torch.tensor(tokens, dtype=torch.int32), mask=kept)
    wanted = [token for token, counts in zip(tokens[1:], mask[1:], strict=True) if counts or not masked]
    if not wanted:
        with pytest.raises(SkipSample):
            encoded(sample)
        return
    row = encoded(sample)
    assert row.tokens.tolist() == tokens[:-1] and learned(row) == wanted
    part = encoded(sample, max_length=4, training=True).tokens.tolist() if wanted[:3] else []
    assert part in [tokens[start : start + 4] for start in range(len(tokens))] or len(tokens) < 6 or not part
    assert not masked or len(tokens) < 6 or part in ([], tokens[:4]), "with a mask, it is the beginning"


# -- batches of other encoders -----------------------------------------------------------------------------------------

SEQUENCES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2)), max_size=4)


@settings(max_examples=examples(60))
@given(shapes=SEQUENCES, data=st.data())
def test_padded_and_packed_batches_become_the_same_rows(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    """With images anywhere, of one size or of several: those fill the upper left of what the largest needs."""
    sequences, pictures = [], list[torch.Tensor]()
    for length, images in shapes:
        tokens = torch.tensor(data.draw(st.lists(st.integers(0, 9), min_size=length, max_size=length)))
        starts = data.draw(st.lists(st.integers(0, length - 1), min_size=images, max_size=images))
        shown = [torch.rand(3, *data.draw(st.sampled_from([(4, 4), (2, 4), (4, 2)]))) for _ in range(images)]
        media = {"image": shown, "image_starts": torch.tensor(starts)} if images else None
        sequences.append(TokenSequence(**BASE, tokens=tokens, labels=tokens, media=media))
        pictures += shown
    padded = rows_of(pad_sequences(sequences, pad=9, multiple=2), image_size=4)
    packed = rows_of(pack_sequences(sequences, pad=9, multiple=5), image_size=4)
    assert packed.documents is not None and padded.documents is None
    assert torch.equal(padded.image, packed.image) and len(padded.image) == len(pictures)
    sizes = [(picture.shape[1], picture.shape[2]) for picture in pictures]
    assert padded.image_sizes == packed.image_sizes == (sizes if len({*sizes}) > 1 else None)
    most = tuple(max(sides) for sides in zip(*sizes, strict=True)) if sizes else (4, 4)
    assert padded.image.shape[1:] == (3, *most)
    for image, picture, (height, width) in zip(padded.image, pictures, sizes, strict=True):
        assert torch.equal(image, F.pad(picture, (0, most[1] - width, 0, most[0] - height)))
    for number, sequence in enumerate(sequences):
        length = len(sequence.tokens)
        assert torch.equal(padded.tokens[number, :length], sequence.tokens)
        assert torch.equal(packed.tokens[packed.documents == number], sequence.tokens)
        assert padded.loss_mask[number].tolist() == [1] * length + [0] * (padded.tokens.shape[1] - length)
    ends = [0]
    for sequence in sequences:
        ends.append(ends[-1] + len(sequence.tokens))
    begun = torch.tensor(ends)[padded.image_rows]
    assert torch.equal(packed.image_starts, padded.image_starts + begun) and not packed.image_rows.any()


class Other(MultimodalTaskEncoder):
    """Whatever a test gives it."""

    def __init__(self, made: Any):
        super().__init__(max_length=4)
        self.made = made

    def batch(self, samples: Any) -> Any:
        return self.made


def sequence(*tokens: int) -> TokenSequence:
    return TokenSequence(**BASE, tokens=torch.tensor(tokens), labels=torch.tensor(tokens))


def batch_of(**changes: Any) -> MultimodalBatch:
    return dataclasses.replace(rows_of(pad_sequences([sequence(1, 2), sequence(3)], pad=0)), **changes)


def with_image(row: int, start: int, size: tuple[int, int]) -> MultimodalBatch:
    """Two rows of six places with an image in the first, and another one."""
    images = {"image": torch.zeros(2, 3, 4, 4), "image_sizes": [(4, 4), size]}
    places = {"image_rows": torch.tensor([0, row]), "image_starts": torch.tensor([1, start])}
    return dataclasses.replace(rows_of(pad_sequences([sequence(*range(6))] * 2, pad=0)), **images, **places)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"tokens": 1}, r"test_task_encoders\.Other returned a dict.*pad_sequences"),
        (None, "Other returned a NoneType"),
        (pad_sequences([sequence(1, 259)], pad=0), "Other made a token 259.*the model has 259 tokens"),
        (pad_sequences([sequence(1, -1)], pad=0), "Other made a token -1"),
        (batch_of(loss_mask=torch.ones(2, 3)), r"made loss_mask of shape \[2, 3\] for tokens of shape \[2, 2\]"),
        (batch_of(tokens=torch.ones(2, dtype=torch.int64)), r"made tokens of shape \[2\]"),
        (
            dataclasses.replace(pack_sequences([sequence(1, 2)], pad=0), position_ids=torch.tensor([[0, 5]])),
            "position_ids do not count up",
        ),
        (with_image(0, 3, (4, 4)), "made image 1 of 4 x 4 pixels take positions 3 to 7 of row 0"),
        (with_image(2, 0, (4, 4)), "row 2"),
        (with_image(0, 0, (1, 4)), "1 x 4 pixels take positions"),
    ],
)
def test_a_batch_that_is_none_ends_the_run_and_names_the_class(made: Any, said: str) -> None:
    with pytest.raises(FatalSampleError, match=re.compile(said, re.DOTALL)):
        RowsTaskEncoder(Other(made), MODEL).encode_batch(made)


def test_what_counts_and_lengths_of_documents_are_known_without_reading_them_back() -> None:
    """Labels below zero do not count."""
    made = batch_of(labels=torch.tensor([[-100, 0], [3, -100]]), loss_mask=torch.tensor([[1, 0.5], [1, 1]]))
    rows = RowsTaskEncoder(Other(made), MODEL).encode_batch(made)
    assert rows.labels.tolist() == [[0, 0], [3, 0]] and rows.loss_mask.tolist() == [[0, 0.5], [1, 0]]
    assert isinstance(rows.loss_tokens, float) and rows.loss_tokens == 1.5 and rows.document_lengths is None
    assert torch.equal(torch.as_tensor(batch_of().loss_tokens), batch_of().loss_mask.sum(dtype=torch.float64))
    made = batch_of(documents=torch.tensor([[0, 1], [1, 1]]))
    assert RowsTaskEncoder(Other(made), MODEL).encode_batch(made).document_lengths == [1, 1, 2]


def test_nothing_left_is_a_batch_without_rows_for_any_encoder() -> None:
    rows = RowsTaskEncoder(Other(None), MODEL).empty_batch("anything", 3)
    assert rows.tokens.shape == (0, 0) and rows.image.shape == (0, 3, 4, 4)


# -- the encoder that a run names --------------------------------------------------------------------------------------

MODULE = """
from energon_lite import TaskEncoder, TextSample
from energon_lite.trainer import MultimodalTaskEncoder

class Own(TaskEncoder):
    def __init__(self, tokenizer, shout=False):
        self.tokenizer, self.shout = tokenizer, shout

class Derived(MultimodalTaskEncoder):
    pass

class Passing(MultimodalTaskEncoder):
    def __init__(self, more=0, **others):
        super().__init__(**others)
        self.more = more

def made(*, training):
    return Own(None, shout=training)

def broken(tokenizer):
    return tokenizer.nothing

instance, number = Own("t"), 5
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"encoders_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def named(module: str, name: str, **args: Any) -> Any:
    data = DataConfig("x", max_length=7, task_encoder=f"{module}:{name}", task_encoder_args=args or None)
    return make_task_encoder(data, MODEL, training=False).task_encoder


def test_an_encoder_gets_what_it_names(module: str) -> None:
    own = named(module, "Own", shout=True)
    assert isinstance(own.tokenizer, ByteTokenizer) and own.shout is True
    assert named(module, "Own", tokenizer="mine").tokenizer == "mine", "what is given wins"
    derived = named(module, "Derived")
    assert (derived.max_length, derived.image_size, derived.training) == (7, 4, False)
    passing = named(module, "Passing", more=3, max_length=9)
    assert (passing.more, passing.max_length, passing.patch_size) == (3, 9, 2)
    assert named(module, "made").shout is False and named(module, "instance").tokenizer == "t"
    assert vars(MultimodalTaskEncoder(max_length=7)).items() >= {"image_size": 0, "patch_size": 1}.items()
    for strategy, packed, pooling, length in (("capacity", False, "mean", 1), ("best_fit", True, "none", 4)):
        seeing = ModelConfig(image_size=4, patch_size=2, vision=VisionConfig(image_token=7, pooling=pooling))
        batching = {"strategy": strategy, "capacity": 64}
        made: Any = make_task_encoder(DataConfig("x", batching=batching), seeing).task_encoder
        assert (made.image_token, made.image_length, made.packed) == (7, length, packed)
    plain = make_task_encoder(DataConfig("x"), MODEL).task_encoder
    assert type(plain) is MultimodalTaskEncoder and plain.training


def test_a_wrong_name_and_wrong_arguments_are_told(module: str) -> None:
    with pytest.raises(UsageError, match=rf"{module} has no 'Ownn'.*\n.*\n.*did you mean 'Own'"):
        named(module, "Ownn")
    with pytest.raises(UsageError, match="there is no module 'nowhere'"):
        named("nowhere", "Own")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'shuot'"):
        named(module, "Own", shuot=True)
    with pytest.raises(UsageError, match="gives a int, not a task encoder"):
        named(module, "number")
    with pytest.raises(AttributeError, match="nothing"):
        named(module, "broken")  # the user's own mistake is shown as it is
    with pytest.raises(ConfigError, match=r"data\.task_encoder_args"):
        make_task_encoder(DataConfig("x", task_encoder_args={"shout": 1}), MODEL)


def test_what_a_sample_costs_beside_its_tokens() -> None:
    encoder = MultimodalTaskEncoder(max_length=20, image_size=4, patch_size=2)
    text = encoder.sample_costs(encoder.encode_sample(TextSample(**BASE, text="abc")))
    assert text == {"loss_tokens": 4, "images": 0, "patches": 0, "squared_patches": 0, "image_patches": []}
    caption = CaptioningSample(**BASE, image=torch.zeros(3, 8, 8), caption="abc")
    costs = encoder.sample_costs(encoder.encode_sample(caption))
    assert costs == {"loss_tokens": 4, "images": 1, "patches": 4, "squared_patches": 16, "image_patches": [4]}
