"""A software stack as facts for the planner: eight components, this project's own stack, and the job that estimates are of.

Two programs with the same layout differ in what they keep in which format, in what they hide behind computing, and in what their
allocators hold. Each difference is a field of a component, so that the formulas of memory and time are written once for all
software. Stacks of other software are in ``phalanx_plan.workload.software``. Where a figure cannot be read off a source it is
fitted (``phalanx calibrate``, ``python -m validation``): the fractions of ``Overlap``, ``time_scalar`` and ``tax_per_doubling``.

Sources: Megatron-LM's distributed optimizer and main gradients (docs/source/api-guide/dist_optimizer.md of NVIDIA/Megatron-LM);
FSDP2 (torch.distributed.fsdp.fully_shard); ZeRO (arXiv 1910.02054); DeepSeek-V3 (arXiv 2412.19437, sections 3.2 and 3.3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Literal

from phalanx.hardware.cluster import Cluster
from phalanx.hardware.profile import Profile
from phalanx.model.facts.optimizer_state import state_bytes_by_name
from phalanx.model.facts.shape import ModelCounts, count, parameters
from phalanx.parallel.divisions import LONGEST_SPAN, word_bytes
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import compute_format, device_of
from phalanx.run.spec import ModelSpec, OptimizerSpec, RunSpec
from phalanx_plan.workload.candidates import RECOMPUTE, Recompute

NEVER = 4
"""A ZeRO stage above all that exist: states with it are never sharded."""


@dataclass(frozen=True)
class ParameterState:
    """One tensor kind that is kept for every parameter from step to step: gradients, master weights or moments."""

    kind: str
    bytes: float
    """Bytes per parameter."""
    sharded_from: int
    """Lowest ZeRO stage that shards it over data-parallel ranks."""
    optimizer: bool = False
    """True if only the update needs it, so that it can be offloaded between updates."""


@dataclass(frozen=True)
class States:
    """Weights, gradients and optimizer state: formats in bytes per parameter, and what shards them."""

    kept: tuple[ParameterState, ...]
    copy_bytes: float = 2.0
    """Copy of the weights in the format of computing: all of a rank's part below ZeRO-3, from it on two blocks at a time."""
    copies_unsharded: bool = True
    """True if that copy exists where nothing is sharded."""
    slot_gradient_bytes: float = 0.0
    """Unsharded gradient accumulator that lives until the micro-batches of one slot are reduced."""
    unit_gradient_bytes: float = 0.0
    """Whole gradient of the largest block before it is reduced and sharded."""
    embedding_gradient_bytes: float = 0.0
    """Gradient of the embedding of one micro-batch before it is accumulated, a block too large for the allocator to take from
    memory that layers have freed."""
    slot_tree: bool = False
    """True if gradients of slots are summed as a binary tree, whose open branches are held."""
    frees_gradients: bool = False
    """True if gradients are freed after the update, and allocated as backward passes need them: this project's trainer on GPUs. On CPUs
    it keeps the memory of gradients, and of sums that replicas have exchanged, for the next step."""
    slot_bin_bytes: float = 0.0
    """Integer sums of slots' gradients, held from the first slot of a step to the last: whole below ZeRO-3, from it on shares."""
    optimizer: OptimizerSpec | None = None
    """This project's own optimizer, whose state is known tensor by tensor; ``None`` if ``kept`` describes every parameter."""
    shards: Literal["flat", "rows"] = "flat"
    """Unit that data-parallel ranks divide: one flat buffer, or each parameter by whole rows (of stacked experts: whole experts)."""


@dataclass(frozen=True)
class DataExchange:
    """Collectives of the data axes: formats in bytes per parameter, and how often they run."""

    gather_bytes: float = 2.0
    """Weights, in all-gathers."""
    reduce_bytes: float = 4.0
    """Gradients, in reduce-scatters and all-reduces."""
    gathers_per_block: int = 1
    """Collectives in which a block's weights are gathered and its gradients reduced, where these overlap with computing."""
    add_bytes: float = 0.0
    """Memory traffic to add a slot's gradient, unsharded, to sums in another format than its own."""
    reduces_each_micro_batch: bool = False
    """True if ZeRO-2 and ZeRO-3 reduce gradients after every micro-batch rather than after the last of a slot."""
    reduces_once: bool = False
    """True if gradients are reduced over replicas, and below ZeRO-3 over shards, once a step rather than after each slot; below
    ZeRO-3 they are kept whole till then."""


