"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) whose result for an element depends on nothing but that element.

Kernels that compute several operations at once may fuse a multiply and an add into one rounding in their vector loop
and not in the scalar loop that handles the tail, or the other way round. Which elements are in the tail depends on
where a shard ends, and so on the number of ranks. Here every operation is a single one, in one pass over memory where
``phalanx.hardware.kernels`` has such a kernel for the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.hardware.kernels.choose import kernels_for
from phalanx.hardware.kernels.reference import REFERENCE, UpdateFactors
from phalanx.hardware.portable.correctly_rounded import power
from phalanx.model.init import flat_indices, random_words, stream_key
from phalanx.parallel.divisions import LocalSlice
from phalanx.parallel.reduction.data_parallel import local
from phalanx.run.kinds.operations import Parameter
from phalanx.run.kinds.whole_model import INT8_BLOCK
from phalanx.run.spec import OptimizerSpec
from phalanx.train.optimizers.optimizer import (
    VISITING_ELEMENTS,
    MomentStore,
    Optimizer,
    StatePart,
    boxes_of,
    change_kept,
    decays,
    gradient_of,
)


@dataclass
class AdamW(Optimizer):
    """The moments of every parameter, and the update.

    ``exp_avg`` and ``exp_avg_sq`` map parameter names to fp32 tensors laid out as the parameters are (a DTensor's
    moments are DTensors, unless they live in a ``store`` away from the device). ``boxes`` gives this rank's part of each
    parameter, where the tensor or expert axis divides it, which a DTensor does not know.
    """

    spec: OptimizerSpec
    parameters: Mapping[str, nn.Parameter]
    kinds: Mapping[str, Parameter]
    boxes: Mapping[str, LocalSlice] | None = None
    store: MomentStore | None = None
    exp_avg: dict[str, Tensor] = field(init=False)
    exp_avg_sq: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.exp_avg = {name: self._zeros(parameter) for name, parameter in self.parameters.items()}
        self.exp_avg_sq = {name: self._zeros(parameter) for name, parameter in self.parameters.items()}

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        if self.store is None:
            return torch.zeros_like(parameter, requires_grad=False)
        return self.store.zeros(tuple(local(parameter.detach()).shape), parameter.dtype)

    @torch.no_grad()
    def step(self, number: int, lr: float, gradient_scale: float, *, keep_change: bool = False) -> None:
        """Update weights with decay first, then the others, piece by piece, with moments visiting the device if a store has them."""
        for decay in (True, False):
            names = [name for name in self.parameters if decays(self.kinds[name], self.spec) == decay]
            factor = 1.0 - lr * self.spec.weight_decay if decay else 1.0
            pieces = self._pieces(names)
            if self.store is not None:
                pieces = self.store.visiting(pieces)
            for weights, grads, means, squares in pieces:
                with change_kept(weights, grads, keep=keep_change):
                    adamw_update(
                        weights, grads, means, squares, self.spec, number, lr, gradient_scale, factor
                    )

    def state(self) -> dict[str, list[StatePart]]:
        """Return this rank's part of both moments of each parameter, as ``exp_avg/NAME`` and ``exp_avg_sq/NAME``."""
        boxes = boxes_of(self.parameters, self.boxes)
        return {
            f"{moment}/{name}": [StatePart(local(tensor), self.kinds[name].shape, boxes[name][0], name)]
            for moment, tensors in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq))
            for name, tensor in tensors.items()
        }

    def _pieces(self, names: list[str]) -> Iterator[tuple[list[Tensor], ...]]:
        """Yield weights, gradients, means and squares as lists of flat pieces that together have about the size that
        suits the device. Raises ``RuntimeError`` if a parameter has no gradient.
        """
        launch: list[tuple[Tensor, ...]] = []
        elements = 0
        for name in names:
            parameter = self.parameters[name]
            # Without autograd, the local part of a DTensor is at hand; ``detach`` would be dispatched.
            tensors = (parameter, gradient_of(name, parameter), self.exp_avg[name], self.exp_avg_sq[name])
            flat = [local(tensor).reshape(-1) for tensor in tensors]  # (elements,) each
            size = kernels_for(flat[0].device, flat).chunk_elements(flat[0].device)
            if self.store is not None:
                size = min(size, VISITING_ELEMENTS)
            # (elements of a piece,) each
            for piece in zip(*(torch.split(tensor, size) for tensor in flat), strict=True):
                launch.append(piece)
                elements += piece[0].numel()
                if elements >= size:
                    yield _columns(launch)
                    launch, elements = [], 0
        if launch:
            yield _columns(launch)


