"""Seconds and bytes of one layer of each kind, for every combination of axes that a layer depends on.

A layer's cost depends on few of a candidate's fields (the degrees of tensor, context and expert, the micro-batch and the
format), so it is computed once for each combination that occurs and then looked up: a table of hundreds of rows can afford finer
formulas than millions of candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from phalanx.run.kinds import operations as op
from phalanx_plan.step_cost import hardware_times
from phalanx_plan.workload.architecture import KINDS, Layer, LayerOperation, layers
from phalanx_plan.workload.candidates import (
    PARTS,
    PRECISIONS,
    Bools,
    Candidates,
    Floats,
    Ints,
    Precision,
    distinct,
)
from phalanx_plan.workload.stacks import TrainingJob

CATEGORIES = ("matmul", "attention", "pointwise", "tensor_comm", "context_comm", "expert_comm", "host")
"""Categories of a layer's time."""
PHASES = ("forward", "input_gradient", "weight_gradient")
_EXCHANGE_LAUNCHES = 2
"""Launches of a collective: its kernel, and the event that other streams wait for."""


@dataclass(frozen=True)
class LayerCosts:
    """Tables over unique combinations ("rows") of the fields that a layer depends on."""

    row: Ints
    """Row of each candidate, in the candidates' own axes."""
    seconds: Floats
    """Seconds of one micro-batch, shape (kinds, phases, categories, rows)."""
    recompute_s: Floats
    """Seconds of recomputation of one micro-batch, shape (kinds, modes, rows)."""
    kept_bytes: Floats
    """Bytes kept from forward to backward of one micro-batch, shape (kinds, modes, rows)."""
    widest_bytes: Floats
    """Bytes kept by the part of a layer that keeps most, shape (kinds, rows)."""
    hidden_s: Floats
    """Seconds of exchange of tokens of one micro-batch that another micro-batch's computing hides, shape (kinds, rows)."""
    by_phase: Floats
    """The sum of ``seconds`` over categories."""
    by_category: Floats
    """The sum of ``seconds`` over phases."""

    def of(self, table: Floats, *where: int) -> Floats:
        """The entries of ``table[where]``, whose last axis is rows, for each candidate."""
        entries: Floats = table[where].take(self.row)
        return entries

    def by_mode(self, table: Floats, kind: int, mode: Ints) -> Floats:
        """Return the entries, for ``kind`` and each candidate's recompute ``mode``, of a table of shape (kinds, modes, rows)."""
        if mode.shape[-1] > 1 or mode.ndim != self.row.ndim or self.row.size != self.row.shape[-1]:
            entries: Floats = table[kind][mode, self.row]
            return entries
        # Modes have an axis of their own: looking up rows in one table after the other is faster.
        entries = table[kind].take(mode.ravel(), axis=0).take(self.row.ravel(), axis=-1)
        return entries.reshape(*mode.shape[:-1], -1)


def layer_costs(job: TrainingJob, candidates: Candidates) -> LayerCosts:
    """Compute seconds and kept bytes of each kind of layer, once for all candidates with equal shares of a layer.

    The tables have a row for each distinct share; recomputed seconds and kept bytes are for each recompute mode.
    """
    values, row = distinct([getattr(candidates, field.name) for field in fields(_Keys)])
    keys = _Keys(*values)
    seconds = np.zeros((len(KINDS), len(PHASES), len(CATEGORIES), len(keys.tensor)))
    parts = np.zeros((2, len(KINDS), len(PARTS) + 1, len(keys.tensor)))
    hidden = np.zeros((len(KINDS), len(keys.tensor)))
    work = layers(job.workload, job.stack)
    for code in sorted(set(keys.precision.tolist())):
        mine = keys.precision == code
        rank = _RankShare(job, keys.rows(mine), PRECISIONS[code])
        for number, kind in enumerate(KINDS):
            layer = work[kind]
            seconds[number][..., mine], parts[0, number][:, mine], hidden[number, mine] = rank.seconds(layer)
            parts[1, number][:, mine] = rank.kept(layer)
    again = np.array([[mode.share(part) for part in (*PARTS, "input")] for mode in job.modes])
    # A recomputed part's tensors are dropped; its time is spent twice.
    recompute_s = np.einsum("mp,kpr->kmr", again, parts[0])
    kept = np.einsum("mp,kpr->kmr", 1 - again, parts[1])
    return LayerCosts(
        row,
        seconds,
        recompute_s,
        kept,
        parts[1].max(axis=1),
        hidden,
        seconds.sum(axis=2),
        seconds.sum(axis=1),
    )