@dataclass(frozen=True)
class Overlap:
    """Fractions of communication that computing hides, by axis."""

    tensor: float = 0.0
    """Share of the tensor axis's communication that is hidden behind products."""
    context: float = 1.0
    """Share of the time of a ring's block of attention that can hide the transfer of the next block."""
    expert: float = 0.0
    """Share of the exchange of tokens that can be hidden, as far as there is something to compute meanwhile."""
    data: float = 0.8
    """Share of the time of backward that can hide the reduction of gradients (and, ZeRO-3, the gathering of the next block)."""
    paired: float = 0.0
    """Share of the exchange of tokens and of stages' inputs that a schedule which pairs forward with backward hides."""
    blocking_sends: bool = False
    """True if a stage computes nothing while it hands a micro-batch to its neighbor."""
    scattered_sends: bool = False
    """True if tensor ranks that repeat a stage's output send a piece each and the next stage's gather them (arXiv 2104.04473,
    section 4.1)."""


@dataclass(frozen=True)
class KernelFacts:
    """Kernel fusion, casts, and the host's cost to launch kernels."""

    fused_pointwise: bool = True
    """True if pointwise operations are fused, so that each reads and writes once."""
    accumulating_bytes: float = 0.0
    """Bytes per parameter moved by the product that computes a gradient, where it adds to a sum that it reads and writes;
    0 means that the gradient is just written, in the usual format."""
    cast_kernels: int = 0
    """Kernels that cast one expert's operand to a narrow format; 0 where one casts those of all experts."""
    cast_reads: int = 1
    """Times that a cast reads its tensor: once more where the scale is found first, from the tensor itself (current scaling)."""
    launch_s: float = 20e-6
    """The host's time to launch a kernel, with its share of Python, autograd and casts; 0 where launches are recorded (CUDA
    graphs) or compiled into one program. Fitted on published runs of small mixtures, which wait for the host."""
    graphed: frozenset[str] = frozenset()
    """Parts of a layer (``phalanx_plan.workload.candidates.PARTS``) that CUDA graphs replay: the host launches them at no cost."""
    small_gradients: bool = False
    """True if products have biases, and norms weights and biases, whose gradients kernels of their own sum over rows and add to
    sums over micro-batches."""
    random_states: int = 0
    """Calls of the host in a layer's forward pass that get or set the state of random numbers; each is taken for a launch."""
    checkpoint_states: int = 0
    """The same calls when a whole layer is computed again, beside those of its forward pass."""
    blocking_launches: bool = False
    """True if the host waits for every kernel before it launches the next, as under CUDA_LAUNCH_BLOCKING=1."""


@dataclass(frozen=True)
class AttentionPath:
    """Kernels of attention, and the exchange of keys and values on the context axis."""

    flash: bool = True
    keeps_scores: bool = False
    """True if no fused kernel takes fewer key than query heads, as PyTorch's for fp32 on GPUs: softmax's results are then kept."""
    narrow: bool = False
    """True if attention multiplies in fp8 where other products are narrow."""
    rotary: bool = True
    """False if nothing is rotated, since positions are learned or biases of the scores, as in GPT-3 and BLOOM."""
    turns_apart: bool = False
    """True if queries and keys are rotated to their positions by several small kernels rather than by one."""
    exchange: Literal["ring", "gather"] = "ring"
    """Way of keys and values: block by block while attention computes with the last, or all gathered before it begins."""
    balanced: bool = True
    """True if context ranks have equal shares of causal attention, rather than contiguous pieces of the sequence."""


@dataclass(frozen=True)
class ExpertPath:
    """Dispatch of tokens to experts, and the experts' kernels."""

    dispatch: Literal["once per node", "hybrid", "every copy"] = "every copy"
    """Copies of a token that cross the network to its experts: one for each node, which spreads it by a few multiprocessors
    (DeepEP) or at the full rate of its links ("hybrid": HybridEP), or one for each expert (an all-to-all)."""
    narrow_dispatch: bool = False
    """True if tokens are dispatched in the format of products."""
    streams: int = 0
    """Streams on which the products of a rank's experts start one after the other; 0 where one kernel computes all."""
    fused_permutation: bool = True
    """True if tokens are permuted to the order of experts, weighted and summed by one kernel each."""
    weighs_inside: bool = False
    """True if experts weight their rows before the last product, so that nothing of their results is kept for the weights'
    gradient."""
    narrow_gates: bool = False
    """True if the inputs of experts' activation are kept in the format of products."""
    weighs_biases: bool = False
    """True if experts' results have biases, which are weighted and added by one small kernel after the other, in fp32."""
    clamps_apart: bool = False
    """True if separate kernels clamp experts' gates and values before the activation."""
    pads_apart: bool = False
    """True if copies pad experts' rows to a multiple that narrow products need, and unpad their results."""


