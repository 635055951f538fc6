"""Probes of what is not a product: norms, activations, routers and the softmax over the vocabulary, in few rows and among many.

Vectorized kernels compute the elements that are left over behind whole vectors by other code, which for ``sigmoid``, ``tanh`` and ``exp`` rounds
otherwise. Which elements are left over depends on the width and on the number of rows. So each operation of a model is tried in its width.

With several threads PyTorch deals a tensor of more than 32,768 elements out among them, each of which has elements left over at the end of its part
(``aten/src/ATen/Parallel.h``, ``at::internal::GRAIN_SIZE``). So numbers of rows around which a part ends elsewhere are tried besides.

What a result rounds away hides an order of additions: of a norm in bf16 in all but one of a hundred rows or more, and in most of a softmax. So besides random rows there are some for
which a result lies beside the middle between two numbers of bf16, sums that cancel, and softmaxes whose largest probability is near one.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.layers.feed_forward import gated
from phalanx.model.layers.norm import RMSNorm
from phalanx.run.kinds.feed_forward import is_gated
from phalanx.run.kinds.mixture import dense_width
from phalanx.run.spec import ModelSpec, MoeSpec
from phalanx.serve.numerics.facts import Facts, recalled
from phalanx.serve.numerics.products import fewest_rows
from phalanx.serve.numerics.trials import begin_part

_MANY = 576
_ALIKE = 64
"""Rows among which it is sought where a result is rounded otherwise."""
_SUMS, _LARGE, _APART = 8, 3, 10
"""Sums of squares of which each is brought near a middle, with so many large numbers in each, by so many powers of two."""
_FEW, _LOOKED = 33, 4
"""Up to how many rows all is tried that would show more than random rows do, since many take long; and up to how many it is in several places."""
_WIDE, _MANY_WIDE = 1 << 14, 96
"""Elements of a row from which on fewer rows are tried: a vocabulary's softmax goes through each row by itself."""
_GRAIN = 1 << 15
"""Elements of an element-wise operation for each of which PyTorch takes one thread more, up to all of them."""
_IN_A_ROW, _STEP = 33, 16
"""Numbers of rows that are tried one after the other where another thread begins, and the step of the others above."""


Find = Callable[[], Facts | None]


def width_facts(spec: ModelSpec, dtype: torch.dtype, shares: int = 1) -> Iterator[tuple[str, Facts | None]]:
    """Each operation of a resolved model that is no product, and how few rows it may have; ``None`` if no number keeps the bits. Activations of dense
    layers are tried in the width of one of ``shares``, too."""
    for name, find in operations(spec, dtype, shares):
        begin_part(name)
        yield name, find()


