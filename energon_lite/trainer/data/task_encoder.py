"""Task encoders of the trainer, from samples to rows of tokens, and the cooker of records without a declared type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from energon_lite import (
    CaptioningSample,
    ChatSample,
    Cooker,
    CrudeSample,
    InterleavedSample,
    Sample,
    SkipSample,
    TaskEncoder,
    TextSample,
    VQASample,
    basic_sample_keys,
    cooker,
    edataclass,
    pack_sequences,
    pad_sequences,
    stateless,
)
from energon_lite.batching import PackedBatch, PaddedBatch, TokenSequence, next_token_pairs
from energon_lite.errors import SampleError
from energon_lite.storage import SampleDecoder
from energon_lite.trainer.data.rows import rows_of
from energon_lite.trainer.models.interface import MultimodalBatch
from energon_lite.trainer.tokenizing.shards import MASK_PART, TOKENS_PART
from energon_lite.trainer.tokenizing.tokenizer import ByteTokenizer, Tokenizer


@edataclass
class TokenizedSample(Sample):
    """Stored tokens and loss mask of a sample.

    Args:
        tokens: int32 ``[length]``.
        mask: uint8 ``[length]``, 1 for the tokens in the loss; None: all of them.
    """

    tokens: torch.Tensor
    mask: torch.Tensor | None = None


@cooker
@stateless(restore_seeds=False)
def cook_tokens(sample: CrudeSample) -> TokenizedSample:
    """Make the sample of stored tokens, and of their mask if there is one."""
    mask = sample.get(MASK_PART)
    return TokenizedSample(
        **basic_sample_keys(sample),
        tokens=torch.as_tensor(sample[TOKENS_PART]),
        mask=None if mask is None else torch.as_tensor(mask),
    )


class TokenizedTaskEncoder(TaskEncoder):
    """Encoder for next-token prediction on the output of ``energon-lite tokenize``.

    A sample of n tokens becomes a row of n - 1 positions: each token but the last, with the next one as label. Batches
    are planned by these positions, one fewer per sample than a column of stored tokens counts.

    Args:
        packed: True to pack samples into one row (:class:`~energon_lite.batching.PackedBatch`); False to pad them to
            the longest (:class:`~energon_lite.batching.PaddedBatch`).
        pad: the padding token.
        multiple: pad rows to the next multiple of this length.

    Example:
        >>> dataset = get_train_dataset("data/chats", batch_size=None, batching=BestFit(Capacity(8192)),
        ...                             task_encoder=TokenizedTaskEncoder(), worker_config=config)
    """

    cookers: ClassVar[Sequence[Cooker]] = [Cooker(cook_tokens)]
    #: Number of positions by which a row is shorter than the length in a column made of a stored part.
    row_shorter_by: ClassVar[Mapping[str, int]] = {TOKENS_PART: 1}

    def __init__(self, *, packed: bool = True, pad: int = 0, multiple: int = 1):
        super().__init__()
        self.packed = packed
        self.pad = pad
        self.multiple = multiple

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: TokenizedSample) -> TokenSequence:
        """Make tokens, labels and loss mask.

        Raises:
            SkipSample: the sample has fewer than two tokens, so there is nothing to predict.
        """
        if len(sample.tokens) < 2:
            raise SkipSample("it has fewer than two tokens, so nothing can be predicted")
        tokens, labels, loss_mask = next_token_pairs(sample.tokens.to(torch.int64), sample.mask)
        return TokenSequence.derive_from(sample, tokens=tokens, labels=labels, loss_mask=loss_mask)

    @stateless(restore_seeds=False)
    def batch(self, samples: list[TokenSequence]) -> PackedBatch | PaddedBatch:
        """Make one packed row, or one padded row for each sample. No samples make an empty batch."""
        make = pack_sequences if self.packed else pad_sequences
        return make(samples, pad=self.pad, multiple=self.multiple)

    @stateless(restore_seeds=False)
    def empty_batch(self, like: Any, rows: int) -> PackedBatch | PaddedBatch:
        """Make a batch for a rank without samples."""
        return self.batch([])


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
        return cook_tokens(sample)
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


#: Placeholder of an image in a list of tokens, whatever its number of tokens.
_IMAGE = -1


class MultimodalTaskEncoder(TaskEncoder):
    """Encoder of samples of any type into token sequences, and of sequences into batches.

    The loss counts everything in a text, a caption (which follows its image) and texts among images; the assistant's
    words in a chat and in a question about an image; and the stored mask of stored tokens. Records without a type, such
    as those of JSONL, are recognized by the names of their fields (:func:`cook_record`).

    The length of a sample is that of its ``tokens``, including placeholders of images, and it reports the other inputs
    of the cost model. So this encoder can also measure data for ``data.batching``. Custom encoders may derive from it.

    Args:
        max_length: the most tokens of a sample, without those of images.
        image_size: height and width that images are resized to, in pixels; 0 makes images an error.
        patch_size: height and width of a patch, in pixels; each patch of an image is a token.
        pooled: an image is one token.
        image_token: placeholder token of images; None for the padding token.
        training: take a random window of a text that is too long; otherwise, its beginning.
        packed: pack the samples of a batch into one row; otherwise, each has its own row.
        tokenizer: None for the bytes of UTF-8.

    Example:
        >>> rows = MultimodalTaskEncoder(max_length=2048)  # in measured.py
        >>> # energon-lite measure data/text --task-encoder measured:rows
    """

    decoder = SampleDecoder(image_decode="torchrgb")
    cookers: ClassVar[Sequence[Cooker]] = [Cooker(cook_record)]
    row_shorter_by = TokenizedTaskEncoder.row_shorter_by

    def __init__(
        self,
        *,
        max_length: int,
        image_size: int = 0,
        patch_size: int = 1,
        pooled: bool = False,
        image_token: int | None = None,
        training: bool = True,
        packed: bool = False,
        tokenizer: Tokenizer | None = None,
    ):
        super().__init__()
        self.tokenizer: Tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.max_length = max_length
        self.image_size = image_size
        self.patch_size = patch_size
        self.training = training
        self.packed = packed
        self.image_length = 1 if pooled else (image_size // patch_size) ** 2
        self.image_token = self.tokenizer.pad if image_token is None else image_token

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> TokenSequence:
        """Encode a sample; labels at images do not count.

        Raises:
            SkipSample: the sample's type has no rows, it has an image and the model takes none, or the loss would count
                none of its tokens.
            SampleError: the text of a chat has placeholders for another number of images than there are.
        """
        if isinstance(sample, TokenizedSample):
            return self._row(sample, sample.tokens.to(torch.int64), sample.mask)
        if isinstance(sample, TextSample):
            return self._row(sample, torch.tensor(self.tokenizer.encode(sample.text), dtype=torch.int64))
        pieces, images = self._pieces(sample)
        if images and not self.image_size:
            raise SkipSample("an image for a model that takes none")
        tokens = torch.tensor([token for piece, _ in pieces for token in piece], dtype=torch.int64)
        counted = [answers and token != _IMAGE for piece, answers in pieces for token in piece]
        # Surplus tokens are cut at the end, as are tokens after the last one that the loss counts.
        kept = (tokens != _IMAGE).cumsum(0) <= self.max_length + 1
        last = max((place for place in range(int(kept.sum())) if counted[place]), default=-1)
        return self._row(sample, tokens[: last + 1], torch.tensor(counted[: last + 1]), images)

    @stateless(restore_seeds=False)
    def sample_costs(self, encoded: TokenSequence) -> dict[str, Any]:
        """Return the costs of a sample other than its tokens, as columns for :class:`CostModel`."""
        images = 0 if encoded.media is None else len(encoded.media["image"])
        patches = [(self.image_size // self.patch_size) ** 2] * images
        mask = encoded.loss_mask
        return {
            "loss_tokens": len(encoded.tokens) if mask is None else int(torch.count_nonzero(mask)),
            "images": images,
            "patches": sum(patches),
            "squared_patches": sum(number**2 for number in patches),
            "image_patches": patches,
        }

    def _pieces(self, sample: Any) -> tuple[list[tuple[list[int], bool]], list[torch.Tensor]]:
        """Return pieces of tokens, with -1 for each image, and whether the loss counts them; and the images."""
        begin, end = ([] if token is None else [token] for token in (self.tokenizer.bos, self.tokenizer.eos))
        if isinstance(sample, CaptioningSample):
            text = self.tokenizer.encode_plain(sample.caption)
            return [([_IMAGE], False), (begin, False), ([*text, *end], True)], [sample.image]
        if isinstance(sample, InterleavedSample):
            parts = sample.sequence
            made = [self.tokenizer.encode_plain(part) if isinstance(part, str) else [_IMAGE] for part in parts]
            images = [part for part in parts if not isinstance(part, str)]
            return [(begin, False), *((tokens, True) for tokens in made), (end, True)], images
        if isinstance(sample, VQASample) and sample.answers:
            asked = {"role": "user", "content": f"{IMAGE_MARK}\n{sample.context}"}
            messages = [asked, {"role": "assistant", "content": sample.answers[0]}]
            return self.tokenizer.chat(messages, IMAGE_MARK), [sample.image]
        if isinstance(sample, ChatSample):
            pieces = self.tokenizer.chat(sample.messages, IMAGE_MARK if sample.images else None)
            places, number = sum(tokens.count(_IMAGE) for tokens, _ in pieces), len(sample.images)
            if places not in (0, number):
                what = f"the texts have {places} places for images, of which there are {number}"
                raise SampleError(what, where=sample.__key__, fix=f"write {IMAGE_MARK} for each, or for none")
            return [([_IMAGE], False)] * (number - places) + pieces, sample.images
        raise SkipSample(f"cannot make a row of a {type(sample).__name__}")

    def _row(
        self,
        sample: Any,
        tokens: torch.Tensor,
        counted: torch.Tensor | None = None,
        images: Sequence[torch.Tensor] = (),
    ) -> TokenSequence:
        """Make the sequence of tokens, with -1 for each image; ``counted`` marks those that the loss counts."""
        media = None
        if images:
            at = (tokens == _IMAGE).nonzero()[:, 0]
            shown = [resize_image(image, self.image_size) for image in images[: len(at)]]
            sizes = torch.ones_like(tokens).index_fill(0, at, self.image_length)
            media = {"image": torch.stack(shown), "image_starts": (sizes.cumsum(0) - sizes)[at]} if shown else None
            counted = None if counted is None else counted.repeat_interleave(sizes)
            tokens = tokens.repeat_interleave(sizes)
            tokens = tokens.masked_fill(tokens == _IMAGE, self.image_token)
        elif (surplus := len(tokens) - (self.max_length + 1)) > 0:  # a row's labels are its tokens shifted by one
            # `rng` is the sample's own generator: the window is the same whenever this sample is made.
            start = int(self.rng.integers(surplus + 1)) if self.training and counted is None else 0
            part = slice(start, start + self.max_length + 1)
            tokens, counted = tokens[part], None if counted is None else counted[part]
        if len(tokens) < 2 or (counted is not None and not counted[1:].any()):
            raise SkipSample("no token of it counts in the loss")
        row, labels, mask = next_token_pairs(tokens, counted)
        loss_mask = None if counted is None else mask
        return TokenSequence.derive_from(sample, tokens=row, labels=labels, loss_mask=loss_mask, media=media)

    @stateless(restore_seeds=False)
    def empty_batch(self, like: MultimodalBatch, rows: int) -> MultimodalBatch:
        """Make a batch of no rows, for a rank that has run out of samples before the others."""
        return self.batch([])

    @stateless(restore_seeds=False)
    def batch(self, samples: list[TokenSequence]) -> MultimodalBatch:
        """Make one packed row, or rows padded to the longest one. No samples make a batch of no rows."""
        make = pack_sequences if self.packed and samples else pad_sequences
        return rows_of(make(samples, pad=self.tokenizer.pad), image_size=self.image_size)


def resize_image(image: torch.Tensor, size: int) -> torch.Tensor:
    """Resize an image ``[3, height, width]`` in [0, 1] to ``[3, size, size]``, ignoring its proportions."""
    if tuple(image.shape[-2:]) == (size, size):
        return image
    return F.interpolate(image[None], size=(size, size), mode="bilinear", antialias=True)[0].clamp(0.0, 1.0)