@dataclass(frozen=True)
class KeptActivations:
    """Activations that are kept beyond those that the layers' lists name."""

    gathered_inputs: bool = False
    """True if the gathered input of a divided product is kept, rather than its piece gathered again in backward."""
    stage_outputs: bool = False
    """True if a rank keeps what it has sent to the next stage, of every micro-batch in flight."""
    wide_operands: bool = False
    """True if operands of narrow products are kept as they were before the cast."""
    dropout: bool = False
    """True if layers have dropout, whose masks are kept."""


@dataclass(frozen=True)
class Allocator:
    """Bytes of a rank beyond its tensors."""

    context_bytes: float = 0.6e9
    """The driver's context and libraries, which no allocator counts."""
    communicator_bytes: float = 0.25e9
    """Buffers of each communicator."""
    further_communicators: int = 0
    """Communicators beside one for each axis."""
    buffer_bytes: float = 0.0
    """Fixed buffers for reducing gradients and gathering weights."""
    fragmentation: float = 0.04
    """Fraction of what is allocated that the allocator holds beside it and cannot use."""


@dataclass(frozen=True)
class Loss:
    """Computation of the loss from the logits."""

    logit_bytes: float = 8.0
    """Bytes per token and vocabulary entry while the loss is computed (bf16, fp32, and its gradient)."""
    passes: tuple[float, float] | None = None
    """Time of the loss, and of its gradient, in passes over the bf16 logits; ``None``: as many as the kernels make."""
    chunk: int = 0
    """Tokens whose logits are held at once; 0 means all of a micro-batch."""


@dataclass(frozen=True)
class Stack:
    """One software stack, as components that are swapped whole."""

    name: str
    states: States
    zero_stages: tuple[int, ...]
    """ZeRO stages; layouts with nothing to shard count as the first."""
    schedules: tuple[str, ...]
    """Pipeline schedules."""
    split: Literal["balanced", "even", "last"]
    """Division of layers into stages: by FLOP, or equally, embedding and output projection each counting as one layer
    where the layers alone do not divide, or equally and the last stage has what is left beside the model's end."""
    any_micro_batches: bool = False
    """True if ``interleaved``, ``zbv`` and ``dualpipev`` run any number of micro-batches."""
    data: DataExchange = DataExchange()
    overlap: Overlap = Overlap()
    kernels: KernelFacts = KernelFacts()
    attention: AttentionPath = AttentionPath()
    experts: ExpertPath = ExpertPath()
    activations: KeptActivations = KeptActivations()
    allocator: Allocator = Allocator()
    loss: Loss = Loss()
    time_scalar: float = 1.0
    """Measured over predicted time, fitted on runs of this stack."""
    tax_per_doubling: float = 0.006
    """Fraction that each doubling of the ranks beyond one node adds to the step, for ranks that wait for each other; see
    ``phalanx_plan.step_cost.step_time.scale_tax``."""

    def facts(self) -> Iterator[tuple[str, object]]:
        """Yield name and value of every field, those of components as "component.field"."""
        for field in fields(self):
            value = getattr(self, field.name)
            if is_dataclass(value):
                yield from (
                    (f"{field.name}.{part.name}", getattr(value, part.name)) for part in fields(value)
                )
            else:
                yield field.name, value


PHALANX = Stack(
    "phalanx",
    States(
        (
            ParameterState("master weights", 4, 1),
            ParameterState("gradients", 4, 2),
            ParameterState("moments", 8, 1, optimizer=True),
        ),
        slot_gradient_bytes=4,
        unit_gradient_bytes=4,
        slot_tree=True,
        frees_gradients=True,
        shards="rows",
    ),
    zero_stages=(2, 3, 1),
    schedules=("gpipe", "1f1b", "interleaved", "zbv", "dualpipev"),
    split="balanced",
    any_micro_batches=True,
    kernels=KernelFacts(fused_pointwise=False),
    activations=KeptActivations(gathered_inputs=True),
    loss=Loss(chunk=2048),
)
"""This project's own stack, before a run file sets it (``stack_of``)."""


