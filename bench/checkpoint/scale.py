"""Cost of a checkpoint for one rank as the fleet grows, measured with the real code on a synthetic world of that size.

The state of an 8 B model (weights and two moments, 873 tensors) is sharded over all ranks: the most boxes that a layout can have. The
images themselves are not written, their files are empty ones of the right size: the bench measures all costs of a checkpoint beside
its data. One group of ranks collects its members' manifests for real; the files of the other groups are computed
in closed form and written with the same code.

- *group*: the first rank of a group reads its members' manifests and writes their catalog, the first time and at every later save.
- *commit*: rank 0 does the same for its group, reads the summaries of all groups, makes sure that nothing is missing, and renames.
- *restore*: a rank of a fleet of another size (three quarters) plans what it reads; a rank of the same fleet likewise.

    python -m bench.checkpoint.scale
    python -m bench.checkpoint.scale --ranks 8 1024 --json
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.running import run_bench
from phalanx.checkpoint.format.boxes import Box, full_box, plan_restore
from phalanx.checkpoint.format.image import BoxTable, ImageEntry, encode_table, image_layout
from phalanx.checkpoint.format.manifest import (
    Catalog,
    Manifest,
    StoredImage,
    catalog_of,
    checksum,
    encode_catalog,
)
from phalanx.checkpoint.tiers.catalogued import CATALOG_RANKS, SUMMARIES, leave_manifest
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Draft, StepRecord
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import parameters
from phalanx.run.kinds.whole_model import resolve

BLOCK_BYTES = 8 << 20
PARTS = ("model/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/")


def tensors() -> list[Box]:
    """Return the boxes of the state's full tensors."""
    shapes = {param.name: param.shape for param in parameters(resolve(PRESETS["llama3-8b"], 128_256))}
    return [full_box(part + name, "float32", shape) for part in PARTS for name, shape in shapes.items()]


