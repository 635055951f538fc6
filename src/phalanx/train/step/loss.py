"""Chunked cross-entropy, fused with the output projection, so that all logits are never in memory at once.

For a vocabulary of 128 k, the fp32 logits of 8 k tokens are 4 GiB, and so is their gradient. Here tokens are processed in chunks:

1. Compute a chunk's logits, and its losses.
2. Overwrite the logits with their gradient: softmax minus one at the target.
3. Multiply it into the gradients of hidden states and projection, and drop it.

The backward pass then only scales these gradients. This is fused linear cross-entropy (Liger, arXiv 2410.10989; Cut Cross-Entropy,
arXiv 2411.09009). The chunk size belongs to the run, because it sets the order in which the projection's gradient is summed.

If the vocabulary is divided over tensor ranks, each rank computes the logits of its own rows for all tokens. The ranks exchange three
numbers per token (Megatron, arXiv 1909.08053): the largest logit, the sum of exponentials, and the target's logit. The sum is relative
to each rank's own largest logit, so that one all-gather carries all three.

A soft cap is applied to each logit in fp32 before all that. Its derivative multiplies the gradient.

If the sequence is in context tiles, each tile has such a loss. Losses and the projection's gradients are added in tree order, also over
the context ranks. The first rank reports the loss; each rank reports some elements of the gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.autograd import FunctionContext, apply_function
from phalanx.model.layers.dense import Affine, aligned
from phalanx.parallel.context.fixed_tiles import RankTiles
from phalanx.parallel.tensor.apply import VocabularyPiece
from phalanx.parallel.tensor.sequence_comm import add_in_tree

IGNORE = -100
"""A target that takes no part in the loss, as in ``torch.nn.functional.cross_entropy``."""


class _LossContext(FunctionContext, Protocol):
    used: bool


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _LossContext,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        rows: VocabularyPiece | None,
        tiles: RankTiles | None,
        wants_gradient: bool,
        cap: float,
    ) -> Tensor:
        """Return the summed loss, 0-dim fp32. If ``wants_gradient``, compute the gradients of ``hidden`` and
        ``weight`` here and save them.

        In lanes, ``hidden`` is this rank's piece of the sequence, which is gathered; its gradient is summed and
        scattered.
        """
        # In lanes, the gradient is summed over ranks before it is scaled, as it is where one rank has all lanes.
        comm = rows.comm if rows is not None and rows.lanes else None
        full = hidden if comm is None else comm.gather(hidden)

        def of_piece(states: Tensor, labels: Tensor) -> _LossAndGradients:
            return _in_chunks(states, weight, labels, chunk, rows, wants_gradient, cap)

        if tiles is None:
            loss, grad_whole, grad_weight = of_piece(full, targets)
        else:
            loss, grad_whole, grad_weight = _in_tiles(full, targets, tiles, of_piece)
        if grad_whole is not None and grad_weight is not None:
            grad_hidden = grad_whole if comm is None else comm.sum_scatter(grad_whole)
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
            ctx.used = False
        return loss

    @staticmethod
    def backward(ctx: _LossContext, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the saved gradients in place. Raises ``RuntimeError`` on a second call."""
        if ctx.used:
            raise RuntimeError("this loss's gradients were used already: it can be differentiated once")
        ctx.used = True
        # In place: the gradient is as large as the projection, so a copy would be the most expensive line here.
        grad_hidden, grad_weight = (saved.mul_(upstream[0].to(saved.dtype)) for saved in ctx.saved_tensors)
        return grad_hidden, grad_weight, None, None, None, None, None, None


_LossAndGradients = tuple[Tensor, Tensor | None, Tensor | None]
"""The summed loss, 0-dim, and its gradients by hidden states and by projection, or ``None`` if they are not wanted."""


