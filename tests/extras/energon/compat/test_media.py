"""Audio and video beside Energon's: the same clips of the same files, and metadata that both write and read."""

from __future__ import annotations

import dataclasses
import inspect
import io
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import filetype
import pytest
import torch

import energon_lite.extras.media
from energon_lite.extras.energon.compat.documents import AVProbeIndex
from energon_lite.extras.media import AVDecoder, get_clips_uniform, get_single_frames_uniform
from energon_lite.extras.media.metadata import MediaTable
from energon_lite.storage import SampleDecoder
from energon_lite.storage.samples.part_decoder import guess_extension
from tests.media_files import CONTAINERS, RATE, SECONDS, SOUNDS, film, media
from tests.testing import output_of, same, write_tar

energon = pytest.importorskip("megatron.energon.av")

KINDS = [*CONTAINERS, *SOUNDS]


def both(kind: str) -> tuple[Any, Any]:
    data = media(kind)
    return AVDecoder(io.BytesIO(data)), energon.AVDecoder(io.BytesIO(data), suppress_warnings=True)


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("size", [None, (20, 10)])
def test_pictures(kind: str, size: tuple[int, int] | None) -> None:
    ours, theirs = both(kind)
    for spans in ([(0, 1), (1.23, 2.34)], [(0.55, 0.55), (3.05, 3.05)], [(2.06, 100)], [(0, float("inf"))]):
        one, other = (decode.get_video_clips(spans, video_out_frame_size=size) for decode in (ours, theirs))
        assert same(one[0], other[0]) and one[1] == other[1]
    for spans in ([(0, 4)], [(7, 7), (20, 21)], [(39, 60)], [(5, float("inf"))], [(50, 60)]):
        one, other = (decode.get_video_clips(spans, video_unit="frames") for decode in (ours, theirs))
        assert same(one[0], other[0]) and one[1] == other[1]
    frames = get_single_frames_uniform(ours, 5, video_out_frame_size=size, return_timestamps=True)
    expected = energon.get_single_frames_uniform(theirs, 5, video_out_frame_size=size, return_timestamps=True)
    assert torch.equal(frames[0], expected[0]) and frames[1] == expected[1]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_the_frame_near_a_time(kind: str) -> None:
    av, theirs = pytest.importorskip("av"), pytest.importorskip("megatron.energon.av.av_reader").AVProbeIndex
    with av.open(io.BytesIO(media(kind))) as one, av.open(io.BytesIO(media(kind))) as other:
        ours, expected = AVProbeIndex(one), theirs(other)
        times = [ours[at].timestamp for at in range(len(ours))]
    assert len(ours) == len(expected) == 40
    for way in ({"backward": b, "any_frame": a} for b in (True, False) for a in (True, False)):
        for time in (shift + time for time in times for shift in (-1, 0, 1)):
            assert ours.search_timestamp(time, **way) == expected.search_timestamp(time, **way), (time, way)


