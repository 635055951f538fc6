"""A readable tier over a Hugging Face folder: its tensors as those of a checkpoint at step 0.

Whoever restores, packs or digests a checkpoint reads a published model by it without a copy on disk: only the parts that are asked for are
read, and put into this project's order on the way (``weights.py``).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from phalanx.checkpoint.committed.digest import WEIGHTS
from phalanx.checkpoint.format.boxes import Box, whole
from phalanx.checkpoint.format.errors import NoSuchStepError
from phalanx.checkpoint.format.image import RawArray, spans
from phalanx.checkpoint.format.restore_plan import DISK, BoxLocation, Held, PlannedRead
from phalanx.checkpoint.interop.huggingface.folders import PIECE_BYTES
from phalanx.checkpoint.interop.huggingface.names import Published
from phalanx.checkpoint.interop.huggingface.stored.weights import open_folder, values
from phalanx.checkpoint.tiers.tier import Record


class FolderTier:
    """The fp32 weights of the model in ``directory``, and nothing else, as step 0; a ``ReadableTier``.

    ``compared`` is as for ``open_folder``. Raises as it does.
    """

    name = "published"

    def __init__(self, directory: Path, *, compared: bool = False) -> None:
        self.root = directory
        # Files stay open for as long as somebody may read.
        opened = open_folder(directory, ExitStack(), compared=compared)
        self._weights = opened.weights
        self._sources: dict[str, list[Published]] = defaultdict(list)
        for tensor in opened.wanted:
            self._sources[WEIGHTS + tensor.parameter.name].append(tensor)
        location = BoxLocation(self.name, str(directory), DISK)
        self._held = tuple(
            Held(whole(name, "float32", tensors[0].parameter.shape), location)
            for name, tensors in sorted(self._sources.items())  # as a checkpoint lists them
        )

    def version(self) -> bytes:
        """Names, sizes and times of the folder's files, which are others once somebody has written to them."""
        files = sorted(self.root.glob("*.safetensors"))
        return json.dumps(
            [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        ).encode()

    def steps(self) -> list[int]:
        return [0]

    def has(self, step: int) -> bool:
        return step == 0

    def record(self, step: int) -> Record:
        self._require(step)
        return Record(0, 1, self.extra(step))

    def extra(self, step: int) -> dict[str, object]:
        self._require(step)
        return {"step": 0, "imported_from": str(self.root.absolute())}

    def boxes(
        self, step: int, rank: int | None = None, needed: Sequence[Box] | None = None
    ) -> tuple[Held, ...]:
        self._require(step)
        names = None if needed is None else {box.name for box in needed}
        return tuple(one for one in self._held if not rank and (names is None or one.box.name in names))

    def read(self, step: int, reads: Sequence[PlannedRead]) -> Iterator[tuple[Box, RawArray]]:
        self._require(step)
        for read in reads:
            for span in spans(read.part, read.part, PIECE_BYTES):
                found = values(span.part, self._sources[span.part.name], self._weights)
                yield span.part, found.contiguous().view(torch.uint32).numpy()

    def _require(self, step: int) -> None:
        if step != 0:
            raise NoSuchStepError(
                f"{self.root}: is a published model, which has no step {step}: leave the step out"
            )