def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    rows: VocabularyPiece | None,
    wants_gradient: bool,
    cap: float,
) -> _LossAndGradients:
    """Return the summed loss of ``hidden`` ``(b, s, dim)`` and ``targets`` ``(b, s)``, with the gradients of
    ``hidden``, in its dtype, and ``weight``, in fp32. Both are None unless ``wants_gradient``. At most ``chunk``
    tokens have logits at once.
    """
    states, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    # n tokens, rows of the vocabulary on this rank: states (n, dim), weight (rows, dim), targets (n,)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_states = torch.empty_like(states) if wants_gradient else None
    # fp32, because it sums over chunks.
    grad_weight = torch.empty_like(weight, dtype=torch.float32) if wants_gradient else None
    parts, in_lanes = _parts(len(weight), rows), rows is not None and bool(rows.lanes)
    matrices = _matrices(weight, parts)
    sums = None if grad_weight is None else _matrices(grad_weight, parts)

    def add_chunk(begin: int) -> None:
        """Add the losses of ``chunk`` tokens from ``begin``, and if gradients are needed, their gradients to states and weight."""
        # In a function, so that its arrays are freed before those of the next chunk are allocated.
        now = states[begin : begin + chunk]  # (chunk, dim)
        # 1. Logits, at once turned into log-probabilities, and the losses.
        target_columns, bends, scores, losses = _of_chunk(
            now, matrices, targets[begin : begin + chunk], parts, rows, cap
        )
        loss.add_(losses.sum())
        if grad_states is None or sums is None:
            return
        # 2. The gradient with respect to the logits, in the same memory, and from it both gradients.
        shares = []
        for matrix, total, log_probs, bend, target in zip(
            matrices, sums, scores, bends, target_columns, strict=True
        ):
            slope = _slope(log_probs, target)  # (chunk, rows of the part)
            slope = (slope if bend is None else slope.mul_(bend)).to(now.dtype)
            # In lanes, aligned memory of its own, for any number of lanes on the rank.
            into = torch.empty_like(now) if in_lanes else grad_states[begin : begin + chunk]
            shares.append(torch.mm(slope, matrix, out=into))
            _accumulate(total, slope, now, first=begin == 0)
        if in_lanes:
            grad_states[begin : begin + chunk] = add_in_tree(shares, Tensor.add_)

    for begin in range(0, len(states), chunk):
        add_chunk(begin)
    if sums is not None and grad_weight is not None:
        _put_together(grad_weight, parts, sums)
    return loss, None if grad_states is None else grad_states.view_as(hidden), grad_weight


class _Chunk(NamedTuple):
    """The results of a chunk's ``n`` tokens once their logits are computed; lists have an element for each part of the rows."""

    targets: list[_TargetColumns]
    bends: list[Tensor | None]
    """The derivative of the soft cap, ``(n, rows of the part)``; ``None`` without a cap."""
    scores: list[Tensor]
    """Log-probabilities, ``(n, rows of the part)``, fp32."""
    losses: Tensor
    """``(n,)``, fp32; 0 for tokens without a target."""


def _of_chunk(
    states: Tensor,
    matrices: Sequence[Tensor],
    targets: Tensor,
    parts: list[range],
    rows: VocabularyPiece | None,
    cap: float,
) -> _Chunk:
    """Compute log-probabilities and losses of ``states`` ``(n, dim)`` and ``targets`` ``(n,)``, with the derivative
    of the soft cap. ``matrices`` are the ``parts`` of the projection's rows.
    """
    target_columns = [_find(targets, part, rows) for part in parts]
    pairs = [_logits(states, matrix, cap) for matrix in matrices]
    scores, losses = _scores_and_losses([logits for logits, _ in pairs], target_columns, rows)
    return _Chunk(target_columns, [bend for _, bend in pairs], scores, losses)


@torch.no_grad()
def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    rows: VocabularyPiece | None = None,
    tiles: RankTiles | None = None,
    *,
    cap: float = 0.0,
    noise: Tensor | None = None,
) -> Tensor:
    """Return the scores of each token, ``(2, batch, seq)``, fp32, without a gradient; the same on all ranks that share the vocabulary.

    The first are the terms of ``summed_cross_entropy``, in nats, 0 for ignored targets. The second are the next token that greedy
    decoding would choose: the one with the largest logit, the first of equal ones. fp32 has each number below 2^24 exactly. Arguments are
    those of ``summed_cross_entropy``, and ``noise`` ``(batch, vocab)``, fp32, which is added to a row's logits before the choice: with
    Gumbel noise times a temperature, the choice is a sample at that temperature.
    """
    if rows is not None and rows.comm is not None:
        hidden = rows.comm.gather(hidden)  # (batch, seq, dim)
    if tiles is None:
        return _scores_in_chunks(hidden, weight, targets, chunk, rows, cap, noise)
    count = len(tiles.tile_numbers)
    # (batch, seq of a tile, dim) and (batch, seq of a tile) each
    pieces = zip(hidden.chunk(count, 1), targets.chunk(count, 1), strict=True)
    scores = [
        _scores_in_chunks(aligned(states), weight, labels, chunk, rows, cap, noise)
        for states, labels in pieces
    ]
    return torch.cat(scores, 2)  # (2, batch, seq)


