"""Attention of a step's texts on a GPU, in Triton: at most three launches a layer, however many texts there are.

Each text's keys and values are tensors of its own (``phalanx_serve.kv_cache.memory``), so a table on the GPU has their addresses. It is copied
there once a step, from page-locked memory, and the host does not wait. One program stores the new keys and values of all rows. A second attends for
the rows of short spans: a program takes the queries that share a key/value head, 16 at most, over a split of 512 keys, with an online softmax in fp32
(FlashAttention, arXiv 2205.14135; splits as in Flash-Decoding, Dao et al. 2023). A third combines the splits of longer texts. The splits are counted
from the row's first visible key. So the order of sums depends on the row alone, not on the other rows of the step.

PyTorch's ``varlen_attn`` does not serve here. In 2.11 it needs all keys in one packed tensor, copied together in each step. The block table of 2.13
needs the pages of all texts in one tensor for each layer, with heads behind tokens, and ours are not. With its own choice of splits the sums depend
on the longest text.

Windows, sinks, soft caps and narrow formats (whose rows are rounded before) are included. Spans of many rows (prefill) and latent attention are
left to PyTorch, text by text; their keys are stored here.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.hardware.local.device import brought
from phalanx.model.layers.attention.attention import CausalCore
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.spec import ModelSpec
from phalanx_serve.kv_cache.memory import RowSpan, TextKV

SPLIT = 512
"""Keys of one program."""
SHORT_SPAN = 8
"""Rows of a span that is attended here: those of a text that decodes, with its drafts. Each row reads the keys by itself."""
_HEADS = 16
"""Queries of one program, the least of a tensor core's product."""
_TILE_BYTES = 1 << 14
"""Bytes of the keys that a program reads at a time, and of the values: several fit into a multiprocessor's memory."""
_MOST_TILE = 128
_SLOTS = 16
"""Splits that are combined at a time."""
_LOG2_E = 1.4426950408889634


def _rows_at(numbers: tl.tensor, column: tl.constexpr, like: tl.tensor) -> tl.tensor:
    """Return a pointer to the tensor whose address is in ``column``, of the elements of ``like``. PyTorch aligns tensors to more than 16 bytes."""
    return tl.multiple_of(tl.load(numbers + column).to(like.dtype), 16)


_cached = triton.jit(_rows_at)


def _store_program(
    table: tl.tensor,
    rows_at: tl.tensor,
    layer: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    value_head: tl.tensor,
    value_row: tl.tensor,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
) -> None:
    """Store the new key and value of one row and head in the tensors of its text. The program's numbers are the row's and the head's."""
    row, head = tl.program_id(0), tl.program_id(1)
    place = table + rows_at + 2 * row
    text = table + tl.load(place) + 3 * layer
    at = head * tl.load(text + 2) + tl.load(place + 1)
    column = tl.arange(0, KEY_BLOCK)
    new = tl.load(key + head * key_head + row * key_row + column, column < KEY_WIDTH)
    tl.store(_cached(text, 0, key) + at * KEY_WIDTH + column, new, column < KEY_WIDTH)
    column = tl.arange(0, VALUE_BLOCK)
    new = tl.load(value + head * value_head + row * value_row + column, column < VALUE_WIDTH)
    tl.store(_cached(text, 1, value) + at * VALUE_WIDTH + column, new, column < VALUE_WIDTH)


