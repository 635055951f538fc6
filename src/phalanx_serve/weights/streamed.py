"""Streamed model: hooks on its blocks load each layer's weights before its forward, and remove them after.

The model itself is unchanged: its modules run the same kernels on the same numbers, so tokens and log-probabilities
have the bits of the resident model in the same format. Absent parameters are NaN without memory, so code that
bypasses the hooks fails visibly.

An expert's matrices are multiplied one expert at a time, in order, by the model's grouped product. The layer's own
router decides. The next mixture's router, applied to this layer's input, only predicts which experts to prefetch
(Fate, arXiv 2502.12224).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.checkpoint.format.image import ByteArray
from phalanx.checkpoint.pack.layout import PackedTensor
from phalanx.checkpoint.pack.reader import PackFile, read_section
from phalanx.checkpoint.pack.writer import tensor_in, write_wide
from phalanx.model.layers.expert_groups import Groups, grouped_product, groups_of_one_slot
from phalanx.model.layers.moe import Experts, GroupedProduct, MoE
from phalanx_serve.weights.budget import Residency
from phalanx_serve.weights.ring import ExpertCache, ReadPool, Ring, StreamStatistics

READ_THREADS = 2


def set_weight(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or buffer with ``value``."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = value
    else:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def dtype_of(place: PackedTensor, compute: torch.dtype) -> torch.dtype:
    """Return the dtype that a tensor is computed in."""
    return torch.float32 if place.name.endswith("router.bias") else compute


@dataclass
class _Wide:
    """Buffer for one section in the compute dtype, if its stored format differs."""

    dtype: torch.dtype
    memory: Tensor = field(default_factory=lambda: torch.empty(0))

    def tensors(self, section: ByteArray, places: tuple[PackedTensor, ...]) -> list[Tensor]:
        """Return the tensors of a section: views of its bytes if they have the compute dtype, else of this buffer.

        Those of this buffer are overwritten by the next call.
        """
        stored = torch.from_numpy(section)
        if all(place.dtype == str(self.dtype).removeprefix("torch.") for place in places):
            return [tensor_in(stored, place) for place in places]
        sizes = [math.prod(place.shape) for place in places]
        rounded = [-(-size // 64) * 64 for size in sizes]
        if self.memory.numel() < sum(rounded):
            self.memory = torch.empty(sum(rounded), dtype=self.dtype)
        tensors = []
        for place, flat, size in zip(
            places,
            torch.split(self.memory, [*rounded, self.memory.numel() - sum(rounded)]),
            sizes,
            strict=False,
        ):
            out = flat[:size].view(place.shape)
            write_wide(stored, place, out)
            tensors.append(out)
        return tensors


def load_resident(model: nn.Module, pack: PackFile, number: int, compute: torch.dtype) -> None:
    """Read a section other than an expert's into memory of its own, widened to ``compute`` where it is narrow, and
    set it in the model.
    """
    section = pack.index.sections[number]
    stored = torch.from_numpy(read_section(pack, number))
    for place in section.tensors:
        out = torch.empty(place.shape, dtype=dtype_of(place, compute))
        write_wide(stored, place, out)
        set_weight(model, section.prefix + place.name, out)


def load_stack(model: nn.Module, pack: PackFile, layer: int, compute: torch.dtype) -> None:
    """Read all experts of a layer into stacks ``(experts, ...)`` in ``compute``, and set them in the model."""
    stacks: dict[str, Tensor] = {}
    numbers = [
        number
        for number, entry in enumerate(pack.index.sections)
        if entry.kind == "expert" and entry.layer == layer
    ]
    for number in numbers:
        section = pack.index.sections[number]
        stored = torch.from_numpy(read_section(pack, number))
        for place in section.tensors:
            name = section.prefix + place.name
            if name not in stacks:
                stacks[name] = torch.empty((len(numbers), *place.shape), dtype=compute)
            write_wide(stored, place, stacks[name][section.expert])
    for name, stack in stacks.items():
        set_weight(model, name, stack)


class StreamedWeights:
    """State of a streamed model's hooks, with their ``statistics``."""

    def __init__(self, model: nn.Module, pack: PackFile, residency: Residency, compute: torch.dtype) -> None:
        """Load the resident weights, and begin to read the others.

        Raises the errors of reading. Hooks of the model then bring each block's weights when it computes.
        """
        self.statistics = StreamStatistics()
        self.residency = residency
        self._model, self._pack, self._compute = model, pack, compute
        self._wide, self._wide_expert = _Wide(compute), _Wide(compute)
        self._turn = 0
        streamed: list[int] = []
        for number, section in enumerate(pack.index.sections):
            if section.kind == "block" and section.layer not in residency.resident_layers:
                streamed.append(number)
            elif section.kind in ("kept", "embedding", "head", "block"):
                load_resident(model, pack, number, compute)
        self._pool = ReadPool(
            READ_THREADS
        )  # not before the reads above, whose errors would leave its threads
        self._ring = (
            Ring(pack, self._pool, streamed, residency.buffers, self.statistics) if streamed else None
        )
        for number in streamed:
            self._hook_block(number)
        self.experts: ExpertCache | None = None
        if residency.expert_slots:
            self.experts = ExpertCache(pack, self._pool, residency.expert_slots, self.statistics)
            mixtures = [
                (int(name.split(".")[1]), part)
                for name, part in model.named_modules()
                if isinstance(part, MoE)
            ]
            for place, (layer, mixture) in enumerate(mixtures):
                following = mixtures[place + 1] if place + 1 < len(mixtures) else None
                _StreamedMixture(self, self.experts, layer, mixture, following).hook()
        model.register_forward_pre_hook(self._count)

    def close(self) -> None:
        """End reading; the model can no longer compute."""
        self._pool.close()
        self._pack.close()

    def _count(self, *_: Any) -> None:
        """Count a pass, before it begins."""
        self._turn += 1

    def _hook_block(self, number: int) -> None:
        """Let a block take its weights from the ring before it computes, and release them afterwards, also after an error."""
        section, ring = self._pack.index.sections[number], self._ring
        assert ring is not None, "there is something to stream"
        block = self._model.get_submodule(section.prefix.removesuffix("."))
        names = [section.prefix + place.name for place in section.tensors]
        absent = {name: self._model.get_parameter(name) for name in names}

        def before(*_: Any) -> None:
            """Take the block's weights from the ring, and set them."""
            for name, value in zip(
                names, self._wide.tensors(ring.take(number), section.tensors), strict=True
            ):
                set_weight(self._model, name, value)

        def after(*_: Any) -> None:
            """Take the weights out of the block again, and release the ring's buffer."""
            for name, value in absent.items():
                set_weight(self._model, name, value.detach())
            ring.release()

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after, always_call=True)

    @property
    def turn(self) -> int:
        """Number of this pass."""
        return self._turn

    def expert_matrix(self, layer: int, data: ByteArray, name: str) -> Tensor:
        """Return the matrix ``name`` in an expert's bytes, in the compute dtype; the next call may overwrite it."""
        number = self._pack.index.find("expert", layer, 0)
        assert number is not None, "the layer has experts"
        places = self._pack.index.sections[number].tensors
        chosen = tuple(place for place in places if place.name == name)
        return self._wide_expert.tensors(data, chosen)[0]