def _scores_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    rows: VocabularyPiece | None,
    cap: float,
    noise: Tensor | None,
) -> Tensor:
    """Compute ``token_scores`` ``(2, b, s)`` of ``hidden`` ``(b, s, dim)`` and ``targets`` ``(b, s)``, with at most
    ``chunk`` tokens' logits at once. ``noise`` ``(b, vocab)`` is added before the choice only.
    """
    row_of = torch.arange(targets.numel(), device=targets.device) // targets.shape[1]  # (n,)
    states, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)  # (n, dim), (n,)
    parts = _parts(len(weight), rows)
    matrices, results = _matrices(weight, parts), []
    # (chunk, dim), (chunk,), (chunk,) each
    pieces = zip(
        torch.split(states, chunk), torch.split(labels, chunk), torch.split(row_of, chunk), strict=True
    )
    for now, target, row in pieces:
        logits = [_logits(now, matrix, cap)[0] for matrix in matrices]  # each (chunk, rows of the part)
        # Before the losses, which are computed in the memory of the logits.
        noisy = logits if noise is None else _with_noise(logits, noise[row], parts, rows)
        largest = _tokens_of_largest(noisy, parts, rows)
        _, losses = _scores_and_losses(logits, [_find(target, part, rows) for part in parts], rows)
        results.append(torch.stack((losses, largest.to(losses.dtype))))  # (2, chunk)
    return torch.cat(results, 1).view(2, *targets.shape)  # (2, b, s)


def _with_noise(
    logits: Sequence[Tensor], noise: Tensor, parts: Sequence[range], rows: VocabularyPiece | None
) -> list[Tensor]:
    """Return new logits: each part's ``(n, rows of the part)`` plus its columns of ``noise`` ``(n, vocab)``."""
    start = 0 if rows is None else rows.start
    return [
        scores + noise[:, start + part.start : start + part.stop]
        for scores, part in zip(logits, parts, strict=True)
    ]


def _tokens_of_largest(
    logits: Sequence[Tensor], parts: Sequence[range], rows: VocabularyPiece | None
) -> Tensor:
    """Return each token's index of the largest logit over the full vocabulary, the first of equal ones: ``(n,)``,
    int64. ``logits`` has each part's ``(n, rows of the part)``. A collective if ranks share the vocabulary.
    """
    start = 0 if rows is None else rows.start
    pairs = [part.max(1) for part in logits]
    # fp64 has each token's number exactly.
    here = torch.stack(
        [
            torch.stack((largest.double(), (columns + start + part.start).double()))
            for (largest, columns), part in zip(pairs, parts, strict=True)
        ]
    )  # (parts of this rank, 2, n)
    # (parts, 2, n)
    gathered = here if rows is None or rows.comm is None else rows.comm.stack(here).flatten(0, 1)
    first = gathered[:, 0].argmax(0)  # (n,): the parts are in the order of the vocabulary
    return gathered[:, 1].gather(0, first[None]).squeeze(0).long()


