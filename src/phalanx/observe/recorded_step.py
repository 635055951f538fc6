"""The file in which one rank keeps what it recorded of a few steps: events, allocations, and our own words for them.

Two tables of fixed-width rows in one compressed ``.npz`` (numpy's own format, without pickles), beside a list of names and one of *marks*. A mark
is what a range stands for in our own words: a step, a slot, a module, a collective with its group, number and bytes. Times are in
nanoseconds since ``base_unix_ns`` of this rank's own clock; ranks' clocks are brought together by whoever reads them side by side.

A reader bounds what it unpacks, and numpy refuses objects by default: the file lies in a directory that others may write to.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.run.directory.files import read_small, write_atomically
from phalanx.run.fields import JsonObject

EVENT = np.dtype(
    [
        ("name", "<i4"),
        ("mark", "<i4"),  # -1: an operation of PyTorch's
        ("thread", "<i4"),  # a host's thread, or a device's stream
        ("kind", "u1"),
        ("begin_ns", "<i8"),
        ("ns", "<i8"),
        ("seq", "<i8"),  # autograd's: the same in an operation and its backward; -1 without
        ("flops", "<f8"),
        ("bytes", "<f8"),  # read and written, from the shapes
        ("link", "<i8"),  # the same in a kernel and in what launched it; 0 without
    ]
)
ALLOCATION = np.dtype([("t_ns", "<i8"), ("address", "<i8"), ("bytes", "<i8"), ("device", "u1")])
"""``bytes`` are negative where memory is given back."""
HOST, KERNEL, COPY, LAUNCH = range(4)
"""Kinds of events: on the host, kernels and copies on a device, and the host's calls that queue them."""
ORDER_FILE = "recording.json"
"""In the folder of a profile: what rank 0 has ordered."""
MOST_EVENTS = 300_000
MOST_ALLOCATIONS = 300_000
_MOST_FILE_BYTES = 64 << 20
_MOST_UNPACKED_BYTES = 256 << 20


class ProfileFileError(ValueError):
    """A file that is no recording of a rank; the message has the file and the reason."""


@dataclass(frozen=True)
class RankTrace:
    """The recording of one rank."""

    rank: int
    meta: Mapping[str, Any]
    """This rank's device, peaks, memory before the first step by kind, and how many events were left out."""
    names: Sequence[str]
    marks: Sequence[JsonObject]
    events: NDArray[np.void]
    allocations: NDArray[np.void]

    def mark(self, event: int) -> JsonObject | None:
        """Our own word for an event, or ``None``."""
        number = int(self.events["mark"][event])
        return self.marks[number] if number >= 0 else None


def rank_file(folder: Path, rank: int) -> Path:
    """The file of ``rank`` in the folder of a profile."""
    return folder / f"rank-{rank:06d}.npz"


def write_rank_trace(path: Path, trace: RankTrace) -> int:
    """Write the file atomically, and return its size in bytes. Raises ``OSError``."""
    head = {
        "rank": trace.rank,
        "meta": dict(trace.meta),
        "names": list(trace.names),
        "marks": list(trace.marks),
    }
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(head).encode(), dtype=np.uint8)
    np.savez_compressed(buffer, head=text, events=trace.events, allocations=trace.allocations)
    content = buffer.getvalue()
    write_atomically(path, content, durable=False)
    return len(content)


def read_rank_trace(path: Path) -> RankTrace:
    """Return the recording in ``path``.

    Raises ``ProfileFileError`` if it is damaged or unpacks to too many bytes. Raises ``OSError`` if it cannot be read
    or the file itself is too large.
    """
    content = read_small(path, _MOST_FILE_BYTES)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            if sum(part.file_size for part in packed.infolist()) > _MOST_UNPACKED_BYTES:
                raise ProfileFileError(f"{path} unpacks to more than {_MOST_UNPACKED_BYTES >> 20} MiB")
        with np.load(io.BytesIO(content)) as arrays:
            head = json.loads(arrays["head"].tobytes())
            trace = RankTrace(
                int(head["rank"]),
                head["meta"],
                head["names"],
                head["marks"],
                arrays["events"],
                arrays["allocations"],
            )
        _check(trace)
    except ProfileFileError:
        raise
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        zipfile.BadZipFile,
        EOFError,
        RecursionError,
    ) as error:
        raise ProfileFileError(f"{path} is damaged: {error}; ask for a new profile") from error
    return trace


def _check(trace: RankTrace) -> None:
    """Raise ``ValueError`` unless tables have their columns, events refer to existing names and marks, and times
    are plausible.
    """
    events, allocations = trace.events, trace.allocations
    if events.dtype != EVENT or allocations.dtype != ALLOCATION or events.ndim != 1 or allocations.ndim != 1:
        raise ValueError("its tables have other columns")
    if not isinstance(trace.meta, dict) or not all(isinstance(name, str) for name in trace.names):
        raise ValueError("its names are no text")
    if not all(isinstance(mark, dict) and isinstance(mark.get("kind"), str) for mark in trace.marks):
        raise ValueError("its marks are no objects")
    if len(events) and not (
        events["name"].min() >= 0
        and events["name"].max() < len(trace.names)
        and events["mark"].min() >= -1
        and events["mark"].max() < len(trace.marks)
        and events["ns"].min() >= 0
        and np.abs(events["begin_ns"]).max() < 1 << 60
        and events["ns"].max() < 1 << 60
    ):
        raise ValueError("an event names what is not there")