@dataclass(frozen=True)
class _Keys:
    """Fields of a candidate that a layer's cost depends on, one entry for each combination."""

    tensor: Ints
    context: Ints
    expert: Ints
    expert_tensor: Ints
    micro_batch: Ints
    sequence_parallel: Ints
    precision: Ints

    def rows(self, mine: Bools) -> _Keys:
        return _Keys(*(getattr(self, field.name)[mine] for field in fields(self)))


@dataclass(frozen=True)
class _RankShare:
    """One rank's share of the work, as arrays over rows of the table."""

    job: TrainingJob
    keys: _Keys
    precision: Precision

    def rows(self, rows: op.Rows) -> Floats:
        """Number of tokens of a micro-batch that a rank has, by the kind of rows.

        Routed ones are copies, times the imbalance. "undivided" ones are 0 with several context ranks.
        """
        keys, workload = self.keys, self.job.workload
        tokens = keys.micro_batch * workload.seq_len / keys.context
        local = tokens / np.where(keys.sequence_parallel > 0, keys.tensor, 1)
        if rows == "gathered":
            return tokens if self.job.stack.activations.gathered_inputs else local
        if rows == "undivided":
            return np.where(keys.context == 1, tokens, 0.0)
        if rows == "routed":
            per_token = workload.model.moe.per_token if workload.model.moe else 0
            return tokens / keys.tensor * keys.expert_tensor * per_token * workload.imbalance
        return local if rows == "local" else tokens

    def over(self, axis: op.Axis) -> Ints:
        """Ranks that an axis divides over."""
        if axis == "none":
            return np.ones_like(self.keys.tensor)
        if axis == "key_heads":
            return np.minimum(self.keys.tensor, self.job.workload.model.kv_heads)
        return self.keys.tensor if axis == "tensor" else self.keys.expert_tensor

    def kept(self, layer: Layer) -> Floats:
        """Bytes kept for backward by part, the last row for the layer's input; shape (parts + 1, rows)."""
        bytes_ = np.zeros((len(PARTS) + 1, len(self.keys.tensor)))
        for tensor in layer.kept:
            place = PARTS.index(tensor.part) if tensor.part != "input" else len(PARTS)
            bytes_[place] += (
                self.rows(tensor.rows) * tensor.width * self._bytes(tensor) / self.over(tensor.over)
            )
        return bytes_

    def _bytes(self, tensor: op.KeptTensor) -> int:
        """Bytes of an element of a kept tensor; 0 for one that is another's operand in the same format."""
        wide, narrow = self.precision.activation_bytes, self.precision.operand_bytes
        if self.job.stack.activations.wide_operands:
            narrow = wide
        if tensor.beside and narrow == wide:
            return 0
        return tensor.bytes or (narrow if tensor.operand else wide)

    def seconds(self, layer: Layer) -> tuple[Floats, Floats, Floats]:
        """Seconds by phase and category, forward seconds by part, and seconds of exchange that other micro-batches
        hide.

        The first leaves out all hidden exchange. The second, seconds to recompute a part, leaves out only hidden keys and values:
        exchange with experts counts in full, since Megatron-Core refuses to recompute an exchange that it overlaps.
        Host time is added where launches take longer than the device. Their shapes are (phases, categories, rows),
        (parts + 1, rows) and (rows,).
        """
        phase_s = np.zeros((len(PHASES), len(CATEGORIES), len(self.keys.tensor)))
        parts = np.zeros((len(PARTS) + 1, len(self.keys.tensor)))
        core, launches = np.zeros((2, len(PHASES), len(self.keys.tensor)))
        for operation in layer.operations:
            category, times = self._cost(operation)
            if isinstance(operation, op.AttentionCore):
                core += times
            phase_s[:, CATEGORIES.index(category)] += times
            parts[PARTS.index(operation.part)] += times[0]
            if operation.part not in self.job.stack.kernels.graphed:
                launches += self._launches(operation)
        exchange = phase_s[:, CATEGORIES.index("expert_comm")]
        paired = exchange.sum(axis=0) * self._hidden_exchange(phase_s)
        phase_s[:, CATEGORIES.index("expert_comm")] *= 1 - self._hidden_exchange(phase_s)
        hidden = self._hidden_context(phase_s[:, CATEGORIES.index("context_comm")], core)
        phase_s[:, CATEGORIES.index("context_comm")] -= hidden
        parts[PARTS.index("core")] -= hidden[0]
        device, facts = phase_s.sum(axis=1), self.job.stack.kernels
        launches[0] += facts.random_states * (core[0] > 0)
        phase_s[:, CATEGORIES.index("host")] = self._host(launches, device)
        # Assume that the host delays each part in proportion.
        again = parts * (phase_s[0].sum(axis=0) / np.maximum(device[0], 1e-30))
        further = launches[:1] + facts.checkpoint_states * (core[:1] > 0)
        again[PARTS.index("residual")] += (
            self._host(further, device[:1]) - self._host(launches[:1], device[:1])
        )[0]
        return phase_s, again, paired

    def _hidden_context(self, exchange: Floats, core: Floats) -> Floats:
        """Seconds of the transfer of keys and values that attention with the previous blocks hides, by phase; 0 if they are gathered."""
        if self.job.stack.attention.exchange == "gather":
            return np.zeros_like(exchange)
        # A ring of n ranks computes n blocks and sends n - 1. Each transfer can hide no more than the block computed meanwhile.
        blocks = self.keys.context
        hiding = core * self.job.stack.overlap.context * (blocks - 1) / blocks
        return np.minimum(exchange, hiding)

    def _hidden_exchange(self, phase_s: Floats) -> Floats:
        """The share of the exchange of tokens that another micro-batch's forward and backward hide, at most the
        stack's ``overlap.expert``.
        """
        exchange = phase_s[:, CATEGORIES.index("expert_comm")].sum(axis=0)
        computing = sum(
            phase_s[:, CATEGORIES.index(name)].sum(axis=0) for name in ("matmul", "attention", "pointwise")
        )
        share: Floats = np.minimum(self.job.stack.overlap.expert, computing / np.maximum(exchange, 1e-30))
        return share

    def _host(self, launches: Floats, device_s: Floats) -> Floats:
        """Seconds that the device waits for the host, by phase."""
        host_s = launches * self.job.stack.kernels.launch_s
        return host_s if self.job.stack.kernels.blocking_launches else np.maximum(host_s - device_s, 0.0)

    def _launches(self, operation: LayerOperation) -> Floats:
        """Number of kernels that an operation launches, by phase, shape (phases, rows).

        A narrow product has two casts; an exchange counts ``_EXCHANGE_LAUNCHES``, or none on one rank.
        """
        ones = np.ones_like(self.keys.tensor, dtype=np.float64)
        if isinstance(operation, op.MatrixProduct):
            # A narrow format needs a cast of each operand in addition to the product.
            casts = 2 if self.precision.matmul in ("fp8", "fp4") else 0
            each = (1 + casts) * self._local(operation.experts)
            return np.stack([each, each, each])
        if isinstance(operation, op.AttentionCore):
            return np.stack([ones, 2 * ones, 0 * ones]) * self.keys.context
        if isinstance(operation, op.Pointwise):
            forward, backward = self._kernels(operation)
            return np.stack([forward, backward, 0 * forward])
        size = self._members(operation)
        return np.stack([ones, ones, 0 * ones]) * np.where(size > 1, _EXCHANGE_LAUNCHES, 0)

    def _members(self, exchange: op.LayerExchange) -> Ints:
        """Ranks that take part in an exchange."""
        keys = self.keys
        sizes = {"context": keys.context, "dispatch": keys.expert, "combine": keys.expert}
        sizes |= {"gather": keys.tensor, "scatter": keys.tensor}
        return sizes.get(exchange.kind, keys.expert_tensor)

    def _cost(self, operation: LayerOperation) -> tuple[str, Floats]:
        """The category of an operation and its seconds by phase.

        All other operations than products, attention and pointwise ones are exchanges.
        """
        if isinstance(operation, op.MatrixProduct):
            return "matmul", self._product(operation)
        if isinstance(operation, op.AttentionCore):
            return "attention", self._attention(operation)
        if isinstance(operation, op.Pointwise):
            return "pointwise", self._pointwise(operation)
        return self._exchange(operation)

    def _product(self, product: op.MatrixProduct) -> Floats:
        """Seconds of a matrix product by phase: forward, gradient of the input, gradient of the weights; casts
        included.

        Wide products stay in bf16 if the precision is narrow. Experts are one grouped product.
        """
        rows = self.rows(product.rows)
        own = product.columns - product.key_columns
        columns = own / self.over(product.columns_over) + product.key_columns / self.over("key_heads")
        inner = product.inner / self.over(product.inner_over)
        format_ = (
            self.precision.matmul if not product.wide or self.precision.matmul in ("fp16", "fp32") else "bf16"
        )
        groups = self._local(product.experts)
        casts = self._casts(format_, (rows * inner, rows * columns), groups)
        seconds: Callable[..., Floats] = partial(hardware_times.matmul_s, self.job.profile, format_)
        each = rows
        if product.experts:
            streams = self.job.stack.experts.streams
            seconds = partial(
                hardware_times.grouped_matmul_s, self.job.profile, format_, groups, streams=streams
            )
            each = rows / groups
        adding = self.job.stack.kernels.accumulating_bytes
        products = np.stack(
            [
                seconds(each, columns, inner),
                seconds(each, inner, columns),
                seconds(columns, inner, each, result_bytes=adding),
            ]
        )
        return casts + products

    def _casts(self, format_: str, operands: tuple[Floats, Floats], groups: Floats) -> Floats:
        """Seconds to bring the input, and in backward the output's gradient, into a narrow format, shape (phases,
        rows).

        Weights are cast once, and count 0. All are 0 unless the format is fp8 or fp4.
        """
        if format_ not in ("fp8", "fp4"):
            return np.zeros((len(PHASES), 1))
        # Written twice: along rows for one product and along columns for another.
        starts = np.maximum(self.job.stack.kernels.cast_kernels * groups, 1)
        moved = (
            self.job.stack.kernels.cast_reads * self.precision.activation_bytes
            + 2 * self.precision.operand_bytes
        )
        forward, backward = (
            hardware_times.memory_bound_s(self.job.profile, moved * elements, starts) for elements in operands
        )
        return np.stack([forward, backward, np.zeros_like(forward)])

    def _attention(self, attention: op.AttentionCore) -> Floats:
        """Seconds of attention by phase, for the rank that has most of it unless the pieces are balanced.

        Backward does 2.5 times the FLOP. The format is bf16 in fp8 runs, unless the stack's attention is narrow.
        """
        # 2 FLOP for each multiply-add, over half of the square; backward 2.5 times (arXiv 2307.08691, section 3.1).
        keys = attention.keys(self.job.workload.seq_len)
        per_token = keys * attention.heads * attention.widths
        flops = self.rows("tokens") * per_token / self.keys.tensor * self.job.workload.attended
        if not self.job.stack.attention.balanced:  # the last of n contiguous pieces attends to all before it
            flops = flops * (2 - 1 / self.keys.context)
        format_ = self.precision.matmul if self.precision.matmul in ("fp16", "fp32") else "bf16"
        if self.job.stack.attention.narrow and self.precision.matmul in ("fp8", "fp4"):
            format_ = "fp8"
        seconds = partial(
            hardware_times.attention_s,
            self.job.profile,
            format_,
            widths=attention.widths,
            latent=attention.latent,
            tokens=keys / self.keys.context,
        )
        forward, backward = seconds(flops, backward=False), seconds(2.5 * flops, backward=True)
        return np.stack([forward, backward, np.zeros_like(forward)])

    def _local(self, experts: int) -> Floats:
        """Experts of a rank out of ``experts``; one for operations that are not repeated for each expert."""
        return experts / self.keys.expert if experts else np.ones(len(self.keys.tensor))

    def _kernels(self, operation: op.Pointwise) -> tuple[Floats, Floats]:
        """Kernels forward and backward."""
        each = self._passes * self._local(operation.experts)
        return operation.kernels * each, (operation.backward_kernels or 2 * operation.kernels) * each

    @property
    def _passes(self) -> int:
        """Number of passes: eager code keeps intermediate results in fp32 and makes several passes instead of one fused kernel's."""
        return 1 if self.job.stack.kernels.fused_pointwise else 3

    def _pointwise(self, operation: op.Pointwise) -> Floats:
        """Seconds of an operation bound by memory: forward, backward, and 0 for gradients of weights."""
        passes = self._passes
        elements = self.rows(operation.rows) / self.over(operation.over) * self.precision.activation_bytes
        each = self._kernels(operation)[0]
        starts = each, self._kernels(operation)[1] if operation.backward_kernels else each
        forward, backward = (
            hardware_times.memory_bound_s(self.job.profile, elements * passes * count, number)
            for count, number in zip((operation.forward, operation.backward), starts, strict=True)
        )
        return np.stack([forward, backward, np.zeros_like(forward)])

    def _exchange(self, exchange: op.LayerExchange) -> tuple[str, Floats]:
        """The category of an exchange and its seconds by phase: forward, backward, and 0 for gradients of weights.

        Tensor parallelism loses the share that its overlap hides. Backward of a gather is a scatter, and the reverse;
        inputs that are not kept gathered are gathered again. Dispatch and combine cost the same both ways.
        """
        if exchange.kind in ("dispatch", "combine"):
            both = self._to_experts(exchange)
            return "expert_comm", np.stack([both, both, np.zeros_like(both)])
        if exchange.kind == "context":
            return "context_comm", self._keys_and_values(exchange)
        dense = exchange.kind in ("gather", "scatter")
        size = self.keys.tensor if dense else self.keys.expert_tensor
        elements = self.rows("tokens" if dense else "routed") * exchange.width
        # Operands of narrow products are cast before they are gathered (Transformer Engine); sums are not narrow.
        gather = self._collective(
            hardware_times.all_gather_s, size, 1, elements * self.precision.operand_bytes
        )
        scatter = self._collective(
            hardware_times.reduce_scatter_s, size, 1, elements * self.precision.activation_bytes
        )
        forward, backward = (gather, scatter) if "gather" in exchange.kind else (scatter, gather)
        if exchange.kind == "gather" and not self.job.stack.activations.gathered_inputs:
            backward = backward + gather
        exposed = 1 - self.job.stack.overlap.tensor
        return "tensor_comm", np.stack([forward, backward, np.zeros_like(forward)]) * exposed

    def _keys_and_values(self, exchange: op.LayerExchange) -> Floats:
        """Seconds by phase to gather keys and values of all context ranks (and scatter gradients), or to pass them around the ring."""
        keys = self.keys
        block = (
            self.rows("tokens") * exchange.width / self.over(exchange.over) * self.precision.activation_bytes
        )
        if self.job.stack.attention.exchange == "gather":
            gather, scatter = (
                self._collective(seconds, keys.context, keys.tensor, block * keys.context)
                for seconds in (hardware_times.all_gather_s, hardware_times.reduce_scatter_s)
            )
            return np.stack([gather, gather + scatter, np.zeros_like(gather)])
        # Backward passes round keys and values, and with them their gradients.
        forward, backward = (
            (keys.context - 1)
            * hardware_times.point_to_point_s(self.job.cluster, keys.tensor, times * block, keys.context)
            for times in (1, 2)
        )
        return np.stack([forward, backward, np.zeros_like(forward)])

    def _to_experts(self, exchange: op.LayerExchange) -> Floats:
        """Seconds to bring tokens to their experts or back, once for each domain, or by an all-to-all of every copy.

        Asserts a mixture of experts.
        """
        moe = self.job.workload.model.moe
        assert moe is not None, "only mixtures have an exchange with experts"
        job, keys = self.job, self.keys
        tokens = self.rows("tokens") / keys.tensor * job.workload.imbalance
        once = job.stack.experts.dispatch != "every copy"
        narrow = exchange.kind == "dispatch" and job.stack.experts.narrow_dispatch
        bytes_ = exchange.width * (
            self.precision.operand_bytes if narrow else self.precision.activation_bytes
        )
        if once:
            return np.asarray(
                hardware_times.dispatch_s(
                    job.cluster,
                    keys.expert,
                    keys.expert_tensor,
                    tokens,
                    bytes_,
                    moe.per_token,
                    law="all_to_all" if job.stack.experts.dispatch == "hybrid" else "dispatch",
                )
            )
        copies = tokens * moe.per_token * bytes_
        return np.asarray(hardware_times.all_to_all_s(job.cluster, keys.expert, keys.expert_tensor, copies))

    def _collective(
        self, seconds: Callable[..., Floats], size: Ints, stride: Ints | int, bytes_: Floats
    ) -> Floats:
        """Seconds of a collective of ``size`` ranks, ``stride`` apart, on the job's cluster."""
        return np.asarray(seconds(self.job.cluster, size, stride, bytes_))