def _in_tiles(
    hidden: Tensor,
    targets: Tensor,
    tiles: RankTiles,
    of_piece: Callable[[Tensor, Tensor], _LossAndGradients],
) -> _LossAndGradients:
    """Apply ``of_piece`` tile by tile. Return the sequence's loss (on the first rank; zero elsewhere), the gradient of
    this rank's tokens, and the elements of the summed projection gradient that this rank reports. A collective.

    If ``of_piece`` returns no gradients, both gradients are ``None``.
    """
    losses: list[Tensor] = []
    grads_hidden: list[Tensor] = []

    def grads_weight() -> Iterator[Tensor]:
        """Yield each tile's gradient of the weight, if needed; losses and gradients of hidden states are appended to the lists around."""
        count = len(tiles.tile_numbers)
        # states: (b, s of a tile, dim), labels: (b, s of a tile)
        for states, labels in zip(hidden.chunk(count, 1), targets.chunk(count, 1), strict=True):
            loss, grad_states, grad_weight = of_piece(aligned(states), labels)
            losses.append(loss)
            if grad_states is not None and grad_weight is not None:
                grads_hidden.append(grad_states)
                yield grad_weight

    shares = grads_weight()
    first = next(shares, None)  # computes all tiles, if gradients are not wanted
    total = None if first is None else add_in_tree(itertools.chain((first,), shares), Tensor.add_)
    loss = tiles.total(add_in_tree(losses))
    loss = loss.clone() if tiles.rank == 0 else torch.zeros_like(loss)
    if total is None:
        return loss, None, None
    (reported,) = tiles.share_of_total([total])
    return loss, torch.cat(grads_hidden, 1), reported  # 0-dim, (b, s, dim), (rows, dim)


def _accumulate(total: Tensor, slope: Tensor, hidden: Tensor, *, first: bool) -> None:
    """Add ``slope^T hidden`` ``(rows, dim)`` to ``total``, fp32; with ``first``, overwrite it."""
    if slope.dtype == torch.float32:
        torch.addmm(total, slope.t(), hidden, beta=0 if first else 1, out=total)
    elif first:
        total.copy_(slope.t() @ hidden)
    else:
        total += slope.t() @ hidden


@dataclass(frozen=True)
class _TargetColumns:
    """Targets of ``n`` tokens as indices of this rank's rows of the vocabulary."""

    row: Tensor
    """Index of each target among this rank's rows, ``(n,)``, int64; 0 if another rank has it."""
    here: Tensor
    """True for targets that are among this rank's rows, ``(n,)``, bool."""
    ignored: Tensor
    """True for tokens without a target, ``(n,)``, bool."""


def _parts(count: int, rows: VocabularyPiece | None) -> list[range]:
    """Return the parts of ``count`` rows that are computed separately: all rows, or each lane."""
    sizes = (rows.lanes if rows is not None else ()) or (count,)
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _matrices(weight: Tensor, parts: Sequence[range]) -> list[Tensor]:
    """Return the ``parts`` of the rows of ``weight``: views if they are aligned like separate memory, else copies."""
    return [weight] if len(parts) == 1 else [aligned(weight[part.start : part.stop]) for part in parts]


def _put_together(weight: Tensor, parts: Sequence[range], sums: Sequence[Tensor]) -> None:
    """Copy the ``sums`` that are not in the memory of ``weight`` into its rows ``parts``."""
    for part, total in zip(parts, sums, strict=True):
        if total.data_ptr() != weight[part.start : part.stop].data_ptr():
            weight[part.start : part.stop] = total


def _find(targets: Tensor, part: range, rows: VocabularyPiece | None) -> _TargetColumns:
    """Return the targets' columns in a part of the vocabulary (0 if elsewhere), a mask of those that are in the part,
    and a mask of ignored ones; each ``(n,)``.
    """
    ignored = targets == IGNORE
    if rows is None:
        return _TargetColumns(targets.masked_fill(ignored, 0), ~ignored, ignored)
    row = targets - (rows.start + part.start)
    is_here = (row >= 0) & (row < len(part)) & ~ignored
    return _TargetColumns(row.masked_fill(~is_here, 0), is_here, ignored)