def _columns(rows: list[tuple[Tensor, ...]]) -> tuple[list[Tensor], ...]:
    return tuple(list(column) for column in zip(*rows, strict=True))


def adamw_update(
    weights: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    spec: OptimizerSpec,
    number: int,
    lr: float,
    gradient_scale: float,
    decay_factor: float,
) -> None:
    """Apply one AdamW update ``number`` (from 1) to weights and both moments, in place, with a single rounding for
    each operation on each element.

    Gradients are multiplied by ``gradient_scale``, and weights by ``decay_factor`` before the update. Empty lists are
    allowed.
    """
    factors = UpdateFactors(
        gradient_scale=gradient_scale,
        keep_mean=spec.beta1,
        new_mean=1.0 - spec.beta1,
        keep_square=spec.beta2,
        new_square=1.0 - spec.beta2,
        root_divisor=math.sqrt(1.0 - power(spec.beta2, number)),
        eps=spec.eps,
        rate=lr / (1.0 - power(spec.beta1, number)),
        decay=decay_factor,
    )
    if weights:
        kernels = kernels_for(weights[0].device, (*weights, *grads, *means, *squares))
        kernels.adamw(weights, grads, means, squares, factors)


# AdamW with moments in bf16 or in eight bits, with rounding that does not depend on the layout.
#
# For a few rows at a time, moments are widened to fp32, updated by the operations of ``AdamW``, and rounded again. This saves 4
# (bf16) or nearly 6 (int8) of the 8 bytes per parameter of fp32 moments.
#
# ``bf16`` is rounded stochastically, with probabilities of up and down that are right on average. Ordinary rounding would lose
# the small change of a running mean in a step. The random bits are a function of (seed, name, step, element), see
# ``phalanx.model.init``.
#
# ``int8`` (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861) has a code of one byte per
# element and the largest magnitude of every block. Blocks are parts of the last dimension of the full parameter, so they do not
# depend on the shards. The codes are the paper's dynamic ones, dense near zero. A non-zero second moment is never rounded to
# zero, because the element would be divided by epsilon alone.


class Moments(Protocol):
    """One moment of what a rank holds of one parameter: ``(rows, columns)``, all leading dimensions being rows."""

    def read(self, rows: slice) -> Tensor:
        """The values of some rows, fp32."""

    def write(self, rows: slice, values: Tensor, number: int) -> None:
        """Round and store ``values``, those after step ``number``."""

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """The tensors kept: name suffix, tensor ``(rows, n)``, and the number of the parameter's columns that one of its columns stands for."""


class Elements:
    """Flat indices, in the whole parameter, of the elements of a box's rows."""

    def __init__(self, full_shape: tuple[int, ...], box: LocalSlice, device: torch.device) -> None:
        offset, shape = box
        self._begin = flat_indices(full_shape, offset, (*shape[:-1], 1), device).reshape(-1, 1)  # (rows, 1)
        self._columns = torch.arange(shape[-1], device=device)

    def of(self, rows: slice) -> Tensor:
        """``(rows, columns)``, int64."""
        return self._begin[rows] + self._columns


class Bf16Moments(Moments):
    """A moment in bf16, rounded stochastically; ``name`` is its own name."""

    def __init__(self, like: Tensor, elements: Elements, seed: int, name: str) -> None:
        self.values = torch.zeros_like(like, dtype=torch.bfloat16)
        self._elements, self._seed, self._name = elements, seed, name

    def read(self, rows: slice) -> Tensor:
        return self.values[rows].float()

    def write(self, rows: slice, values: Tensor, number: int) -> None:
        key = stream_key(self._seed, f"{self._name} after step {number}")
        self.values[rows] = stochastic_bf16(values, random_words(key, self._elements.of(rows)))

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        yield "", self.values, 1