def rows_of(tensor: Box, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first row, and the row after the last, of a rank's chunk of a tensor: FSDP's division."""
    rows = -(-tensor.shape[0] // ranks)
    return min(rank * rows, tensor.shape[0]), min((rank + 1) * rows, tensor.shape[0])


def boxes_of(state: Sequence[Box], rank: int, ranks: int) -> list[Box]:
    """Return a rank's parts of the state, without empty boxes."""
    cuts = [(tensor, *rows_of(tensor, rank, ranks)) for tensor in state]
    return [tensor.rows(first, last) for tensor, first, last in cuts if last > first]


def entries_of(state: Sequence[Box], rank: int, ranks: int) -> tuple[tuple[ImageEntry, ...], int]:
    """Return each box's place in a rank's image, and the image's bytes."""
    layout = image_layout(boxes_of(state, rank, ranks))
    return layout.entries, layout.nbytes


class World:
    """A checkpoint of ``ranks`` ranks in ``root``; files of most of them are made in closed form."""

    def __init__(self, root: Path, ranks: int) -> None:
        self.state, self.ranks, self.tier = sorted(tensors()), ranks, DiskTier(root)
        self.firsts = list(range(0, ranks, CATALOG_RANKS))

    def members(self, first: int) -> range:
        """Return the ranks of a group."""
        return range(first, min(first + CATALOG_RANKS, self.ranks))

    def leave_images(self, draft: Draft, first: int) -> None:
        """Write an image (a hole of its size) and a manifest for each rank of a group."""
        folder = self.tier.draft_folder(draft)
        place = f"ranks-{first:05d}" if first else ""
        (folder / place).mkdir(parents=True, exist_ok=True)
        for rank in self.members(first):
            entries, nbytes = entries_of(self.state, rank, self.ranks)
            file = f"{place}/rank-{rank:05d}.safetensors".lstrip("/")
            with (folder / file).open("wb") as image:
                image.truncate(nbytes)
            blocks = ("0123456789abcdef",) * -(-nbytes // BLOCK_BYTES)
            leave_manifest(
                folder / f"manifests-{first:05d}",
                catalog_of(Manifest(rank, file, nbytes, BLOCK_BYTES, blocks, entries)),
            )

    def table(self, first: int, *, merged: bool) -> BoxTable:
        """Return the boxes of a group, or the rectangles that they make together, in closed form."""
        members = self.members(first)
        names, ranks, begins, ends = [], [], [], []
        for number, tensor in enumerate(self.state):
            rows = -(-tensor.shape[0] // self.ranks)
            rank = np.array([members[0]]) if merged else np.arange(members[0], members[-1] + 1)
            begin = np.minimum(rank * rows, tensor.shape[0])
            last = np.array([members[-1]]) if merged else rank
            end = np.minimum((last + 1) * rows, tensor.shape[0])
            full = end > begin
            names.append(np.full(int(full.sum()), number))
            ranks.append(rank[full])
            begins.append(np.stack([begin[full], np.zeros_like(begin[full])], 1))
            width = tensor.shape[1] if len(tensor.shape) > 1 else 1
            if len(tensor.shape) == 1:
                begins[-1] = begins[-1][:, ::-1]
                ends.append(np.stack([np.ones_like(end[full]), end[full]], 1))
            else:
                ends.append(np.stack([end[full], np.full_like(end[full], width)], 1))
        tensor_of, holder, begin, end = (np.concatenate(parts) for parts in (names, ranks, begins, ends))
        start = np.zeros_like(holder)
        if not merged:
            nbytes = 4 * (end - begin).prod(1)
            for rank in members:
                mine = holder == rank
                start[mine] = 8192 + np.cumsum(nbytes[mine]) - nbytes[mine]
        return BoxTable(tuple(self.state), tensor_of, holder, start, begin, end)

    def leave_summaries(self, draft: Draft, tables: dict[int, bytes], *, but: int | None) -> None:
        """Write the summaries of all groups but the first and ``but``."""
        folder = self.tier.draft_folder(draft) / SUMMARIES
        folder.mkdir(exist_ok=True)
        for first in self.firsts[1:]:
            if first != but:
                seal = np.array([first], np.uint64)
                image = StoredImage(first, f"ranks-{first:05d}.catalog", 1 << 30, 1 << 30, seal)
                summary = encode_catalog(Catalog((image,), tables[first]))
                (folder / f"ranks-{first:05d}.summary").write_bytes(summary)


def measure(ranks: int) -> dict[str, object]:
    """Return seconds of wall and of CPU time, and bytes, for one size."""
    with tempfile.TemporaryDirectory() as root:
        world = World(Path(root), ranks)
        # The second group: its ranks have a part of every tensor even if there are more ranks than rows.
        lead = world.firsts[min(1, len(world.firsts) - 1)]
        tables = {first: encode_table(world.table(first, merged=True)) for first in world.firsts}
        report: dict[str, object] = {"ranks": ranks, "catalogs": len(world.firsts)}
        for name, step in (("first", 1), ("later", 2)):
            draft = Draft(step, 0)
            world.leave_images(draft, 0)
            if lead:
                world.leave_images(draft, lead)
                report[f"group_{name}"] = _timed(
                    lambda draft=draft: world.tier.collect(draft, lead, ranks, timeout_s=0)
                )
            world.leave_summaries(draft, tables, but=lead)
            record = StepRecord(step, ranks, {"step": step})
            report[f"commit_{name}"] = _timed(
                lambda draft=draft, record=record: world.tier.commit(draft, record, timeout_s=0)
            )
        folder = world.tier.folder(2)
        report["index_bytes"] = (folder / "checkpoint.json").stat().st_size
        report["catalog_bytes"] = (folder / f"ranks-{lead:05d}.catalog").stat().st_size
        if len(world.firsts) > 1:
            report["extents_bytes"] = (folder / "extents.catalog").stat().st_size
        report["restore_same"] = _timed(lambda: _plan(world, lead, ranks, lead))
        other = max(1, ranks * 3 // 4)
        report["restore_other"] = _restore_other(world, other)
    return report


def _plan(world: World, rank: int, ranks: int, held_as: int | None) -> tuple[int, int]:
    tier = DiskTier(world.tier.root)  # a new object, so that nothing is cached
    needed = boxes_of(world.state, rank, ranks)
    stored = tier.boxes(2, held_as, needed)
    return len(stored), len(plan_restore(needed, stored, reader=rank))


class _TierOfAnyCatalog(DiskTier):
    """A tier whose index has the checksums of catalogs that were not written: any bytes of a catalog are accepted."""

    def _checked_bytes(self, step: int, file: str, digits: str) -> bytes:
        if file.startswith("ranks-"):
            digits = checksum(self.read_file(step, file))
        return super()._checked_bytes(step, file, digits)


def _restore_other(world: World, ranks: int) -> dict[str, object]:
    """Time the plan of a rank of another fleet, after making its catalogs in closed form."""
    rank = min(ranks // 2, CATALOG_RANKS)
    index = world.tier.index(2)
    needed = boxes_of(world.state, rank, ranks)
    opened = []
    if index.extents_checksum is not None:
        extents = world.tier.extents(2, index.extents_checksum).table
        opened = sorted(set(extents.holder[extents.overlapping(needed)].tolist()))
    catalogs: dict[int, Catalog] = {}
    for first in opened:
        members = [
            StoredImage(member, f"rank-{member}", 1 << 30, BLOCK_BYTES, np.zeros(1, np.uint64))
            for member in world.members(first)
        ]
        catalogs[first] = Catalog(tuple(members), encode_table(world.table(first, merged=False)))
        (world.tier.folder(2) / f"ranks-{first:05d}.catalog").write_bytes(encode_catalog(catalogs[first]))
    tier = _TierOfAnyCatalog(world.tier.root)

    def plan() -> None:
        plan_restore(needed, tier.boxes(2, None, needed), reader=rank)

    return {**_timed(plan), "catalogs_opened": max(1, len(opened))}


def _timed(function: Callable[[], object]) -> dict[str, object]:
    gc.collect()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    function()
    return {
        "wall_s": round(time.perf_counter() - wall_s, 3),
        "cpu_s": round(time.process_time() - cpu_s, 3),
    }


def main() -> None:
    """Print a line for each size of the fleet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1_024, 16_384, 98_304])
    parser.add_argument("--json", action="store_true", help="one JSON object a size")
    options = parser.parse_args()
    for ranks in options.ranks:
        report = measure(ranks)
        print(json.dumps(report) if options.json else "\n  ".join(f"{k}: {v}" for k, v in report.items()))


if __name__ == "__main__":
    run_bench(main)
