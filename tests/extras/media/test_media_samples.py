"""Films in shards: decoders come out of loaders, read what they need, and one that was cut off is a counted skip."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image

from energon_lite import TaskEncoder, TextSample, basic_sample_keys, cooker, stateless
from energon_lite.errors import UsageError
from energon_lite.extras.media import AVData, AVDecoder, av_decoder
from energon_lite.hooks import Cooker
from energon_lite.samples import ChatSample, VidQASample
from energon_lite.storage import SampleDecoder
from energon_lite.storage.prepare import index_again
from energon_lite.storage.read.ranges import RangeStream
from tests.media_files import FPS, film, long_film, sound
from tests.servers import upload
from tests.testing import CRUDE_YAML, refusal_of, take, train_loader, write_dataset

FILMS = "{sample_type: VidQASample, field_map: {video: mp4, context: txt}}"
COUNT = 12


@pytest.fixture
def films(tmp_path: Path) -> Path:
    """12 films of two seconds; those of keys 3 and 7 were cut off."""
    data = film("mp4", seconds=2)
    samples = [(str(n), {"mp4": data[: -(n in (3, 7)) * 1000 or None], "txt": b"%d" % n}) for n in range(COUNT)]
    return write_dataset(tmp_path / "films", {"a.tar": samples[:6], "b.tar": samples[6:]}, dataset_yaml=FILMS)


class Clips(TaskEncoder):
    """The second second of each film."""

    @stateless(failure_tolerance=None)
    def encode_sample(self, sample: VidQASample) -> Any:
        assert isinstance(sample.video, AVDecoder)
        clips, _ = sample.video.get_video_clips([(1, 2)], video_out_frame_size=(8, 8))
        return TextSample.derive_from(sample, text=f"{sample.context} {clips[0].shape[0]} {int(clips[0].sum())}")


def loader_of(path: Path | str, encoder: TaskEncoder | None = None, workers: int = 0) -> Any:
    in_order: dict[str, Any] = {"repeat": False, "shuffle_buffer_size": None, "max_samples_per_sequence": None}
    return train_loader(path, workers, batch_size=2, task_encoder=encoder, **in_order)


@pytest.mark.parametrize("above", [8 << 20, 0])
def test_films_that_were_cut_off_are_counted_and_the_run_is_the_same_when_resumed(films: Path, above: int) -> None:
    encoder = Clips()
    encoder.decoder = SampleDecoder(stream_above=above)
    with loader_of(films, encoder) as loader:
        whole = [list(batch.text) for batch in loader]
        assert loader.stats()["failed"] >= 2
        (reason,) = {one["reason"].partition(":")[0] for one in loader.stats()["reasons"]}
        assert reason == "DecodeError"
    texts = [text for batch in whole for text in batch]
    assert len(texts) == COUNT and not {"3", "7"} & {text.split()[0] for text in texts}
    assert all(text.split()[1] == str(FPS) for text in texts)
    with loader_of(films, encoder, workers=1) as loader:
        first = [list(batch.text) for batch in take(loader, 2)]
        state = loader.save_state_rank()
    with loader_of(films, encoder) as loader:
        loader.restore_state_rank(state)
        batches_left = list(loader)
        rest = [list(batch.text) for batch in batches_left]
        made = loader.restore_sample(batches_left[0].__restore_key__)
    assert first + rest == whole and list(made.text) == rest[0]


def test_lint_names_films_that_were_cut_off(films: Path) -> None:
    assert refusal_of("lint", films, "--no-progress").count("bytes are missing") == 2


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("above", [8 << 20, 0])
def test_decoders_come_out_of_workers(films: Path, workers: int, above: int) -> None:
    encoder = TaskEncoder()
    encoder.decoder = SampleDecoder(stream_above=above)
    with loader_of(films, encoder, workers) as loader:
        batch = next(iter(loader))
    for one in batch.video:
        assert isinstance(one, AVDecoder) and isinstance(one.stream, io.BytesIO if above else RangeStream)
    whole = next(one for one, name in zip(batch.video, batch.context, strict=True) if name not in "37")
    assert whole.get_metadata().video_num_frames == 2 * FPS


def test_of_a_long_film_in_a_shard_little_is_read(tmp_path: Path) -> None:
    data = long_film("mp4")
    films = {"long": data, "cut": data[:-9]}
    shard = [(name, {"json": b"{}", "mp4": film, "txt": name.encode()}) for name, film in films.items()]
    path = write_dataset(tmp_path / "long", {"a.tar": shard}, dataset_yaml=FILMS)
    with loader_of(path) as loader:
        batch = next(iter(loader))
    video = batch.video[batch.context.index("long")]
    assert video.stream.fetched == 0 and video.stream.size == len(data)
    ((clip,), _) = video.get_video_clips([(400, 402)])
    assert clip.equal(AVDecoder(io.BytesIO(data)).get_video_clips([(400, 402)])[0][0])
    assert video.stream.fetched < len(data) // 20


def test_of_a_long_film_behind_a_url_its_clips_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, size = long_film("mp4"), 0
    path = write_dataset(tmp_path / "far", {"a.tar": [("0", {"mp4": data, "txt": b"far"})]}, dataset_yaml=FILMS)
    index_again(str(path))
    memory, url = fsspec.filesystem("memory"), upload(path, "far")
    real = type(memory).cat_file

    def cat_file(self: Any, *arguments: Any, **options: Any) -> bytes:
        nonlocal size
        found: bytes = real(self, *arguments, **options)
        size += len(found)
        return found

    monkeypatch.setattr(type(memory), "cat_file", cat_file)
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    try:
        with loader_of(url) as loader:
            (video,) = next(iter(loader)).video
        assert isinstance(video.stream, RangeStream) and size < len(data) // 50
        ((clip,), _) = video.get_video_clips([(500, 502)])
        assert clip.equal(AVDecoder(io.BytesIO(data)).get_video_clips([(500, 502)])[0][0])
        assert size < len(data) // 20
    finally:
        memory.store.clear()


def test_forms(films: Path) -> None:
    decode = SampleDecoder(av_decode="torch", video_decode_audio=True).decode
    found = decode("mp4", film("mp4"))
    assert isinstance(found, AVData) and found.video_clips and found.audio_clips
    assert not SampleDecoder(av_decode="torch").decode("MP4", film("mp4")).audio_clips
    assert SampleDecoder(av_decode="torch").decode("x.flac", sound("flac")).audio_clips[0].dtype is torch.int16
    with SampleDecoder(av_decode="pyav").decode("webm", film("webm")) as container:
        assert len(container.streams.video) == 1
    assert SampleDecoder(av_decode=None).decode("mp4", b"film") == b"film"
    sample = SampleDecoder(image_decode=None)({"__key__": "0", "mp4": film("mp4"), "txt": b"a"})
    assert isinstance(sample["mp4"], AVDecoder) and sample["txt"] == "a" and sample["__key__"] == "0"


def test_content_says_what_a_part_is() -> None:
    decode = SampleDecoder(guess_content=True).decode
    assert decode("bin", film("mkv")).has_video_stream()
    assert decode("txt", sound("mp3")).has_audio_stream()
    assert decode("bin", b"no medium") == b"no medium" and decode("txt", b"BM is no bitmap") == "BM is no bitmap"
    assert SampleDecoder(guess_content=True).function("bin")(film("mp4")).get_video_fps() == FPS  # type: ignore[misc]


def test_without_pyav_a_data_set_of_films_is_refused(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av_decoder, "has_pyav", lambda: False)
    with pytest.raises(UsageError, match=r"part 'mp4'.*PyAV") as error:
        loader_of(films)
    assert "energon-lite[av]" in str(error.value.fix) and error.value.where == str(films)
    encoder = TaskEncoder()
    encoder.decoder = SampleDecoder(av_decode=None)
    with loader_of(films, encoder) as loader:
        assert isinstance(next(iter(loader)).video[0], bytes)


@stateless
@cooker()
def cook(sample: dict[str, Any]) -> ChatSample:
    endings = {"images": "png", "videos": "mp4", "audios": "wav", "arrays": "npy"}
    media: Any = {
        field: [sample[name] for name in sorted(sample) if name.endswith(ending)] for field, ending in endings.items()
    }
    return ChatSample(**basic_sample_keys(sample), messages=sample["json"], **media)


class Chats(TaskEncoder):
    cookers = [Cooker(cook)]


def test_a_chat_about_several_media(tmp_path: Path) -> None:
    picture, array = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (4, 3)).save(picture, "png")
    np.save(array, np.arange(5))
    parts = {
        "json": b'[{"role": "user", "content": "<image> <image> <video> <sound>?"}]',
        **{"0.png": picture.getvalue(), "1.png": picture.getvalue(), "0.mp4": film("mp4"), "1.mp4": film("mp4")},
        **{"0.wav": sound("wav"), "tokens.npy": array.getvalue()},
    }
    path = write_dataset(tmp_path / "chats", {"a.tar": [(str(n), parts) for n in range(2)]}, dataset_yaml=CRUDE_YAML)
    with loader_of(path, Chats()) as loader:
        batch = next(iter(loader))
    assert [len(one) for one in (batch.images[0], batch.videos[0], batch.audios[0], batch.arrays[0])] == [2, 2, 1, 1]
    assert batch.images[0][0].shape == (3, 3, 4) and batch.videos[1][0].get_video_fps() == FPS