def stochastic_bf16(values: Tensor, words: Tensor) -> Tensor:
    """``values`` (finite, fp32) in bf16: away from zero with probability equal to the part that bf16 cannot hold."""
    # bf16 is the upper half of fp32: adding 16 random bits to the lower half carries with just that probability.
    bits = values.contiguous().view(torch.int32) + (words & 0xFFFF).to(torch.int32)
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


class Int8Moments(Moments):
    """A moment as codes of one byte and a scale for every ``INT8_BLOCK`` elements of a row."""

    def __init__(self, like: Tensor, *, signed: bool) -> None:
        rows, self._columns = like.shape
        self._codebook, self._code_of = codebook(signed, like.device)
        self.codes = torch.full_like(like, dynamic_codes(signed).index(0.0), dtype=torch.uint8)
        self.scales = like.new_zeros((rows, math.ceil(self._columns / INT8_BLOCK)))

    def read(self, rows: slice) -> Tensor:
        codes = self.codes[rows]
        values = self._codebook.index_select(0, codes.view(-1).int()).view(codes.shape)  # (rows, columns)
        return values.mul_(self._scale_of_elements(self.scales[rows]))

    def write(self, rows: slice, values: Tensor, number: int) -> None:  # noqa: ARG002
        """Store each block's largest magnitude as its scale, and for each value the code next to value / scale.
        ``rows`` are those of ``values``; ``number`` is not used.
        """
        # (rows, blocks, INT8_BLOCK)
        blocks = F.pad(values, (0, -self._columns % INT8_BLOCK)).view(*self.scales[rows].shape, INT8_BLOCK)
        scales = blocks.abs().amax(-1)
        self.scales[rows] = scales
        # A block of zeros has scale 0; divided by 1 it stays zero.
        divisor = self._scale_of_elements(torch.where(scales == 0, 1.0, scales))
        # (rows columns,)
        keys = (values / divisor).to(torch.bfloat16).view(torch.int16).view(-1).int() & 0xFFFF
        self.codes[rows] = self._code_of.index_select(0, keys).view(values.shape)  # (rows, columns)

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        yield "", self.codes, 1
        yield "_scale", self.scales, INT8_BLOCK

    def _scale_of_elements(self, scales: Tensor) -> Tensor:
        return scales.repeat_interleave(INT8_BLOCK, -1)[:, : self._columns]


@functools.cache
def dynamic_codes(signed: bool) -> tuple[float, ...]:
    """Return the 256 numbers in [-1, 1], or if not ``signed`` in [0, 1], that a code can stand for, ascending (arXiv
    2110.02861, section 1.3).

    Decades from 1e-7 to 1; each has twice as many numbers, evenly spaced, as the one below.
    """
    positive = []
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        width = 0.9 / count
        positive += [1 / 10 ** (6 - decade) * (0.1 + width * (i + 0.5)) for i in range(count)]
    negative = [-code for code in positive] if signed else []
    return tuple(sorted([*negative, 0.0, *positive, 1.0]))


