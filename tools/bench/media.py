"""Audio and video: frames a second of a bare loop over PyAV, of ``AVDecoder``, of Energon's, and of a loader.

All decode the same clips of the same films (H.264 and AAC, 320 x 240, 30 frames a second, a group of pictures each
second) from memory, with one thread, into RGB tensors. The bare loop does the least that can be done: open, search,
decode, convert, stack; the plain one does it as PyAV's documentation does. ``loader`` is a loader without workers whose
``encode_sample`` takes the clip; it reads the film from its shard as well.

    python tools/bench/media.py --runs 5
"""

from __future__ import annotations

import argparse
import io
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.video.reformatter import VideoReformatter
from common import machine, spread, table, write_shards

FPS, SECONDS, FILMS = 30, 8, 4


def film(number: int) -> bytes:
    """A film of moving stripes, with a tone."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        video = container.add_stream("libx264", rate=FPS)
        video.width, video.height, video.pix_fmt = 320, 240, "yuv420p"
        video.codec_context.gop_size = FPS
        sound = container.add_stream("aac", rate=16000, layout="mono")
        across = np.arange(320)[None, :, None] + np.zeros((240, 1, 3))
        for at in range(FPS * SECONDS):
            picture = (127 + 120 * np.sin((across + 3 * at) / (7 + number))).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = at, Fraction(1, FPS)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        tone = (8000 * np.sin(np.arange(16000 * SECONDS) / 6)).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(tone, format="s16", layout="mono")
        frame.sample_rate, frame.pts = 16000, 0
        container.mux(sound.encode(frame))
        container.mux(sound.encode(None))
    return file.getvalue()


def plain(data: bytes, start: float, stop: float) -> torch.Tensor:
    """The frames of a clip, by PyAV as its documentation shows it."""
    return _by_pyav(data, start, stop, lambda frame: frame.to_ndarray(format="rgb24"))


def bare(data: bytes, start: float, stop: float) -> torch.Tensor:
    """The same with one converter for all frames, without threads: on a busy machine they cost more than all else."""
    convert = VideoReformatter().reformat
    return _by_pyav(data, start, stop, lambda frame: convert(frame, format="rgb24", threads=1).to_ndarray())


def _by_pyav(data: bytes, start: float, stop: float, array: Callable[[Any], Any]) -> torch.Tensor:
    with av.open(io.BytesIO(data)) as container:
        (stream,) = container.streams.video
        stream.codec_context.thread_type, stream.codec_context.thread_count = "NONE", 1
        if start:
            container.seek(int(start / stream.time_base), stream=stream)
        frames = []
        for frame in container.decode(stream):
            if frame.time > stop + 1e-6:
                break
            if frame.time >= start - 1e-6:
                frames.append(torch.from_numpy(array(frame)))
    return torch.stack(frames).permute(0, 3, 1, 2)


def ours(data: bytes, start: float, stop: float) -> torch.Tensor:
    from energon_lite.extras.media import AVDecoder

    return AVDecoder(io.BytesIO(data)).get_video_clips([(start, stop)])[0][0]


def energons(data: bytes, start: float, stop: float) -> torch.Tensor:
    from megatron.energon.av import AVDecoder

    found: torch.Tensor = AVDecoder(io.BytesIO(data), suppress_warnings=True).get_video_clips([(start, stop)])[0][0]
    return found


def loader(folder: Path, start: float, stop: float) -> Iterator[int]:
    """Frames of each film, as a loader gives them, without end. The clips stay where they are: stacking them into a
    batch would be one more copy, which the others do not make."""
    import energon_lite as lib

    class Clip(lib.TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            (clip,), _ = sample.video.get_video_clips([(start, stop)])
            return lib.TextSample.derive_from(sample, text=str(len(clip)))

    config = lib.WorkerConfig(rank=0, world_size=1)
    dataset = lib.get_train_dataset(folder, batch_size=1, worker_config=config, task_encoder=Clip())
    with lib.get_savable_loader(dataset) as batches:
        for batch in batches:
            yield int(batch.text[0])


def rate(work: Callable[[], int]) -> float:
    begin = time.perf_counter()
    return work() / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    films = [film(number) for number in range(FILMS)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        samples = [{"mp4": data, "txt": b"what?"} for data in films]
        path = write_shards(Path(folder, "films"), samples, 100, "VidQASample", {"video": "mp4", "context": "txt"})
        for name, (start, stop) in {"whole film": (0.0, float(SECONDS)), "2 s of it": (5.5, 7.5)}.items():
            ways: dict[str, Callable[[], int]] = {
                one.__name__: lambda one=one, span=(start, stop): sum(len(one(data, *span)) for data in films)
                for one in (bare, plain, ours, energons)
            }
            batches = loader(path, start, stop)
            ways["loader"] = lambda batches=batches: sum(itertools.islice(batches, FILMS))
            counted = {way: work() for way, work in ways.items()}  # warm
            assert len({*counted.values()}) == 1, counted
            found: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(runs):
                for way in random.sample([*ways], len(ways)):
                    found[way].append(rate(ways[way]))
            best = {way: sorted(values)[len(values) // 2] for way, values in found.items()}
            rows += [[name, way, spread(values, 0), f"{best[way] / best['bare']:.2f}"] for way, values in found.items()]
    print(machine())
    print(table(["clip", "by", "frames/s", "of bare"], rows))


if __name__ == "__main__":
    main()