@dataclass
class _StreamedMixture:
    """Hooks of one mixture of experts."""

    weights: StreamedWeights
    cache: ExpertCache
    layer: int
    mixture: MoE
    following: tuple[int, MoE] | None
    _tokens: Tensor | None = None
    _product: GroupedProduct | None = None
    _backwards: bool = False

    def hook(self) -> None:
        """Register the hooks of the mixture and its experts."""
        self.mixture.register_forward_pre_hook(self._remember)
        self.mixture.experts.register_forward_pre_hook(self._before)
        self.mixture.experts.register_forward_hook(self._after, always_call=True)

    def _remember(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Keep the mixture's tokens ``(tokens, dim)``, by which the next router guesses."""
        self._tokens = inputs[0].flatten(0, -2)

    def _before(self, experts: nn.Module, inputs: tuple[Tensor, Groups]) -> None:
        """Hook before the experts: begin to read the chosen ones and the likely ones of the next mixture.

        The next mixture's router guesses from this one's tokens. Replaces the experts' product by ``_multiply``.
        """
        assert isinstance(experts, Experts)
        counts: list[int] = inputs[1].counts.sum(1).tolist()
        needed = [expert for expert, count in enumerate(counts) if count]
        self.cache.need(self.layer, needed, self.weights.turn)
        if self.following is not None and self._tokens is not None:
            layer, mixture = self.following
            likely = torch.unique(mixture.router(self._tokens).experts).tolist()
            self.cache.prefetch(layer, likely, {(self.layer, expert) for expert in needed}, self.weights.turn)
        # Read here, because an engine may have changed the product after the model was opened.
        self._product, self._backwards = experts.product, False
        experts.product = self._multiply

    def _after(self, experts: nn.Module, *_: Any) -> None:
        """Restore the usual product."""
        assert isinstance(experts, Experts)
        if experts.product == self._multiply:
            experts.product = self._product
        self._tokens = None

    def _multiply(self, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        """Multiply ``rows`` by the matrices of one expert after another; a ``GroupedProduct`` with the same results.

        The order is reversed every second time, so that cached experts come first.
        """
        name = next(
            attribute
            for attribute in ("gate", "up", "down")
            if getattr(self.mixture.experts, attribute) is matrices
        )
        product = grouped_product if self._product is None else self._product
        counts: list[int] = groups.counts.sum(1).tolist()
        parts = dict(
            zip(
                [e for e, n in enumerate(counts) if n],
                torch.split(rows, [n for n in counts if n]),
                strict=True,
            )
        )
        order = list(parts)[:: -1 if self._backwards else 1]
        self._backwards = not self._backwards
        results: dict[int, Tensor] = {}
        for place, expert in enumerate(order):
            still_needed = {(self.layer, other) for other in order[place:]}
            data = self.cache.get((self.layer, expert), still_needed, self.weights.turn)
            matrix = self.weights.expert_matrix(self.layer, data, name).unsqueeze(0)
            size = torch.tensor([len(parts[expert])])
            results[expert] = product(parts[expert], matrix, groups_of_one_slot(size))
        return torch.cat([results[expert] for expert in parts])


def streamed_weights(model: nn.Module) -> StreamedWeights | None:
    """Return the streaming state of a model that ``open_model`` opened; None for a resident model."""
    for hook in model._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, StreamedWeights):
            return owner
    return None