def _attend_program(
    table: tl.tensor,
    rows_at: tl.tensor,
    splits_at: tl.tensor,
    layer: tl.tensor,
    query: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    sums: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    LOG2_E: tl.constexpr,
) -> None:
    """Attend for one row and at most ``HEADS`` of the query heads that share a key/value head, over one split of its keys.

    Writes the result of a row that has one split, else the split's weighted sum, its largest score and its sum of weights.
    """
    split = table + splits_at + 4 * tl.program_id(0)
    row, slot = tl.load(split), tl.load(split + 3)
    begin, end = tl.load(split + 1).to(tl.int32), tl.load(split + 2).to(tl.int32)
    kv_head = tl.program_id(1) // CHUNKS
    member = tl.program_id(1) % CHUNKS * HEADS + tl.arange(0, HEADS)
    head = kv_head * GROUP + member  # (HEADS,)
    heads = tl.num_programs(1) // CHUNKS * GROUP
    column = tl.arange(0, BLOCK)
    inside = (member < GROUP)[:, None] & (column < WIDTH)[None, :]  # (HEADS, BLOCK)
    text = table + tl.load(table + rows_at + 2 * row) + 3 * layer
    first = kv_head * tl.load(text + 2) * WIDTH
    keys, values = _cached(text, 0, query) + first, _cached(text, 1, query) + first
    queries = tl.load(
        query + row * query_row + head[:, None] * query_head + column[None, :], inside, other=0.0
    )
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, BLOCK), tl.float32)
    for tile in range(begin, end, TILE):
        at = tile + tl.arange(0, TILE)
        visible = (at < end)[:, None] & (column < WIDTH)[None, :]
        offsets = at[:, None] * WIDTH + column[None, :]  # (TILE, BLOCK)
        # Scores in units of log 2: weights are powers of two.
        score = (
            tl.dot(queries, tl.trans(tl.load(keys + offsets, visible, other=0.0)), input_precision="ieee")
            * scale
        )
        if CAPPED:
            # tanh, which Triton's interpreter lacks.
            score = cap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2_E / cap)) + 1.0)) * LOG2_E
        score = tl.where((at < end)[None, :], score, float("-inf"))  # (HEADS, TILE)
        new_top = tl.maximum(top, tl.max(score, 1))
        weight, keep = tl.exp2(score - new_top[:, None]), tl.exp2(top - new_top)
        value = tl.load(values + offsets, visible, other=0.0)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * keep[:, None], input_precision="ieee")
        total = total * keep + tl.sum(weight, 1)
        top = new_top
    if slot < 0:
        if sinks is not None:
            total += tl.exp2(tl.load(sinks + head, member < GROUP, other=0.0).to(tl.float32) * LOG2_E - top)
        result = (mixed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + (row * heads + head[:, None]) * WIDTH + column[None, :], result, inside)
    else:
        at = slot * heads + head
        tl.store(parts + at[:, None] * WIDTH + column[None, :], mixed, inside)
        tl.store(sums + 2 * at, top, member < GROUP)
        tl.store(sums + 2 * at + 1, total, member < GROUP)


def _combine_program(
    table: tl.tensor,
    joints_at: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    sums: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    LOG2_E: tl.constexpr,
) -> None:
    """Write the result of one row and head from its splits, in their order. The program's numbers are the row's and the head's."""
    joint = table + joints_at + 3 * tl.program_id(0)
    head, heads = tl.program_id(1), tl.num_programs(1)
    row, first, count = tl.load(joint), tl.load(joint + 1), tl.load(joint + 2).to(tl.int32)
    column = tl.arange(0, BLOCK)
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    mixed = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, count, SLOTS):
        slot = begin + tl.arange(0, SLOTS)
        at = (first + slot) * heads + head  # (SLOTS,)
        tops = tl.load(sums + 2 * at, slot < count, other=float("-inf"))
        totals = tl.load(sums + 2 * at + 1, slot < count, other=0.0)
        inside = (slot < count)[:, None] & (column < WIDTH)[None, :]
        part = tl.load(parts + at[:, None] * WIDTH + column[None, :], inside, other=0.0)  # (SLOTS, BLOCK)
        new_top = tl.maximum(top, tl.max(tops, 0))
        weight, keep = tl.exp2(tops - new_top), tl.exp2(top - new_top)
        mixed = mixed * keep + tl.sum(part * weight[:, None], 0)
        total = total * keep + tl.sum(totals * weight, 0)
        top = new_top
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - top)
    tl.store(
        out + (row * heads + head) * WIDTH + column, (mixed / total).to(out.dtype.element_ty), column < WIDTH
    )