@functools.cache
def codebook(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of each code, fp32 ``(256,)``, and the nearest code of each number in bf16, uint8
    ``(65536,)``. Without a sign, only zero gets the code of zero.

    A look-up takes a tenth of the time that a search among the codes would; between two codes there are many bf16
    numbers.
    """
    numbers = torch.tensor(dynamic_codes(signed), dtype=torch.float32)
    bounds = (numbers[1:] + numbers[:-1]) / 2
    if not signed:
        bounds[0] = 0.0  # only zero gets the code of zero
    bf16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = torch.bucketize(bf16.nan_to_num(), bounds).to(torch.uint8)
    return numbers.to(device), codes.to(device)


class NarrowStateError(ValueError):
    """Moments that cannot be kept in the chosen format."""


class NarrowAdamW(Optimizer):
    """AdamW for parameters of two or more dimensions, with moments in ``spec.state``.

    Raises ``NarrowStateError`` where eight-bit blocks would straddle what two tensor ranks hold of a row.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        parameters: Mapping[str, nn.Parameter],
        kinds: Mapping[str, Parameter],
        seed: int,
        boxes: Mapping[str, LocalSlice] | None = None,
    ) -> None:
        """Allocate zero moments in the format ``spec.state``; ``seed`` seeds stochastic rounding. Raises
        ``NarrowStateError`` if a shard cuts through 8-bit blocks.
        """
        self.spec, self.parameters, self.kinds = spec, parameters, kinds
        self.boxes = boxes_of(parameters, boxes)
        self.moments = {name: self._moments(name, seed) for name in parameters}

    def _moments(self, name: str, seed: int) -> tuple[Moments, Moments]:
        """Return both moments of a parameter, zero, in the format ``spec.state``. Raises ``NarrowStateError`` if the shard cuts
        through 8-bit blocks."""
        share = _matrix(local(self.parameters[name].detach()))
        if self.spec.state == "bf16":
            elements = Elements(self.kinds[name].shape, self.boxes[name], share.device)
            return (
                Bf16Moments(share, elements, seed, f"exp_avg/{name}"),
                Bf16Moments(share, elements, seed, f"exp_avg_sq/{name}"),
            )
        (*_, begin), (*_, width) = self.boxes[name]
        if begin % INT8_BLOCK or (width % INT8_BLOCK and begin + width < self.kinds[name].shape[-1]):
            raise NarrowStateError(
                f"{name}: this rank holds {width} columns from column {begin}, which cuts through blocks of "
                f'{INT8_BLOCK}; set optimizer.state = "bf16", or a smaller parallel.tensor'
            )
        return Int8Moments(share, signed=True), Int8Moments(share, signed=False)

    @torch.no_grad()
    def step(self, number: int, lr: float, gradient_scale: float, *, keep_change: bool = False) -> None:
        """Update each parameter by groups of rows: read their moments as fp32, apply AdamW, and write them back rounded."""
        for name, parameter in self.parameters.items():
            decay = decays(self.kinds[name], self.spec)
            factor = 1.0 - lr * self.spec.weight_decay if decay else 1.0
            weights, grads = _matrix(local(parameter.detach())), _matrix(gradient_of(name, parameter))
            at_once = max(1, REFERENCE.chunk_elements(weights.device) // max(1, weights.shape[1]))
            for first in range(0, weights.shape[0], at_once):
                rows = slice(first, first + at_once)
                wide = [moment.read(rows) for moment in self.moments[name]]
                pieces = ([weights[rows]], [grads[rows]], [wide[0]], [wide[1]])
                with change_kept(pieces[0], pieces[1], keep=keep_change):
                    adamw_update(*pieces, self.spec, number, lr, gradient_scale, factor)
                for moment, values in zip(self.moments[name], wide, strict=True):
                    moment.write(rows, values, number)

    def state(self) -> dict[str, list[StatePart]]:
        """Return this rank's part of the moments' tensors (values, or codes and scales) of each parameter by name,
        with offset and shape of the full state.
        """
        parts = {}
        for name, moments in self.moments.items():
            full_shape, (offset, box) = self.kinds[name].shape, self.boxes[name]
            for kind, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                for suffix, tensor, width in moment.tensors():
                    part = StatePart(
                        tensor.view(*box[:-1], tensor.shape[1]),  # (..., columns or scales of a row)
                        (*full_shape[:-1], math.ceil(full_shape[-1] / width)),
                        (*offset[:-1], offset[-1] // width),
                        name,
                    )
                    parts[f"{kind}{suffix}/{name}"] = [part]
        return parts


def _matrix(tensor: Tensor) -> Tensor:
    """``(rows, columns)``: a view in which all leading dimensions are rows."""
    return tensor.view(math.prod(tensor.shape[:-1]), tensor.shape[-1])  # (rows, columns)
