"""Writes event files that `tensorboard --logdir RUN` reads, without TensorBoard's package.

An event file is a TFRecord file of protocol buffers: `Event` with wall_time = 1 (double), step = 2 (varint), file_version = 3 and
summary = 5, which has value = 1 with tag = 1 and simple_value = 2 (float). Each start of a run begins a new file. TensorBoard reads all
files as one run.
"""

import os
import struct
import time as clock
from collections.abc import Mapping
from pathlib import Path

from argosy.core.formats.crc32c import masked_crc32c
from argosy.observe.trackers.base import TrackedRun, TrackerSettings


class TensorBoard(TrackerSettings):
    """Files of events in `trackers/tensorboard` of the run directory: `tensorboard --logdir runs`. Needs no package to write."""

    dir: str | None = None
    """Another folder for the files. None: that of the run."""

    def open(self, run: TrackedRun, id: str) -> "EventFile":
        return EventFile(Path(self.dir) / run.name if self.dir else run.folder / "tensorboard")


class EventFile:
    """An event file to which metrics are appended."""

    id, whole_steps = "", False

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard recognizes files by this prefix. The rest distinguishes files of the same second.
        self.path = folder / f"events.out.tfevents.{clock.time():.6f}.{os.getpid()}"
        self.file = self.path.open("ab")
        self.file.write(tf_record(event(clock.time(), version="brain.Event:2")))

    def log(self, step: int, numbers: Mapping[str, float], time: float) -> None:
        self.file.write(tf_record(event(time, step, numbers)))

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def event(time: float, step: int = 0, numbers: Mapping[str, float] | None = None, version: str = "") -> bytes:
    """Encodes an `Event`."""
    out = b"\x09" + struct.pack("<d", time)
    if step:
        out += b"\x10" + base_128(step)
    if version:
        out += field(3, version.encode())
    if numbers:
        values = (field(1, name.encode()) + b"\x15" + struct.pack("<f", number) for name, number in numbers.items())
        out += field(5, b"".join(field(1, value) for value in values))
    return out


def field(number: int, content: bytes) -> bytes:
    """Encodes a protocol buffer field that holds bytes."""
    return base_128(number << 3 | 2) + base_128(len(content)) + content


def base_128(value: int) -> bytes:
    """Encodes an unsigned integer as a varint, with seven bits per byte."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def tf_record(content: bytes) -> bytes:
    """Encodes a TFRecord: length, checksum of the length, content, checksum of the content."""
    length = struct.pack("<Q", len(content))
    sums = [struct.pack("<I", each) for each in masked_crc32c([length, content])]
    return length + sums[0] + content + sums[1]
