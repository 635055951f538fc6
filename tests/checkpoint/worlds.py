"""Simulated worlds for the checkpoint tests: tensors, ways to divide them over ranks, and saves by all ranks."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import torch
from hypothesis import strategies as st

from phalanx.checkpoint.committed.restore import Shard, dtype_name
from phalanx.checkpoint.format.boxes import Box, full_box
from phalanx.checkpoint.save.saver import AsyncSaver, SaveOutcome
from phalanx.checkpoint.tiers.tier import Tier

State = dict[str, torch.Tensor]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]
_MEMORY = "/dev/shm"


def folder_in_memory() -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed at the end of its context, in memory where there is such a place: each of many examples would wait for a disk."""
    return tempfile.TemporaryDirectory(dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None)


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Arbitrary bits (NaNs and infinities too) of the dtype."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=generator)
    return raw[..., 0] % 2 == 1 if dtype is torch.bool else raw.view(dtype).reshape(tuple(shape))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*flat)


def same_state(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def box_of(name: str, tensor: torch.Tensor) -> Box:
    return full_box(name, dtype_name(tensor.dtype), tuple(tensor.shape))


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def states(draw: st.DrawFn, most: int = 4) -> State:
    """A few named tensors of any shape and dtype."""
    count = draw(st.integers(1, most))
    return {
        f"model/t{i}": random_tensor(draw(shapes), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1000)))
        for i in range(count)
    }


@st.composite
def grids(draw: st.DrawFn, box: Box) -> list[Box]:
    """The box cut along every dimension at arbitrary places (chunks, uneven ones, grids, empty cells)."""
    edges = []
    for size in box.shape:
        cuts = draw(st.lists(st.integers(0, size), max_size=3))
        edges.append(sorted({0, size, *cuts}) if size else [0, 0])
    cells = product(*(list(pairwise(e)) for e in edges))
    return [box.part(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]


@st.composite
def holdings(draw: st.DrawFn, state: State, ranks: int) -> list[list[Box]]:
    """The boxes that each of ``ranks`` ranks holds: each tensor on a grid of its own, some cells on several ranks."""
    rank_boxes: list[list[Box]] = [[] for _ in range(ranks)]
    for name, tensor in state.items():
        for cell in draw(grids(box_of(name, tensor))):
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=2)):
                rank_boxes[rank].append(cell)
    return rank_boxes


def shards_from(state: State, boxes: Sequence[Box]) -> list[Shard]:
    """Shards with copies of the elements of ``boxes``."""
    return [
        Shard(box, state[box.name][box.slices_in(box_of(box.name, state[box.name]))].clone()) for box in boxes
    ]


def blank_shards(boxes: Sequence[Box]) -> list[Shard]:
    return [Shard(box, torch.zeros(box.shape, dtype=getattr(torch, box.dtype))) for box in boxes]


def save_by_all(
    tier: Tier,
    step: int,
    ranks: Sequence[Sequence[Shard]],
    extra: Mapping[str, Any] | None = None,
    attempt: int = 0,
) -> list[SaveOutcome]:
    """Save ``step`` by as many savers as there are lists of shards, and return how it ended for each."""
    savers = [AsyncSaver(tier, rank, len(ranks), attempt=attempt, timeout_s=30) for rank in range(len(ranks))]
    for saver, shards in zip(savers, ranks, strict=True):
        saver.save(step, shards, extra or {})
    for saver in savers:
        saver.close()
    return [outcome for saver in savers for outcome in saver.poll()]


def save_state(tier: Tier, step: int, state: State, extra: Mapping[str, Any] | None = None) -> None:
    """Save full tensors by a single rank."""
    (outcome,) = save_by_all(tier, step, [[Shard(box_of(name, t), t) for name, t in state.items()]], extra)
    assert outcome.status == "committed", outcome.error
