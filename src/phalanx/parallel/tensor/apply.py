"""The tensor axis: each matrix is divided over ranks, and the sequence is divided between the matrices.

Megatron's division (Shoeybi et al., arXiv 1909.08053). The first matrices of attention and of the feed-forward layer are divided by
rows, so that a rank has some of the heads or inner elements. The last one is divided by columns, so that the ranks' products add up
to the result. Between those pairs a rank has a piece of the sequence (``phalanx.parallel.tensor.sequence_comm``). Embedding and
output projection are divided by rows of the vocabulary; the loss (``phalanx.train.step.loss``) never gathers the scores.

Small parameters are replicated: norms, routers, biases that are added after a sum, and the projections into the latents of latent
attention. Each rank computes a part of their gradients. These are summed by one collective for each block and backward pass. With
more ranks than key and value heads, neighbors have the same head, each for some of its query heads. The gradients of these copies are
summed in the order of the ranks.

Routed experts are left unchanged (``phalanx.parallel.expert``); each rank routes the tokens of its piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.hardware.local.device import CommClock
from phalanx.model.facts.shape import parameters
from phalanx.model.layers.dense import Linear, note_derived_weights
from phalanx.model.layers.moe import Experts, routers
from phalanx.model.transformer import Transformer
from phalanx.parallel.context.fixed_tiles import RankTiles
from phalanx.parallel.mesh import DimSplit, Mesh, Partition, piece
from phalanx.parallel.tensor.lanes.apply import RankLanes, apply_lanes
from phalanx.parallel.tensor.lanes.shares import by_unit
from phalanx.parallel.tensor.sequence_comm import SequenceComm
from phalanx.parallel.torch_compat import overlap_with_products
from phalanx.run.kinds.operations import Parameter, by_name
from phalanx.run.spec import RunSpec


@dataclass(frozen=True)
class VocabularyPiece:
    """The rows of the vocabulary on this rank."""

    start: int
    """The first row."""
    comm: SequenceComm | None
    """Collectives with the ranks of the other rows; ``None`` if there are none."""
    lanes: tuple[int, ...] = ()
    """Number of rows in each lane, if the vocabulary is divided into lanes."""


def vocabulary_piece(mesh: Mesh, spec: RunSpec, clock: CommClock) -> VocabularyPiece | None:
    """Return this rank's rows of embedding and output projection; ``None`` without tensor ranks and lanes."""
    lanes, ranks, vocabulary = spec.model.lanes, mesh.layout.tensor, spec.model.vocab_size
    if ranks == 1 and not lanes:
        return None
    start = piece(vocabulary, mesh.tensor_rank, ranks).start
    first = mesh.tensor_rank * (lanes // ranks)
    sizes = tuple(len(piece(vocabulary, lane, lanes)) for lane in range(first, first + lanes // ranks))
    return VocabularyPiece(start, _comm(mesh, spec, clock), sizes)


def _comm(mesh: Mesh, spec: RunSpec, clock: CommClock) -> SequenceComm | None:
    """Return collectives with the ranks that share each matrix; ``None`` if there is one rank."""
    if mesh.layout.tensor == 1:
        return None
    return SequenceComm(mesh.tensor_group, clock, "tree" if spec.model.lanes else "library")


class RowLinear(Linear):
    """Row-parallel linear layer: has some of the inputs, and reduce-scatters the sum over ranks along the sequence."""

    def __init__(self, linear: Linear, comm: SequenceComm) -> None:
        """Take over the parameters of ``linear``, which are already this rank's parts."""
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.product, self.comm = linear.weight, linear.bias, linear.product, comm

    def forward(self, x: Tensor) -> Tensor:
        """``(b, s, inputs / ranks)`` to ``(b, s / ranks, outputs)``."""
        product = F.linear if self.product is None else self.product
        y = self.comm.sum_scatter(product(x, self.weight))
        return y if self.bias is None else y + self.bias


class VocabularyEmbedding(nn.Embedding):
    """Vocabulary-parallel embedding: has some rows, and reduce-scatters along the sequence."""

    def __init__(self, embedding: nn.Embedding, start: int, comm: SequenceComm) -> None:
        """Take over the parameter of ``embedding``, which is already this rank's part."""
        super().__init__(1, 1, device="meta")
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.weight, self.start, self.comm = embedding.weight, start, comm

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up tokens ``(b, s)`` of the full vocabulary, with zeros for rows of other ranks, and reduce-scatter
        along the sequence: ``(b, s / ranks, d)``. A collective.
        """
        count = self.weight.shape[0]
        row = tokens - self.start
        absent = (row < 0) | (row >= count)
        # Absent tokens may read any row. The modulo spreads them, so that backward has no row to which all of them add.
        vectors = F.embedding(row % count, self.weight).masked_fill(absent.unsqueeze(-1), 0)  # (b, s, d)
        return self.comm.sum_scatter(vectors)  # (b, s / ranks, d)


class _SummedGradients:
    """Hooks that make a module see parameters whose gradients are summed over the ranks, while it runs.

    They are not stored in the module permanently, because FSDP exchanges parameters before and after it runs.
    """

    def __init__(self, names: tuple[str, ...], comm: SequenceComm) -> None:
        self._names, self._comm = names, comm
        self._saved: tuple[Tensor, ...] = ()

    def install(self, module: nn.Module) -> None:
        """Register hooks on ``module``, which replace its parameters by views with summed gradients while it runs."""
        note_derived_weights(module, self._names)
        module.register_forward_pre_hook(self._enter)
        # always_call, because activation recomputation stops with an exception as soon as it has the tensors it needs.
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: object) -> None:  # noqa: ARG002
        """Replace the module's parameters by views whose gradients are summed over the ranks."""
        self._saved = tuple(module.get_parameter(name) for name in self._names)
        self._put(module, self._comm.sum_gradients(self._saved))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:  # noqa: ARG002
        """Restore the parameters."""
        self._put(module, self._saved)
        self._saved = ()

    def _put(self, module: nn.Module, tensors: tuple[Any, ...]) -> None:
        """Set the named parameters of a module to ``tensors``, in their order; names without a tensor stay as they are."""
        for full_name, tensor in zip(
            self._names, tensors, strict=False
        ):  # none were saved if entering failed
            path, _, name = full_name.rpartition(".")
            module.get_submodule(path)._parameters[name] = tensor


def apply_tensor(
    module: Transformer, mesh: Mesh, spec: RunSpec, clock: CommClock, tiles: RankTiles | None = None
) -> dict[str, Partition]:
    """Divide ``module`` over the tensor axis of ``mesh``; with lanes also by ``tiles``. It is on the meta device and
    not yet sharded.

    Afterwards its parameters are this rank's parts. It takes tokens of full sequences (of this context rank). A later
    pipeline stage takes hidden states ``(b, s / ranks, d)`` with the ``positions`` of full sequences. Its readout gets
    hidden states ``(b, s / ranks, d)`` and this rank's rows of the projection. Routers then sum their statistics over
    the model ranks, and hooks sum the gradients of parameters that several ranks have.

    Returns:
        The partition of each parameter except routed experts; empty with a single tensor rank.
    """
    if mesh.layout.model_ranks > 1:
        total = SequenceComm(mesh.sequence_group, clock).total
        for _, router in routers(module):
            router.total_over = total
    rows = vocabulary_piece(mesh, spec, clock)
    if rows is None:
        return {}
    table, comm = by_name(parameters(spec.model)), rows.comm
    partitions = {} if comm is None else _cut(module, mesh, table)
    if spec.model.lanes:
        keys = None if mesh.key_group is None else SequenceComm(mesh.key_group, clock, "tree")
        lanes = RankLanes(spec.model.lanes, mesh.layout.tensor, comm, keys, tiles)
        apply_lanes(module, table, lanes, rows.start)
        return partitions
    assert comm is not None, "without lanes, rows are divided over ranks only"
    if spec.parallel.async_tensor:
        overlap_with_products(mesh.tensor_group)
    _communicate(module, rows, comm, partitions)
    undivided = (name for name, partition in partitions.items() if not partition.splits)
    for _, unit, names in by_unit(module, undivided):
        _SummedGradients(names, comm).install(unit)
    if mesh.key_group is not None:
        copied = (name for name, partition in partitions.items() if partition.splits and partition.copies > 1)
        for _, unit, names in by_unit(module, copied):
            _SummedGradients(names, SequenceComm(mesh.key_group, clock, "ranks")).install(unit)
    return partitions


def _cut(module: nn.Module, mesh: Mesh, table: Mapping[str, Parameter]) -> dict[str, Partition]:
    """Replace each parameter that ``table`` divides by this rank's part, uninitialized. Return the partitions of all
    parameters by name, also of undivided ones. Routed experts are skipped in both.
    """
    index, count = mesh.tensor_rank, mesh.layout.tensor
    partitions = {}
    for owner_name, owner in module.named_modules():
        if isinstance(owner, Experts):
            continue
        for name, full_param in owner.named_parameters(prefix=owner_name, recurse=False):
            shape, dim = tuple(full_param.shape), table[name].tensor_dim
            parts = table[name].parts_over(count)
            copies = count // parts
            if dim is None or parts == 1:
                partitions[name] = Partition(shape, copy=index, copies=count)
                continue
            split = DimSplit(dim, index // copies, parts, mesh.tensor_group, copies)
            partitions[name] = Partition(shape, (split,), index % copies, copies)
            part = nn.Parameter(full_param.new_empty(partitions[name].part[1]), full_param.requires_grad)
            setattr(owner, name.rpartition(".")[2], part)
    return partitions


def _communicate(
    module: Transformer, rows: VocabularyPiece, comm: SequenceComm, partitions: Mapping[str, Partition]
) -> None:
    """Install the collectives around the divided matrices: a gather before the layer, a sum after its row-parallel
    matrix. The embedding is replaced by one of this rank's rows.
    """

    def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return comm.gather(args[0]), *args[1:]

    for name, partition in partitions.items():
        if any(split.dim == 1 for split in partition.splits):
            layer_name, last, _ = name.rsplit(".", 2)
            layer = module.get_submodule(layer_name)
            layer.register_forward_pre_hook(gather)
            setattr(layer, last, RowLinear(getattr(layer, last), comm))
    if module.embedding is not None:
        module.embedding = VocabularyEmbedding(module.embedding, rows.start, comm)