@pytest.mark.parametrize("kind", ["wav", "flac", "mp4", "mov", "mkv"])
def test_sounds(kind: str) -> None:
    ours, theirs = both(kind)
    for span in ((0, 1), (0.5, 2.25), (1.1, 3.0), (0, float("inf"))):
        one, other = (decode.get_audio_clips([span]) for decode in (ours, theirs))
        if kind == "mkv":  # its clock has milliseconds, and Energon's clips a few samples more or less than was asked
            assert span[1] == float("inf") or one[0][0].shape[1] == round((span[1] - span[0]) * RATE)
            shortest = min(one[0][0].shape[1], other[0][0].shape[1])
            assert shortest > one[0][0].shape[1] - RATE // 1000
            one, other = (([clip[:, :shortest] for clip in clips], times) for clips, times in (one, other))
        assert same(one[0], other[0]) and one[1] == other[1]
    if kind == "mkv":
        return
    span = (RATE // 2, 2 * RATE)
    one, other = (decode.get_audio_clips([span], audio_unit="samples") for decode in (ours, theirs))
    assert same(one[0], other[0]) and one[1] == other[1]
    asked: dict[str, Any] = {"clip_duration_seconds": 0.7, "num_clips": 3, "request_audio": True}
    clips = get_clips_uniform(ours, **asked), energon.get_clips_uniform(theirs, **asked)
    assert same(clips[0].audio_clips, clips[1].audio_clips)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_file_says(kind: str) -> None:
    ours, theirs = both(kind)
    asked: list[dict[str, bool]] = [{}, {"get_video": False}, {"get_audio": False}, {"get_video_frame_count": False}]
    if kind not in ("mp3", "webm"):  # Energon searches for the beginning first, and loses what these codecs have there
        asked.append({"get_audio_num_samples": True})
    for one in asked:
        found, expected = ours.get_metadata(**one), theirs.get_metadata(**one)
        if kind == "mp3" and found.audio_duration:  # and it takes the time before the first sample from the duration
            assert found.audio_duration == pytest.approx(SECONDS, abs=0.1)
            found = dataclasses.replace(found, audio_duration=expected.audio_duration)
        assert found.to_dict() == pytest.approx(expected.to_dict(), abs=1e-9)
    for name in ("has_audio_stream", "has_video_stream"):
        assert getattr(ours, name)() == getattr(theirs, name)()
    if kind in CONTAINERS:
        assert ours.get_video_fps() == theirs.get_video_fps()
        assert ours.get_video_duration(True) == theirs.get_video_duration(True)
    assert ours.get_audio_samples_per_second() == theirs.get_audio_samples_per_second()


@pytest.mark.parametrize("kind", ["mp4", "wav"])
def test_all_of_a_file(kind: str) -> None:
    ours, theirs = both(kind)
    for sound_too in (False, True):
        one, other = (decode.get_frames(video_decode_audio=sound_too) for decode in (ours, theirs))
        assert same(one.video_clips, other.video_clips) and same(one.audio_clips, other.audio_clips)


@pytest.mark.parametrize("module", ["av", "media"])
def test_every_name_with_its_arguments(module: str) -> None:
    theirs = __import__(f"megatron.energon.{module}", fromlist=["*"])
    for name in theirs.__all__:
        ours, other = getattr(energon_lite.extras.media, name), getattr(theirs, name)
        methods = [one for one in vars(other) if not one.startswith("_")] if inspect.isclass(other) else []
        pairs = [(ours, other), *((getattr(ours, one), getattr(other, one)) for one in methods)]
        for mine, its in pairs:
            if (callable(its) and not isinstance(its, type(energon.AVDecoder.get_video))) or not callable(mine):
                continue
            wanted, have = inspect.signature(its).parameters, inspect.signature(mine).parameters
            assert list(wanted) == list(have)[: len(wanted)], (name, its)
            assert {one: p.default for one, p in wanted.items()} == {one: have[one].default for one in wanted}


@pytest.mark.parametrize("kind", KINDS)
def test_content(kind: str) -> None:
    data = media(kind)
    assert guess_extension(data) == filetype.guess(data).extension


def test_what_a_part_becomes() -> None:
    from megatron.energon import SampleDecoder as EnergonDecoder

    data = film("webm")
    for name in ("a.webm", "a.bin", "a.txt"):
        ours, theirs = (made(guess_content=True).decode(name, data) for made in (SampleDecoder, EnergonDecoder))
        assert type(ours).__name__ == type(theirs).__name__ == "AVDecoder"
    one, other = (made(av_decode="torch").decode("a.webm", data) for made in (SampleDecoder, EnergonDecoder))
    assert same(one.video_clips, other.video_clips)
    assert SampleDecoder().config() == EnergonDecoder().config()


def picture(path: Path, size: tuple[int, int]) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path)


def rows(root: Path) -> dict[str, tuple[str, str]]:
    with closing(sqlite3.connect(root / ".nv-meta" / "index.sqlite")) as database:
        return {key: found for key, *found in database.execute("SELECT * FROM media_metadata")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "media"
    picture(root / "sub" / "a.PNG", (7, 5))
    picture(root / "b.jpg", (8, 4))
    (root / "c.mp4").write_bytes(film("mp4"))
    (root / "d.unknown").write_bytes(film("mkv"))
    (root / "e.txt").write_text("no medium")
    return root


@pytest.mark.parametrize("how", ["extension", "header"])
def test_the_metadata_of_a_folder_is_energons(folder: Path, how: str) -> None:
    from megatron.energon.cache import SystemFileStore
    from megatron.energon.epathlib import EPath
    from megatron.energon.media.extractor import MediaFilterConfig

    output_of("prepare-media", folder, f"--media-metadata-by-{how}", "--no-progress", "--num-workers", 1)
    theirs = MediaFilterConfig.parse(None, how == "header", how == "extension")
    found = {
        str(path.relative_to(folder)): theirs.extract_metadata(path.read_bytes(), path.name)
        for path in folder.rglob("*.*")
        if path.is_file() and path.parent.name != ".nv-meta" and theirs.should_consider_media(path.name)
    }
    found = {name: metadata for name, metadata in found.items() if metadata is not None}
    assert set(rows(folder)) == set(found) and len(found) == 3 + (how == "header")
    store = SystemFileStore(EPath(folder))
    for key, metadata in found.items():
        assert store.get_media_metadata(key) == metadata
        assert MediaTable(str(folder)).get(key).to_dict() == metadata.to_dict()


def test_the_metadata_of_shards_is_read_by_energon_and_kept(tmp_path: Path) -> None:
    from megatron.energon.cache.file_store import WebdatasetFileStore
    from megatron.energon.epathlib import EPath

    root = tmp_path / "films"
    for shard in range(2):
        samples = [(f"f/{shard}{n}", {"mp4": film("mp4"), "txt": b"a"}) for n in range(2)]
        write_tar(root / f"{shard}.tar", samples)
    given = ("--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--no-progress")
    said = output_of("prepare", root, *given, "--media-metadata-by-glob", "*.mp4")
    assert "metadata of 4 media" in said
    first = rows(root)
    assert set(first) == {f"f/{shard}{n}.mp4" for shard in range(2) for n in range(2)}
    store = WebdatasetFileStore(EPath(root))
    assert store.get_media_metadata("f/11.mp4").video_fps == 10
    output_of("prepare", root, "--tar-index-only", "--no-progress")
    assert rows(root) == first
    output_of("prepare", root, *given, "--force-overwrite")
    assert rows(root) == first
    assert WebdatasetFileStore(EPath(root)).get_media_metadata("f/00.mp4").video_num_frames == 40