def _logits(
    hidden: Tensor, weight: Tensor, cap: float, product: Affine | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return logits ``(n, rows)`` and the derivative of the soft cap, both fp32; without a cap, logits in the states' dtype and ``None``."""
    scores = hidden @ weight.t() if product is None else product(hidden, weight, None)  # (n, rows)
    if not cap:
        return scores, None
    bent = torch.tanh(scores.float().div_(cap))
    return bent * cap, 1 - bent.square()


def log_probabilities(
    hidden: Tensor, weight: Tensor, cap: float = 0.0, product: Affine | None = None
) -> tuple[Tensor, Tensor]:
    """Return logits, and log-probabilities in fp32, ``(n, vocab)`` each, of ``hidden`` ``(n, dim)``, with the bits of this loss.

    ``product`` replaces PyTorch's product; it must have the same bits.
    """
    scores, _ = _logits(hidden, weight, cap, product)
    return scores, F.log_softmax(scores, dim=-1, dtype=torch.float32)


def _scores_and_losses(
    logits: list[Tensor], targets: list[_TargetColumns], rows: VocabularyPiece | None
) -> tuple[list[Tensor], Tensor]:
    """Return the log-probabilities ``(n, rows of a part)`` of each part's logits, and each token's loss ``(n,)``; fp32.

    The logits may be overwritten. Ignored tokens have a loss of 0.
    """
    ignored = targets[0].ignored
    if rows is None:
        scores = F.log_softmax(logits[0], dim=-1, dtype=torch.float32)
        return [scores], (-_pick(scores, targets[0])).masked_fill(ignored, 0.0)
    # 1. Three numbers a token of each part, relative to its own largest logit.
    relative, numbers = [], []
    for part, target in zip(logits, targets, strict=True):
        scores = part.float()
        largest, picked = scores.amax(1), _pick(scores, target)  # (n,) each
        relative.append(scores.sub_(largest[:, None]))
        numbers.append(torch.stack((largest, scores.exp().sum(1), picked)))  # (3, n)
    here = torch.stack(numbers)  # (parts of this rank, 3, n)
    gathered = here if rows.comm is None else rows.comm.stack(here).flatten(0, 1)  # (parts, 3, n)
    # 2. The logarithm of the complete sum of exponentials is top + total.
    top = gathered[:, 0].amax(0)  # (n,)
    total = (gathered[:, 1] * (gathered[:, 0] - top).exp()).sum(0).log()  # (n,)
    # 3. Log-probabilities. The scores are relative to a part's largest already, so ``total`` is added to the difference of the two
    # largest and not to ``top`` itself: next to a large number, a small one would be rounded away.
    for scores, largest in zip(relative, here[:, 0], strict=True):
        scores.sub_((top - largest + total)[:, None])
    picked = gathered[:, 2].sum(0) - top - total  # (n,)
    return relative, (-picked).masked_fill(ignored, 0.0)


def _pick(scores: Tensor, target: _TargetColumns) -> Tensor:
    """Return the score of each target, ``(n,)``; 0 if it is not among this rank's rows."""
    return scores.gather(1, target.row[:, None]).squeeze(1).masked_fill(~target.here, 0.0)


def _slope(scores: Tensor, target: _TargetColumns) -> Tensor:
    """Return the loss's gradient by the logits, ``(n, rows)``, in the memory of the log-probabilities."""
    slope = scores.exp_()
    slope.scatter_add_(1, target.row[:, None], -target.here.to(slope.dtype)[:, None])
    return slope.masked_fill_(target.ignored[:, None], 0.0)


def summed_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    rows: VocabularyPiece | None = None,
    tiles: RankTiles | None = None,
    *,
    cap: float = 0.0,
) -> Tensor:
    """Return the summed cross-entropy, in nats, of predicting ``targets`` from hidden states: 0-dim, fp32. It can be
    differentiated once.

    ``hidden`` is ``(batch, seq, dim)`` of any floating-point dtype. If the vocabulary is divided, it is this rank's
    piece of the sequence, ``(batch, seq / ranks, dim)``, which is gathered here. ``weight`` is the output projection
    ``(vocab, dim)`` of the same dtype, or this rank's ``rows`` of it (``None``: all).

    ``targets`` ``(batch, seq)``, int64, have ``IGNORE`` for a token without a target. ``chunk`` tokens have logits in
    memory at once. ``tiles`` are the context tiles of the tokens, in their order, if the run has any. ``cap`` is the
    soft cap of the logits (``phalanx.model.layers.attention.attend``); 0 for none.

    It is a sum, not a mean, so that slots with any number of targets can be added. It is the same on all ranks that
    share the vocabulary, and its gradient is that of a single loss.
    """
    # Read here, because gradient mode is always off inside an autograd function.
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if rows is not None and rows.comm is not None and not rows.lanes:
        hidden = rows.comm.gather(hidden)
    return apply_function(
        _ChunkedCrossEntropy, hidden, weight, targets, chunk, rows, tiles, wants_gradient, cap
    )
