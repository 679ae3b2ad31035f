from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch

from energon_lite.extras.inspect.preview.token_text import find_tokens, pieces_of, token_figure
from energon_lite.extras.inspect.preview.value_view import Amount, ValueView
from tests.extras.inspect.preview.served import Page


def utf8(tokens: Sequence[int]) -> str:
    """Tokens that are bytes; 0 is a special one, without text."""
    return bytes(token for token in tokens if token).decode("utf-8", "replace")


def words(tokens: Sequence[int]) -> str:
    """Tokens that are words; the first has no space before it, as with SentencePiece."""
    return " ".join(f"w{token}" for token in tokens)


def test_a_character_of_several_tokens_is_one_piece() -> None:
    data = [*"aé🦊".encode(), 0]
    assert pieces_of(data, utf8) == [("a", 1), ("é", 2), ("🦊", 4), ("", 1)]
    assert sum(count for _, count in pieces_of([97, 240, 159], utf8)) == 3  # cut inside of a character
    packed = pieces_of([97, 0, 98, 0], lambda tokens: utf8([*takewhile(bool, tokens)]))  # decoding ends at 0
    assert packed == [("a", 1), ("", 1), ("b", 1), ("", 1)]


def test_spaces_before_words_are_kept() -> None:
    assert pieces_of([1, 2, 3], words) == [("w1", 1), (" w2", 1), (" w3", 1)]


def test_the_pieces_are_the_whole_text() -> None:
    for text in ("long text, é, 🦊 and more. " * 40, "plain " * 40, "🦊" * 70):
        data = [*text.encode()]
        found = pieces_of(data, utf8)
        assert "".join(piece for piece, _ in found) == text and sum(count for _, count in found) == len(data)
    many = [*range(200)]
    assert "".join(piece for piece, _ in pieces_of(many, words)) == words(many)


def test_labels_that_come_next_colour_the_token_that_is_learned() -> None:
    row = find_tokens(
        {"tokens": torch.tensor([1, 2, 3]), "labels": torch.tensor([2, 3, 4]), "loss_mask": torch.tensor([0.0, 1, 1])}
    )
    assert row is not None and row.tokens.tolist() == [1, 2, 3, 4] and row.weights is not None
    assert row.weights.tolist() == [0, 0, 1, 1] and row.fields == {"tokens", "labels", "loss_mask"}


def test_labels_of_the_same_place_that_are_ignored_are_not_learned() -> None:
    row = find_tokens({"input_ids": [5, 6, 0, 7], "labels": [-100, -100, 0, 7]})
    assert row is not None and row.tokens.tolist() == [5, 6, 0, 7] and row.weights is not None
    assert row.weights.tolist() == [0, 0, 1, 1]


def test_the_label_behind_the_last_token_is_no_token() -> None:
    row = find_tokens({"tokens": [1, 2, 3], "labels": [2, 3, 4]})
    assert row is not None and "3 tokens and the label of the last, of which 3" in token_figure(row, "it", None, 20)


def test_a_stored_mask_and_segments() -> None:
    row = find_tokens({"tokens.npy": np.array([1, 2, 3]), "mask.npy": np.array([0, 1, 1], np.uint8)})
    assert row is not None and row.weights is not None and row.weights.tolist() == [0, 1, 1]
    packed = find_tokens({"tokens": torch.tensor([[1, 2, 3, 4]]), "cu_seqlens": torch.tensor([0, 1, 4])})
    assert packed is not None and packed.segments == (0, 1)


def test_the_last_label_of_a_segment_is_not_the_first_token_of_the_next() -> None:
    fields = {"tokens": [1, 2, 3, 5, 6, 7], "labels": [2, 3, 4, 6, 7, 8], "cu_seqlens": torch.tensor([0, 3, 6])}
    row = find_tokens(fields)
    assert row is not None and row.weights is not None and row.learned == 6
    assert row.weights.tolist() == [0, 1, 1, 0, 1, 1, 1]


def test_what_are_no_tokens() -> None:
    for value in (torch.zeros(4), torch.zeros(2, 4, dtype=torch.int64), "tokens", [1], ["a", "b"], None):
        assert find_tokens({"tokens": value}) is None