# Not specialized: Triton would compile a separate program for some numbers of texts and strides, while texts wait.
_NUMBERS = ("rows_at", "layer")
store_program = triton.jit(
    _store_program, do_not_specialize=[*_NUMBERS, "key_head", "key_row", "value_head", "value_row"]
)
attend_program = triton.jit(
    _attend_program,
    do_not_specialize=[*_NUMBERS, "splits_at", "query_head", "query_row"],
    do_not_specialize_on_alignment=["sinks"],
)
combine_program = triton.jit(
    _combine_program, do_not_specialize=["joints_at"], do_not_specialize_on_alignment=["sinks"]
)


class _Launcher:
    """Launches of a program. Triton looks for the compiled form of a program by all arguments; a form that was launched before is launched again
    by its name, in a part of that time.
    """

    def __init__(self, program: triton.JITFunction, warps: int) -> None:
        self._program, self._warps = program, warps
        self._forms: dict[Hashable, triton.compiler.CompiledKernel] = {}

    def __call__(self, form: Hashable, grid: tuple[int, int], *arguments: Tensor | float | None) -> None:
        """Launch the program for ``arguments``. ``form`` is all that its compiled form depends on: device, formats, constants."""
        compiled = self._forms.get(form)
        if compiled is not None:
            compiled[*grid, 1](*arguments)
            return
        # None in Triton's interpreter.
        compiled = self._program[grid](*arguments, num_warps=self._warps, num_stages=2)
        if compiled is not None:
            self._forms[form] = compiled


_store = _Launcher(store_program, 1)
_attend = _Launcher(attend_program, 4)
_combine = _Launcher(combine_program, 4)


