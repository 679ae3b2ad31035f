"""Who says what in a conversation, when its tokens are made of the whole text at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.trainer.tokenizing.tokenizer import HuggingFaceTokenizer
from tests.testing import examples

MARK = "<image>"
CHAT = (
    "{% for m in messages %}{{ '[' + m['role'] + ']\n' + m['content'] + ' \n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """A tokenizer whose tokens are words and runs of spaces and line ends, across what the template writes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder = tmp_path_factory.mktemp("merging")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # tokens begin behind their space
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([Path(json.__file__).read_text(), "]\n a \n\n[user]\n \n\n[assistant]\n"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return HuggingFaceTokenizer(str(folder))


turns = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text("ab é\n\U0001f600", max_size=6)),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=examples(100))
@given(turns, st.booleans())
def test_pieces_are_those_of_the_text(merging: HuggingFaceTokenizer, said: list[tuple[str, str]], shown: bool) -> None:
    messages = [{"role": role, "content": text + MARK * shown} for role, text in said]
    pieces = merging.chat(messages, MARK if shown else None)
    tokens = [token for piece, _ in pieces for token in piece]
    whole = "".join(f"[{one['role']}]\n{one['content']} \n\n" for one in messages)
    parts = [merging.encode_texts([part])[0] for part in (whole.split(MARK) if shown else [whole])]
    joined: list[int] = []
    for place, part in enumerate(parts):
        joined += [-1] * (place > 0) + part
    assert tokens == joined
    answers = [piece for piece, answer in pieces if answer]
    assert len(answers) == sum(role == "assistant" for role, _ in said)
    assert all(piece.count(-1) == shown for piece in answers)


def answers_by_prefixes(tokenizer: HuggingFaceTokenizer, messages: list[dict[str, str]]) -> list[list[int]] | None:
    """The answers' tokens, as those that the text has more with them than without; None where tokens are merged."""
    found = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = "".join(f"[{one['role']}]\n{one['content']} \n\n" for one in messages[:place]) + "[assistant]\n"
            short, long = tokenizer.encode_texts([before, before + message["content"] + " \n\n"])
            everything = tokenizer.encode_plain("".join(f"[{one['role']}]\n{one['content']} \n\n" for one in messages))
            if long[: len(short)] != short or everything[: len(long)] != long:
                return None
            found.append(long[len(short) :])
    return found


@settings(deadline=None, max_examples=examples(100))
@given(turns)
def test_answers_are_what_the_text_has_more_with_them(merging: HuggingFaceTokenizer, said: Any) -> None:
    messages = [{"role": role, "content": text} for role, text in said]
    if messages[0]["role"] == "assistant":
        messages.insert(0, {"role": "user", "content": "a"})
    wanted = answers_by_prefixes(merging, messages)
    if wanted is not None:
        assert [piece for piece, answer in merging.chat(messages) if answer] == wanted


def test_a_long_conversation_is_tokenised_once(merging: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": role, "content": f"word {turn}"} for turn in range(100) for role in ("user", "assistant")]
    inner, seen = merging._tokenizer, []

    class Counting:
        def encode(self, text: str, **options: Any) -> Any:
            seen.append(len(text))
            return inner.encode(text, **options)

    monkeypatch.setattr(merging, "_tokenizer", Counting())
    pieces = merging.chat(messages)
    assert sum(answer for _, answer in pieces) == 100
    assert sum(seen) == sum(len(f"[{one['role']}]\n{one['content']} \n\n") for one in messages)
