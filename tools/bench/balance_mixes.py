"""Four mixes of text and images for :mod:`balance`: how many tokens, images and patches samples have.

Drawn from distributions with the medians and spreads that were published of such data; nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["MIXES", "Mix", "Samples"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """Samples of a mix.

    Args:
        tokens: of each, those of its images included, ``[samples]``.
        loss: of these the ones that the loss counts, ``[samples]``.
        owner: the sample of each image, ascending, ``[images]``.
        patches: of each image, as the encoder sees it; four of them become a token, ``[images]``.
    """

    tokens: Ints
    loss: Ints
    owner: Ints
    patches: Ints

    def images(self) -> Ints:
        """Images of each sample, ``[samples]``."""
        return np.bincount(self.owner, minlength=len(self.tokens))

    def summed(self, of_images: Ints) -> Ints:
        """Sums over each sample's images, ``[samples]``."""
        return np.diff(
            np.concatenate([[0], np.cumsum(of_images)])[np.searchsorted(self.owner, np.arange(len(self.tokens) + 1))]
        )


@dataclass(frozen=True)
class Mix:
    """A mix, and the micro-batches that it is trained with.

    Args:
        draw: makes so many samples.
        tokens: of a micro-batch at most.
        images: of a micro-batch at most.
    """

    draw: Callable[[np.random.Generator, int], Samples]
    tokens: int
    images: int
    about: str


def _lognormal(rng: np.random.Generator, median: float, sigma: float, size: int, low: int, high: int) -> Ints:
    return np.clip(np.rint(rng.lognormal(np.log(median), sigma, size)), low, high).astype(np.int64)


def _samples(text: Ints, share: NDArray[np.float64], owner: Ints, patches: Ints, limit: int) -> Samples:
    """Samples of text and images; what is above the limit is cut from the text."""
    made = Samples(text, text, owner, patches)
    vision = made.summed(patches // 4)
    text = np.clip(text, 2, np.maximum(limit - vision, 2))
    return Samples(text + vision, np.maximum(np.rint(text * share), 1).astype(np.int64), owner, patches)


def captions(rng: np.random.Generator, count: int) -> Samples:
    """One image of its own size and a text: both lognormal (DistTrain, figure 4: LAION's text and image sizes)."""
    patches = 4 * _lognormal(rng, 300, 0.7, count, 16, 2048)
    return _samples(_lognormal(rng, 90, 0.9, count, 4, 2048), np.ones(count), np.arange(count), patches, 8192)


def interleaved(rng: np.random.Generator, count: int) -> Samples:
    """Web pages: 2.5 images (geometric) and 815 tokens of text on average, as OBELICS reports of its own."""
    images = np.minimum(rng.geometric(0.4, count), 16)
    owner = np.repeat(np.arange(count), images)
    patches = 4 * _lognormal(rng, 150, 0.5, len(owner), 64, 1024)
    return _samples(_lognormal(rng, 530, 0.93, count, 16, 8192), np.ones(count), owner, patches, 16384)


def video(rng: np.random.Generator, count: int) -> Samples:
    """Clips of 8 to 64 frames of 256 or 576 patches with a question, and pictures with one between them."""
    is_clip = rng.random(count) < 0.5
    images = np.where(is_clip, 8 * (1 + np.minimum(rng.geometric(0.35, count), 8) - 1), 1)
    owner = np.repeat(np.arange(count), images)
    patches = np.repeat(
        np.where(is_clip, rng.choice([256, 576], count), 4 * _lognormal(rng, 350, 0.6, count, 64, 2048)), images
    )
    return _samples(_lognormal(rng, 200, 0.9, count, 16, 4096), rng.uniform(0.2, 0.8, count), owner, patches, 16384)


def chat(rng: np.random.Generator, count: int) -> Samples:
    """Instructions: a third is text alone, others have a picture in 1 to 12 tiles of 1,024 patches (InternVL's)."""
    kind = rng.random(count)
    tiles = np.where(
        kind < 0.35, 0, np.where(kind < 0.9, 1 + np.minimum(rng.geometric(0.3, count), 12), rng.integers(2, 25, count))
    )
    owner = np.repeat(np.arange(count), tiles)
    patches = np.full(len(owner), 1024, dtype=np.int64)
    return _samples(_lognormal(rng, 420, 1.0, count, 8, 8192), rng.beta(3, 2, count), owner, patches, 16384)


MIXES = {
    "captions": Mix(captions, 8192, 24, "one image and a caption, both lognormal"),
    "interleaved": Mix(interleaved, 16384, 48, "web pages with 2.5 images"),
    "video": Mix(video, 32768, 288, "half clips of 8 to 64 frames, half single images"),
    "chat": Mix(chat, 16384, 48, "instructions, images in tiles"),
}