def operations(spec: ModelSpec, dtype: torch.dtype, shares: int = 1) -> Iterator[tuple[str, Find]]:
    """What ``width_facts`` tries, by name."""
    yield f"the norm of width {spec.dim}", partial(_norm, spec.dim, spec.norm_eps, spec.norm_offset, dtype)
    inner = {dense_width(spec), *((spec.moe.ffn_dim, spec.moe.shared * spec.moe.ffn_dim) if spec.moe else ())}
    dense = {dense_width(spec), spec.moe.shared * spec.moe.ffn_dim if spec.moe else 0}
    for width in sorted((inner | {width // shares for width in dense}) - {0}):
        yield f"the activation of width {width}", partial(_activation, spec, width, dtype)
    yield (
        f"the softmax over {spec.vocab_size} tokens",
        partial(_softmax, spec.vocab_size, spec.logit_cap, dtype),
    )
    if spec.moe is not None:
        yield f"the router of {spec.moe.experts} experts", partial(_router, spec.dim, spec.moe)
        if spec.moe.shared_gate:
            yield "the gate of the shared experts", partial(_shared_gate, spec.dim, dtype)


@dataclass(frozen=True)
class _Tried:
    """An operation, and the rows ``(many, width)`` that it is tried with."""

    operation: Callable[[Tensor], Tensor]
    rows: Tensor
    most: int = 1 << 30
    """Up to how many rows it is tried."""
    looks: int = 0
    """In how many places among the rows so few are looked for, up to ``_LOOKED`` of them: where rows are unlike each other, and few show anything."""

    def expected(self) -> Tensor:
        """Return the operation's result for all rows, or for those that are compared: there may be many trials of wide rows."""
        results = self.operation(self.rows.contiguous())
        return results[: self.most].clone() if self.looks == 1 else results

    def begins(self, number: int, begin: int) -> Sequence[int]:
        """Where ``number`` rows are tried when it is the turn of those from ``begin`` on."""
        if not self.looks:
            return [begin]
        if begin or number > self.most:
            return []
        looks, last = self.looks if number <= _LOOKED else 1, len(self.rows) - number
        return [last * look // max(1, looks - 1) for look in range(looks)]


_Trials = Callable[[int], Iterator[_Tried]]
"""What is tried, in so many rows: random rows first, then those that show more, of which one look is enough."""


def _found(name: str, trials: _Trials, width: int, dtype: torch.dtype, elements: int = 0) -> Facts | None:
    """Return how few rows an operation may have; ``name`` names all but width and format that decides its bits. ``elements``: of each row, those that
    go through an element-wise function that rounds otherwise behind whole vectors; 0 if there is none."""
    many = _MANY if width < _WIDE else _MANY_WIDE
    threads = torch.get_num_threads()
    more = _cut_numbers(elements, threads) if elements and threads > 1 else []
    if more:  # whole vectors for each thread, so that the rows compared with have no elements left over
        step = 32 * threads
        many = -(-max(many, more[-1] + 1) // step) * step
    return recalled(
        f"{name} {width} {dtype}",
        lambda: _search(trials(many), many, more),
        lambda facts: _keeps(trials, facts),
    )


def _cut_numbers(elements: int, threads: int) -> list[int]:
    """Numbers of rows of so many ``elements`` in which PyTorch cuts a tensor for its threads in all ways: behind each number from which on another
    thread takes part, and up to where all do."""
    begins = [_GRAIN * number // elements + 1 for number in range(1, threads)]
    numbers = {begin + beside for begin in begins for beside in range(_IN_A_ROW)}
    numbers.update(range(-(-begins[0] // _STEP) * _STEP, begins[-1] + 8 * _STEP, _STEP))
    return sorted(numbers)


@torch.no_grad()
def _sensitive_value(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> float | None:
    """Find a number whose result differs when it is left over behind whole vectors; ``None`` if there is none.

    Random rows would show such a number by chance alone: few of their elements are left over, and in bf16 one number in thousands differs."""
    if dtype == torch.bfloat16:
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        values = every[every.isfinite() & (every.abs() < 64)]
    else:
        values = torch.linspace(-9, 9, 1 << 12, dtype=torch.float32).to(dtype)
    among = function(values[: len(values) // 64 * 64])
    for value, expected in zip(values[:, None], among[:, None], strict=False):
        if not torch.equal(function(value), expected):
            return float(value)
    return None


def _alike(
    function: Callable[[Tensor], Tensor], many: int, width: int, dtype: torch.dtype
) -> Iterator[_Tried]:
    """Yield rows of a number whose result shows whether it is left over, if there is one."""
    value = _sensitive_value(function, dtype)
    if value is not None:
        yield _Tried(function, torch.full((many, width), value, dtype=dtype))


@torch.no_grad()
def _search(trials: Iterator[_Tried], many: int, more: Collection[int] = ()) -> Facts | None:
    tried = [(one, one.expected()) for one in trials]

    def kept(number: int, begin: int) -> bool:
        return all(
            _holds(one, expected, number, place)
            for one, expected in tried
            for place in one.begins(number, begin)
        )

    return fewest_rows(kept, many, more)


@torch.no_grad()
def _keeps(trials: _Trials, facts: Facts) -> bool:
    """A cheap look at what another process found: few rows among somewhat more, at both ends."""
    many = max(64, 2 * facts.fewest)
    one = next(trials(many))
    expected = one.expected()
    return all(_holds(one, expected, facts.fewest, begin) for begin in (0, many - facts.fewest))


def _holds(one: _Tried, expected: Tensor, number: int, begin: int) -> bool:
    part = one.operation(one.rows[begin : begin + number].contiguous())
    return torch.equal(part, expected[begin : begin + number])


def _random(many: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(many, width, generator=torch.Generator().manual_seed(0)).mul_(4).to(dtype)


@functools.cache
def _norm(width: int, eps: float, offset: bool, dtype: torch.dtype) -> Facts | None:
    norm = RMSNorm(width, eps, offset=offset).to(dtype).requires_grad_(False)
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))

    def trials(many: int) -> Iterator[_Tried]:
        yield _Tried(norm, _random(many, width, dtype))
        if dtype == torch.float32:
            return
        generator = torch.Generator().manual_seed(2)
        for number in range(_SUMS):
            # A few large squares take in no small one, and some small ones together.
            row = torch.randn(1, width, generator=generator).mul_(2.0**-_APART)
            row[:, torch.randint(width, (_LARGE,), generator=generator)] *= 2.0**_APART
            alike = row.to(dtype).expand(many, -1)
            for other in _beside_a_middle(norm, row.to(dtype)):
                yield _Tried(other, alike, _FEW if number else many, looks=1)

    return _found(f"norm {eps} {offset}", trials, width, dtype)


def _beside_a_middle(norm: RMSNorm, row: Tensor) -> Iterator[RMSNorm]:
    """The same norm with two other numbers in the place of ``eps``, beside each other, such that a result of ``row`` is rounded up with one and down with the other: a sum of squares
    that differs in its last bit is rounded otherwise with one of them. None if there are no such numbers."""
    rows = row.expand(_ALIKE, -1).contiguous()

    def with_eps(eps: float) -> RMSNorm:
        other = copy.copy(norm)
        other.eps = eps
        return other

    mean = float(row.double().square().mean())
    low, high = mean / 32, mean / 16
    changed = (with_eps(low)(rows)[0] != with_eps(high)(rows)[0]).nonzero()[:, 0]
    if not len(changed):
        return
    place = int(changed[len(changed) // 2])
    before = with_eps(low)(rows)[0, place]
    while high - low > mean * 2.0**-26:
        middle = (low + high) / 2
        if torch.equal(with_eps(middle)(rows)[0, place], before):
            low = middle
        else:
            high = middle
    yield with_eps(low)
    yield with_eps(high)


@functools.cache
def _activation(spec: ModelSpec, width: int, dtype: torch.dtype) -> Facts | None:
    name = f"gated {spec.ffn} {spec.swiglu_limit} {spec.swiglu_gain}" if is_gated(spec) else "gelu"

    def operation(x: Tensor) -> Tensor:
        return gated(spec, x, x.flip(-1)) if is_gated(spec) else F.gelu(x)

    def trials(many: int) -> Iterator[_Tried]:
        yield _Tried(operation, _random(many, width, dtype))
        yield from _alike(operation, many, width, dtype)

    return _found(name, trials, width, dtype, elements=width)


@functools.cache
def _softmax(vocab: int, cap: float, dtype: torch.dtype) -> Facts | None:
    def read(scores: Tensor) -> Tensor:
        bent = torch.tanh(scores.float() / cap) * cap if cap else scores
        return F.log_softmax(bent, dim=-1, dtype=torch.float32)

    def trials(many: int) -> Iterator[_Tried]:
        yield _Tried(read, _random(many, vocab, dtype))
        generator = torch.Generator().manual_seed(1)
        # The logarithm of a sum just above one is small, and keeps the sum's last bits.
        half = (math.log(vocab) + 2) / 2
        rows = torch.randn(many, vocab, generator=generator) - half
        rows[:, -1] = half - 1
        rows[torch.arange(many), torch.randint(vocab, (many,), generator=generator)] = half
        yield _Tried(read, rows.to(dtype), _FEW, looks=8)
        if cap:
            yield from _alike(torch.tanh, many, vocab, torch.float32)

    return _found(f"softmax {cap}", trials, vocab, dtype, elements=vocab if cap else 0)


@functools.cache
def _router(dim: int, moe: MoeSpec) -> Facts | None:
    matrix = torch.randn(moe.experts, dim, generator=torch.Generator().manual_seed(1))

    def scores(tokens: Tensor) -> Tensor:
        logits = F.linear(tokens, matrix)
        chosen = logits.softmax(dim=1) if moe.score == "softmax" else logits.sigmoid()
        return torch.cat((logits, chosen, chosen / (chosen.sum(dim=1, keepdim=True) + 1e-20)), 1)

    def trials(many: int) -> Iterator[_Tried]:
        yield _Tried(scores, _random(many, dim, torch.float32))
        if moe.score != "softmax":
            yield from _alike(torch.sigmoid, many, moe.experts, torch.float32)

    elements = 0 if moe.score == "softmax" else moe.experts
    return _found(f"router {moe.experts} {moe.score}", trials, dim, torch.float32, elements)


@functools.cache
def _shared_gate(dim: int, dtype: torch.dtype) -> Facts | None:
    # One element of each row: whole vectors of them need 32 rows.
    generator = torch.Generator().manual_seed(2)
    matrix, half = torch.randn(1, dim, generator=generator).to(dtype), dim // 2
    second, first = slice(half, 2 * half), torch.randperm(half, generator=generator)
    matrix[:, second] = -matrix[:, first]

    def gate(tokens: Tensor) -> Tensor:
        logits = F.linear(tokens, matrix)
        return torch.cat((logits, logits.sigmoid()), 1)

    def trials(many: int) -> Iterator[_Tried]:
        yield _Tried(gate, _random(many, dim, dtype))
        # Numbers of many magnitudes, whose sums are not exact, and that cancel: roundings alone are left.
        drawn = torch.Generator().manual_seed(3)
        magnitudes = torch.randint(-6, 7, (many, dim), generator=drawn).float().exp2()
        rows = (_random(many, dim, torch.float32) * magnitudes).to(dtype)
        rows[:, second] = rows[:, first]
        yield _Tried(gate, rows, looks=8)
        yield from _alike(torch.sigmoid, many, 1, dtype)

    return _found("shared gate", trials, dim, dtype)