@dataclass(frozen=True)
class TrainingWorkload:
    """Model, sequence length and batch of a step, independent of the software."""

    model: ModelSpec
    """Resolved: every dimension written out."""
    seq_len: int
    batch: int
    """Sequences of a step."""
    slots: int = 0
    """Slots of a batch, each reduced by itself; 0 means one for each data-parallel rank."""
    imbalance: float = 1.1
    """Tokens of the most loaded rank's experts over the mean."""
    attended: float = 1.0
    """Fraction of causal attention's scores that is computed, mean of layers: below one with sliding windows."""

    @property
    def counts(self) -> ModelCounts:
        """Parameters and FLOP."""
        return _counts(self.model, self.seq_len)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq_len


@lru_cache(maxsize=64)
def _counts(model: ModelSpec, seq_len: int) -> ModelCounts:
    return count(model, seq_len)


def workload_of(spec: RunSpec, *, keep_slots: bool = True) -> TrainingWorkload:
    """Return the workload of a run file; without ``keep_slots``, the layout chooses the slots."""
    model = resolve(spec.model, spec.data.vocab_size)
    slots = spec.train.slots if keep_slots else 0
    return TrainingWorkload(model, spec.train.seq_len, spec.train.batch_size, slots)


def stack_of(spec: RunSpec) -> Stack:
    """Return this project's own stack configured by a run file: the optimizer's state, compute format, reduction,
    loss chunks.

    Only a reproducible reduction of a dense model permits all ZeRO stages; others permit 2 and 3.
    """
    narrow = compute_format(spec.precision, device_of(spec.runtime, has_gpu=True)) == "bf16"
    model = resolve(spec.model, spec.data.vocab_size)
    master, gradients, moments = PHALANX.states.kept
    moments = replace(moments, bytes=_mean_moment_bytes(spec.optimizer, model))
    bin_bytes = _bin_bytes(spec) if spec.train.reduction == "integer" else 0.0
    # ZeRO-1 adds a rank's own slots in the tree before it exchanges them, which experts' gradients are not.
    adds_own = spec.train.reduction == "reproducible" and model.moe is None
    return replace(
        PHALANX,
        zero_stages=PHALANX.zero_stages if adds_own else (2, 3),
        states=replace(
            PHALANX.states,
            kept=(master, gradients, moments),
            copy_bytes=2.0 if narrow else 4.0,
            copies_unsharded=narrow,
            slot_tree=spec.train.reduction == "reproducible",
            slot_bin_bytes=bin_bytes,
            unit_gradient_bytes=PHALANX.states.unit_gradient_bytes + bin_bytes,
            optimizer=spec.optimizer,
        ),
        data=DataExchange(
            gather_bytes=2.0 if narrow else 4.0,
            reduce_bytes=bin_bytes or 4.0,
            # The gradient is read twice, the sum read and written.
            add_bytes=2 * 4.0 + 2 * bin_bytes if bin_bytes else 0.0,
            reduces_once=spec.train.reduction != "reproducible",
        ),
        overlap=Overlap(tensor=0.5 if spec.parallel.async_tensor else 0.0),
        kernels=KernelFacts(
            fused_pointwise=spec.runtime.compile,
        ),
        attention=AttentionPath(exchange="gather" if spec.parallel.context_mode == "allgather" else "ring"),
        # A chunk's logits, their copy in fp32 and the log-probabilities; without a copy if they are fp32 already.
        loss=Loss(logit_bytes=10.0 if narrow else 4.0, chunk=spec.train.loss_chunk),
    )


def _bin_bytes(spec: RunSpec) -> float:
    """Bytes of the integer sum of slots' gradients for each parameter (``phalanx.parallel.reduction.integer_summation``)."""
    count = spec.train.slots * spec.parallel.context
    return 2 * word_bytes(count) + 1 / LONGEST_SPAN


@lru_cache(maxsize=64)
def _mean_moment_bytes(optimizer: OptimizerSpec, model: ModelSpec) -> float:
    """Bytes of the optimizer's state for each parameter, the mean of the whole model."""
    state = sum(state_bytes_by_name(optimizer, parameters(model)).values())
    return state / sum(parameter.numel for parameter in parameters(model))


@dataclass(frozen=True)
class TrainingJob:
    """A workload, its training stack, and the cluster: the input of every estimate."""

    workload: TrainingWorkload
    stack: Stack
    cluster: Cluster
    profile: Profile
    modes: tuple[Recompute, ...] = RECOMPUTE
    """Recomputation modes that a candidate's ``recompute`` indexes."""