def tile_of(width: int, itemsize: int) -> int:
    """Return the number of keys that a program reads at a time, for heads of ``width``."""
    return max(16, min(_MOST_TILE, _TILE_BYTES // (block_of(width) * itemsize)))


def block_of(width: int) -> int:
    """Return the columns of a program for heads of ``width``: a power of two, at least what a product takes."""
    return max(16, 1 << (width - 1).bit_length())


@dataclass(frozen=True)
class _StepTable:
    """Numbers of a step on the GPU, for layers of one window."""

    numbers: Tensor
    """int64, one behind the other: ``TextKV.addresses`` of each text; for each row the place of its text's, and its position; for each split its row,
    first key, end and slot (-1 for the only split of a row); for each row of several splits its number, first slot and number of slots.
    """
    rows_at: int
    splits_at: int
    splits: int
    joints_at: int
    joints: int
    slots: int


@dataclass(frozen=True)
class _HeadShape:
    """Division of the heads of a layer among programs."""

    group: int
    """Query heads that share a key/value head."""
    chunks: int
    """Programs of a key/value head and split."""
    block: int
    tile: int

    @classmethod
    @functools.cache
    def of(cls, heads: int, kv_heads: int, width: int, itemsize: int) -> Self:
        """Return the division for heads of ``width`` elements of ``itemsize`` bytes."""
        group = heads // kv_heads
        return cls(group, triton.cdiv(group, _HEADS), block_of(width), tile_of(width, itemsize))


class DecodeAttention:
    """Storing of keys and values, and attention of short spans, for the texts of one step: a ``SpanAttention``."""

    def __init__(self, spans: Sequence[RowSpan]) -> None:
        self._spans = spans
        self._tables: dict[int, _StepTable] = {}
        self._sums: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def takes(self, span: RowSpan) -> bool:
        """Return True for spans that ``attend`` computes."""
        return span.end - span.begin <= SHORT_SPAN

    def store(self, layer: int, core: CausalCore, key: Tensor, value: Tensor) -> None:
        """Store new keys and values ``(1, k, rows, .)`` of all spans in their texts."""
        key, value = map(_read_as, (key, value), self._spans[0].kv.layers[layer])
        table = self._table(core.window, key.device)
        _, heads, rows, key_width = key.shape
        value_width = value.shape[3]
        widths = key_width, value_width, block_of(key_width), block_of(value_width)
        _store(
            (key.device, key.dtype, widths),
            (rows, heads),
            *(table.numbers, table.rows_at, self._place(layer), key, value),
            *(key.stride(1), key.stride(2), value.stride(1), value.stride(2)),
            *widths,
        )

    def attend(self, layer: int, core: CausalCore, query: Tensor, sinks: Tensor | None) -> Tensor:
        """Return ``(1, h, rows, width)``: for the rows of short spans, the attention of queries ``(1, h, rows, width)`` to the stored keys.

        Other rows are not initialized.
        """
        keys, _ = self._spans[0].kv.layers[layer]
        query, kv_heads = _read_as(query, keys), keys.shape[0]
        _, heads, rows, width = query.shape
        table = self._table(core.window, query.device)
        shape, score = _HeadShape.of(heads, kv_heads, width, query.element_size()), core.score
        out = query.new_empty(rows, heads, width)
        parts, sums = self._partial_sums(table.slots, heads, width, query.device)
        form = (
            query.device,
            query.dtype,
            None if sinks is None else sinks.dtype,
            shape,
            width,
            score.cap > 0,
        )
        if table.splits:
            _attend(
                form,
                (table.splits, kv_heads * shape.chunks),
                *(table.numbers, table.rows_at, table.splits_at, self._place(layer)),
                *(query, query.stride(1), query.stride(2), sinks, out, parts, sums),
                *(score.factor(query) * (1.0 if score.cap else _LOG2_E), score.cap),
                *(shape.group, shape.chunks, _HEADS, width, shape.block, shape.tile, score.cap > 0, _LOG2_E),
            )
        if table.joints:
            _combine(
                form,
                (table.joints, heads),
                *(table.numbers, table.joints_at, sinks, out, parts, sums),
                *(width, shape.block, _SLOTS, _LOG2_E),
            )
        return out.transpose(0, 1).unsqueeze(0)  # (1, h, rows, width)

    def _place(self, layer: int) -> int:
        """Return the place of a layer among those of a text."""
        return layer - next(iter(self._spans[0].kv.layers))

    def _table(self, window: int, device: torch.device) -> _StepTable:
        """Return the step's table for layers with a window, copied to the device when a layer first needs it."""
        if window not in self._tables:
            self._tables[window] = _step_table(self._spans, window, device)
        return self._tables[window]

    def _partial_sums(
        self, slots: int, heads: int, width: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return memory for the splits' weighted sums ``(slots, h, width)``, and for their largest scores and sums of weights ``(slots, h, 2)``.

        All layers of the step have the same.
        """
        size = slots, heads, width
        if size not in self._sums:
            # Never empty, since an empty tensor has no address.
            self._sums[size] = (
                torch.empty(max(1, slots), heads, width, device=device),
                torch.empty(max(1, slots), heads, 2, device=device),
            )
        return self._sums[size]


_ALIGNED_BYTES = 16


def _read_as(x: Tensor, cached: Tensor) -> Tensor:
    """Return ``x`` in the format of ``cached``, with adjacent elements in its rows, from an address that programs take for aligned on."""
    if x.dtype == cached.dtype and x.stride(3) == 1 and x.data_ptr() % _ALIGNED_BYTES == 0:
        return x
    return x.to(cached.dtype, copy=True, memory_format=torch.contiguous_format)


def _step_table(spans: Sequence[RowSpan], window: int, device: torch.device) -> _StepTable:
    """Return the table of ``spans`` for layers with a window, 0 for none.

    Raises ``ValueError`` for a text elsewhere: an address of the host's memory would end every later call to the GPU.
    """
    elsewhere = {span.kv.device for span in spans} - {device}
    if elsewhere:
        raise ValueError(f"keys and values on {', '.join(map(str, elsewhere))}, not on {device}")
    texts = np.concatenate([span.kv.addresses() for span in spans])
    columns = len(texts) // len(spans)
    lengths = [span.end - span.begin for span in spans]
    positions = np.concatenate([np.arange(span.begin, span.end) for span in spans])
    places = np.repeat(np.arange(len(spans)) * columns, lengths)
    splits: list[tuple[int, int, int, int]] = []
    joints: list[tuple[int, int, int]] = []
    slots = 0
    for row, position in _short_rows(spans):
        first = max(0, position - window + 1) if window else 0
        begins = range(first, position + 1, SPLIT)
        is_single = len(begins) == 1
        for number, begin in enumerate(begins):
            end = min(begin + SPLIT, position + 1)
            splits.append((row, begin, end, -1 if is_single else slots + number))
        if not is_single:
            joints.append((row, slots, len(begins)))
            slots += len(begins)
    # texts (3 layers texts,), rows (rows, 2), splits (splits, 4), joints (joints, 3)
    parts = [texts, np.stack((places, positions), 1), np.array(splits, np.int64), np.array(joints, np.int64)]
    # (numbers of all parts,)
    numbers = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]))
    rows_at, splits_at, joints_at = itertools.accumulate(part.size for part in parts[:-1])
    return _StepTable(
        brought(numbers, device), rows_at, splits_at, len(splits), joints_at, len(joints), slots
    )


def _short_rows(spans: Sequence[RowSpan]) -> Iterator[tuple[int, int]]:
    """Yield the rows of short spans, each with its position in its text."""
    row = 0
    for span in spans:
        count = span.end - span.begin
        if count <= SHORT_SPAN:
            yield from zip(range(row, row + count), range(span.begin, span.end), strict=True)
        row += count


# The check before the first step.


_CHECKED_LENGTHS = (1, 7, SPLIT + 88)
"""Tokens of the texts of the check, the last of them new: one text has several splits."""
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference from PyTorch's attention in fp32, over the largest number of its result."""


def differences(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Return the names of the results ("keys and values", "attention") in which a ``DecodeAttention`` for models of ``spec`` differs from
    PyTorch's attention in fp32, on random numbers.

    Waits for the device.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(heads: int, rows: int, width: int) -> Tensor:
        return torch.randn(1, heads, rows, width, generator=generator, device="cpu").to(device, dtype)

    heads, *widths = attention_kind(spec).cache_row(spec)
    spans = []
    for length in _CHECKED_LENGTHS:
        kv = TextKV(spec, dtype, range(1), device=device)
        kv.grow(length)
        for tensor, width in zip(kv.layers[0], widths, strict=True):
            tensor[:, : length - 1] = draw(heads, length - 1, width)[0]
        spans.append(RowSpan(kv, length - 1, length))
    key, value = (draw(heads, len(spans), width) for width in widths)
    core = CausalCore(1 / math.sqrt(spec.score_width) if spec.score_width else None, 0, spec.score_cap)
    for _ in range(2):  # compiled, and launched as in later steps
        batched = DecodeAttention(spans)
        batched.store(0, core, key, value)
    stored = [
        torch.equal(tensor[:, span.begin], new[0, :, row])
        for row, span in enumerate(spans)
        for tensor, new in zip(span.kv.layers[0], (key, value), strict=True)
    ]
    if not all(stored):
        return ["keys and values"]
    if widths[0] != widths[1]:  # latents, which are attended text by text
        return []
    query = draw(spec.heads, len(spans), widths[0])
    sinks = draw(1, 1, spec.heads)[0, 0, 0] if spec.sinks else None
    attended = [batched.attend(0, core, query, sinks) for _ in range(2)][1].float()
    expected = []
    for row, span in enumerate(spans):
        keys, values = (tensor[None, :, : span.end].float() for tensor in span.kv.layers[0])
        expected.append(core(query[:, :, row : row + 1].float(), keys, values, None, sinks))
    reference = torch.cat(expected, 2)  # (1, h, rows, width)
    error = (attended - reference).abs().max() / reference.abs().max()
    return [] if bool(error <= _TOLERANCE[dtype]) else ["attention"]
