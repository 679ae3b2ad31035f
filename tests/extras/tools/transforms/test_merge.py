"""Merged transforms make what torchvision's make one after the other, from the same random numbers."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from PIL import Image

from tests.testing import examples

T = pytest.importorskip("torchvision.transforms", exc_type=ImportError)

from energon_lite.errors import UsageError  # noqa: E402
from energon_lite.extras.tools import transforms as ours  # noqa: E402

BILINEAR, NEAREST = T.InterpolationMode.BILINEAR, T.InterpolationMode.NEAREST


def smooth(height: int, width: int) -> np.ndarray:
    """A picture of (height, width, 3) bytes without edges: interpolating twice or once is nearly the same."""
    y, x = np.mgrid[:height, :width]
    channels = [20 + 200 * x / width, 20 + 200 * y / height, 30 + 100 * (x + y) / (width + height)]
    return np.stack(channels, -1).astype(np.uint8)


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)


def both(transforms: list, picture: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    image = Image.fromarray(picture)
    torch.manual_seed(seed)
    merged = ours.MergeTransform(transforms)(image)
    torch.manual_seed(seed)
    for transform in transforms:
        image = transform(image)
    assert merged.size == image.size
    return np.asarray(merged).astype(int), np.asarray(image).astype(int)


sizes = st.tuples(st.integers(5, 60), st.integers(5, 60))
seeds = st.integers(0, 999)


@given(sizes, sizes, seeds, st.sampled_from(["crop", "padded", "center", "hflip", "vflip"]))
@settings(max_examples=examples(60), deadline=None)
def test_what_moves_whole_pixels_is_equal(size, other, seed, what):
    transform = {
        "crop": lambda: T.RandomCrop(np.minimum(size, other).tolist()),
        "padded": lambda: T.RandomCrop(other, padding=(1, 2, 3, 4), pad_if_needed=True, fill=(9, 8, 7)),
        "center": lambda: T.CenterCrop(other),
        "hflip": lambda: T.RandomHorizontalFlip(0.6),
        "vflip": lambda: T.RandomVerticalFlip(0.6),
    }[what]()
    merged, reference = both([transform], noise(*size), seed)
    assert np.array_equal(merged, reference)


@given(sizes, sizes, seeds)
@settings(max_examples=examples(20), deadline=None)
def test_resize_by_nearest_neighbours(size, other, seed):
    merged, reference = both([T.Resize(other, interpolation=NEAREST)], noise(*size), seed)
    assert (merged == reference).all(-1).mean() > 0.9  # a point on the border of two pixels may go to either


@pytest.mark.parametrize("shape", [(40, 80), (80, 40), (50, 50)])
@pytest.mark.parametrize("arguments", [{"size": 30}, {"size": [30]}, {"size": 30, "max_size": 45}])
def test_resize_by_the_shorter_side(shape, arguments):
    merged, reference = both([T.Resize(**arguments, interpolation=NEAREST)], noise(*shape), 0)
    assert merged.shape == reference.shape


@given(seeds, st.booleans())
@settings(max_examples=examples(20), deadline=None)
def test_rotation(seed, expand):
    transform = T.RandomRotation((-180, 269), interpolation=BILINEAR, expand=expand)
    merged, reference = both([transform], smooth(33, 55), seed)
    assert np.abs(merged - reference).max() <= 2


@pytest.mark.parametrize(("degrees", "center"), [(30, (10, 5)), (90, None), (180, None)])
@pytest.mark.parametrize("expand", [False, True])
def test_rotation_about_a_point(degrees, center, expand):
    transform = T.RandomRotation((degrees, degrees), interpolation=BILINEAR, center=center, expand=expand)
    merged, reference = both([transform], smooth(33, 55), 0)
    assert np.abs(merged - reference).max() <= 2


@given(seeds)
@settings(max_examples=examples(20), deadline=None)
def test_perspective(seed):
    merged, reference = both([T.RandomPerspective(interpolation=BILINEAR)], smooth(100, 120), seed)
    seen = (merged > 0) & (reference > 0)  # at the border one of the two may be a pixel further
    assert seen.mean() > 0.2 and np.abs(merged - reference)[seen].max() <= 2


@given(seeds)
@settings(max_examples=examples(20), deadline=None)
def test_resized_crop(seed):
    merged, reference = both([T.RandomResizedCrop(90, scale=(0.3, 0.7), ratio=(0.75, 1.3))], smooth(50, 60), seed)
    assert np.abs(merged - reference).max() <= 3


@given(seeds)
@settings(max_examples=examples(15), deadline=None)
def test_a_chain_is_the_product(seed):
    chain = [T.RandomHorizontalFlip(), T.RandomRotation((5, 40), interpolation=BILINEAR), T.CenterCrop(40)]
    merged, reference = both(chain, smooth(128, 133), seed)
    assert np.abs(merged - reference).max() <= 2


@given(seeds, st.sampled_from([torch.uint8, torch.float32]), st.sampled_from([(), (2,)]))
@settings(max_examples=examples(15), deadline=None)
def test_a_tensor_is_warped_as_an_image_is(seed, dtype, many):
    chain = [
        T.RandomPerspective(0.3, 1.0, interpolation=BILINEAR, fill=50),
        T.RandomRotation(30, interpolation=BILINEAR, fill=50),
        T.RandomCrop(40, fill=50),
    ]
    picture = smooth(60, 70)
    tensor = torch.from_numpy(picture).permute(2, 0, 1).to(dtype).expand(*many, 3, 60, 70)
    merge = ours.MergeTransform(chain)
    torch.manual_seed(seed)
    image = np.asarray(merge(Image.fromarray(picture))).astype(float)
    torch.manual_seed(seed)
    warped = merge(tensor)
    assert warped.dtype == dtype and warped.shape == (*many, 3, 40, 40)
    difference = np.abs(warped.reshape(-1, 3, 40, 40)[-1].permute(1, 2, 0).double().numpy() - image).max(-1)
    assert np.quantile(difference, 0.9) <= 2  # the two differ where a picture ends: Pillow does not blend with the fill


def test_a_transform_of_the_users_own():
    class Shift(ours.CustomTransform):
        def __init__(self):
            pass

        def apply_transform(self, matrix, dst_size):
            return self.translate(5, 3) @ matrix, dst_size, ("Shift",)

    picture = noise(20, 30)
    moved = np.asarray(ours.MergeTransform([Shift()])(Image.fromarray(picture)))
    assert np.array_equal(moved[3:, 5:], picture[:-3, :-5]) and not moved[:3].any() and not moved[:, :5].any()


def test_a_mapper_of_the_users_own_goes_before_ours():
    class Wider(T.CenterCrop):
        pass

    class WiderMapper(ours.CenterCropMapper):
        source_type = Wider

        def apply_transform(self, matrix, dst_size):
            return super().apply_transform(matrix, dst_size)[0], np.array((7, 9)), ()

    assert ours.MergeTransform([Wider(3)])(Image.new("RGB", (20, 20))).size == (9, 7)
    assert ours.MergeTransform([T.CenterCrop(3)])(Image.new("L", (20, 20))).size == (3, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ours.MergeTransform([T.ColorJitter()]),
        lambda: ours.MergeTransform([T.RandomRotation(3, fill=1), T.RandomPerspective(fill=2)]),
        lambda: ours.MergeTransform([T.Resize(3), T.RandomRotation(3)]),
        lambda: ours.MergeTransform([T.RandomCrop(3, padding=1, padding_mode="reflect")]),
        lambda: ours.MergeTransform([T.RandomCrop(30)])(Image.new("RGB", (9, 9))),
    ],
)
def test_what_cannot_be_merged_is_refused(make):
    with pytest.raises(UsageError) as error:
        make()
    assert error.value.fix


def test_a_grey_image_with_a_fill():
    turned = ours.MergeTransform([T.RandomRotation((45, 45), fill=200)])(Image.new("L", (9, 9)))
    assert turned.getpixel((0, 0)) == 200 and turned.getpixel((4, 4)) == 0