def test_the_figure_says_how_many_and_shows_some() -> None:
    row = find_tokens({"tokens": torch.arange(100), "loss_mask": (torch.arange(100) >= 90).float()})
    assert row is not None
    figure = token_figure(row, "it", None, 20, "/all")
    assert "100 tokens, of which 10 are learned" in figure and figure.count("<span>") >= 20
    assert '<a href="/all">show all 100</a>' in figure and "<mark" in figure

    def broken(tokens: Sequence[int]) -> str:
        raise ValueError("not these")

    assert ">19</span>" in token_figure(row, "it", broken, 20)  # numbers, then
    assert "w19</span>" in token_figure(row, "it", words, 20)


def test_stored_parts_that_are_values_are_shown_as_such() -> None:
    shown = str(ValueView("it", lambda path: None, Amount()).parts({"tags": ["red", 7], "txt": b"words", "none": b""}))
    assert "red" in shown and "words" in shown and shown.count("empty") == 1


def test_values_are_shown_up_to_the_limits() -> None:
    view = ValueView("it", lambda path: "/" + "/".join(path), Amount(text=20, items=2))
    for value, said in (
        ([1] * 64, str([1] * 64)), ([*range(65)], f"{[*range(64)]} …"), (["a", 1, "x" * 39], f"['a', 1, '{'x' * 39}']"),
        ([1, "x" * 40], f"1{'x' * 20} … 40 characters"), ([], "empty"), (bytes(33), f"33 bytes:{' 00' * 32} …"),
        ([{"role": "user", "content": "hi"}] * 9, "userhi" * 8 + "and 1 more"), ([{"a": 1}] * 3, "a1a1and 1 more"),
        ({"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}}, "abcde{'f': 1}"), ({"__subflavors__": [None]}, "no fields"),
        (np.float64(1.5), "1.5"), (torch.zeros(500), "float32 [500]:" + " 0," * 11 + " 0 …"),
        ("x" * 20, "x" * 20),
    ):  # fmt: skip
        assert Page(view.fields({"it": value})).text == f"it{said}"
    assert '<a href="/all">show all 21 characters' in ValueView("it", str, view.amount, more="/all").text("x" * 21)
    pictures = {"film": torch.zeros(5, 3, 4, 4, dtype=torch.uint8), "pictures": torch.zeros(3, 3, 4, 4)}
    sources = [attrs["src"] for _, attrs in Page(view.fields(pictures)).tags if "src" in attrs]
    assert sources == ["/film/film", "/film/0", "/film/4", "/pictures/0", "/pictures/1"]


def test_parts_are_shown_up_to_the_limits() -> None:
    for name, part, said in (
        ("a.json", b'{"k":1}', '7 bytes{\n  "k": 1\n}'), ("a.txt", b'{"k":1}', '7 bytes{"k":1}'),
        ("b.txt", b"\xffa", "2 bytes\ufffda"), ("c.bin", b"\xffa", "2 bytes2 bytes: ff 61"), ("d", b"", "0 bytesempty"),
        ("a.pkl", b"a", "1 byteDecodeError: part 'a.pkl' is a pickle, which can run code; it is not read"),
        ("b.pkl", bytes(16 << 20), "16.0 MiBDecodeError: part 'b.pkl' is a pickle, which can run code; it is not read"),
        ("c.pkl", b"\xff" * ((16 << 20) + 1), f"16.0 MiB16,777,217 bytes:{' ff' * 32} …"),
        ("e.bin", ("a" + "é" * 5000).encode(), f"9.8 KiBa{'é' * 19} … 2,048 characters"),
        ("g.bin", b"a" * 4092 + b"\xffaaa" + b"a" * 100, f"4.1 KiB4,196 bytes:{' 61' * 32} …"),
        ("f.bin", b"\xffa" * 800, f"1.6 KiB1,600 bytes:{' ff 61' * 16} …"),
    ):  # fmt: skip
        assert Page(ValueView("it", lambda path: None, Amount(text=20)).parts({name: part})).text == f"{name} {said}"
    shown = Page(ValueView("it", lambda path: None, Amount(text=2000)).parts({"a.txt": "🦊".encode() * 3000})).text
    assert shown.count("🦊") == 2000  # more bytes than are read for few characters
