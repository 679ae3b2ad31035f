"""Cooker for records without a declared type: lines of JSONL, and the parts of a sample in a tar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_lite import (
    CaptioningSample,
    ChatSample,
    CrudeSample,
    Sample,
    TextSample,
    basic_sample_keys,
    cooker,
    stateless,
)
from energon_lite.errors import SampleError
from energon_lite.trainer.tokenizing.shards import TOKENS_PART
from energon_lite.trainer.tokenizing.task_encoder import tokenized_sample

#: Placeholder of an image in a text.
IMAGE_MARK = "<image>"

_IMAGES = ("jpg", "jpeg", "png", "webp")
#: Names of fields with a chat, and with a text.
_CHATS = ("messages", "conversations")
_TEXTS = ("text", "content", "caption")
#: Chat roles by other common names.
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}


@cooker
@stateless(restore_seeds=False)
def cook_record(sample: CrudeSample) -> Sample:
    """Make the sample of a record, by the names of its fields.

    * ``tokens.npy``, and ``mask.npy`` if there is one: the output of ``energon-lite tokenize``.
    * ``messages`` (or ``conversations``), a list of ``{role, content}`` (or ``{from, value}``): a chat. ``content`` is
      a text, in which ``<image>`` stands for an image, or a list of ``{type: text, text}`` and ``{type: image}``.
    * ``prompt`` and ``response``: a chat of two messages.
    * ``text``, ``content`` or ``caption``, or the file ``txt``: a text.

    Fields are those of the part ``json``. The parts ``jpg``, ``png`` and ``webp`` are images of the chat or the text.

    Raises:
        SampleError: the record has none of these fields.
    """
    base = basic_sample_keys(sample)
    if TOKENS_PART in sample:
        return tokenized_sample(sample)
    record = sample.get("json")
    fields: Mapping[str, Any] = record if isinstance(record, dict) else {}
    images = [sample[name] for name in _IMAGES if name in sample]
    messages = next((fields[name] for name in _CHATS if name in fields), None)
    if messages is None and "prompt" in fields and "response" in fields:
        messages = [{"role": "user", "content": fields["prompt"]}, {"role": "assistant", "content": fields["response"]}]
    if isinstance(messages, list) and messages:
        return ChatSample(**base, messages=[_message(message) for message in messages], images=images)
    text = next((fields[name] for name in _TEXTS if name in fields), sample.get("txt"))
    if isinstance(text, str) and len(images) <= 1:
        return CaptioningSample(**base, image=images[0], caption=text) if images else TextSample(**base, text=text)
    names = [*fields, *(name for name in sample if not name.startswith("__") and name != "json")]
    raise SampleError(
        f"neither tokens nor messages nor a text: there are {', '.join(names) or 'no fields'}",
        where=str(sample["__key__"]),
        fix="name a task encoder of yours with a cooker for it: data.task_encoder=module:Class",
    )


def _message(said: Any) -> dict[str, Any]:
    """Read role and content under any of their names."""
    if isinstance(said, dict):
        role, content = said.get("role", said.get("from")), said.get("content", said.get("value"))
        if isinstance(content, list):
            kinds = [item.get("type") if isinstance(item, dict) else None for item in content]
            known = all(kind in ("text", "image") for kind in kinds)
            content = "".join(item.get("text") or IMAGE_MARK for item in content) if known else None
        if isinstance(role, str) and isinstance(content, str):
            return {"role": _ROLES.get(role, role), "content": content}
    raise SampleError(f"no message with a role and a text: {str(said)[:80]}", fix="give {role: user, content: Hi}")
