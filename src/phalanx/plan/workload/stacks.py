"""What the planner must know of the software that trains: facts of each stack, as data.

Two programs with the same layout differ in what they keep in which format, in what they hide behind computing, and in what
they hold on to. Each difference is a field here, so that the formulas of memory and time are written once for all. Where a
figure cannot be read off a source it is a default to be fitted (``phalanx calibrate``, ``python -m validation``): the
overlap fractions, ``time_scalar`` and ``tax_per_doubling``.

Sources: Megatron-LM's distributed optimizer and main gradients (docs/source/api-guide/dist_optimizer.md of NVIDIA/Megatron-LM);
FSDP2 (torch.distributed.fsdp.fully_shard); ZeRO (arXiv 1910.02054); DeepSeek-V3 (arXiv 2412.19437, sections 3.2 and 3.3).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from phalanx.hardware.cluster import Cluster
from phalanx.hardware.profiles import Profile
from phalanx.model.facts.counts import Counts, count
from phalanx.model.facts.optimizer_state import state_bytes_by_name
from phalanx.model.facts.shape import parameters, resolve
from phalanx.plan.workload.candidates import RECOMPUTE, Recompute
from phalanx.run.spec import ModelSpec, OptimizerSpec, RunSpec

NEVER = 4
"""A ZeRO stage that there is not."""


@dataclass(frozen=True)
class State:
    """Something that is kept for every parameter from step to step."""

    kind: str
    bytes: float
    """Of a parameter."""
    sharded_from: int
    """The ZeRO stage from which it is divided over data-parallel ranks."""
    optimizer: bool = False
    """Whether only the update needs it, so that it can be offloaded between updates."""


@dataclass(frozen=True)
class Stack:
    """Facts of one software stack. Fractions are of one; bytes are of one rank."""

    name: str
    states: tuple[State, ...]
    zero_stages: tuple[int, ...]
    schedules: tuple[str, ...]
    split: Literal["balanced", "even", "last"]
    """How layers are divided into stages: by FLOP, or equally, embedding and output projection each counting as one layer
    where the layers alone do not divide, or equally and the last stage has what is left beside the model's end."""
    copy_bytes: float = 2.0
    """Of a parameter in the format of computing: all of a rank's part below ZeRO-3, from it on two blocks at a time."""
    copies_unsharded: bool = True
    """Whether that copy exists where nothing is sharded."""
    gather_bytes: float = 2.0
    """Of a parameter on its way to the ranks that compute with it."""
    reduce_bytes: float = 4.0
    """Of a gradient on its way to the ranks that add it up."""
    slot_gradient_bytes: float = 0.0
    """Of a parameter of a rank's whole part, while the micro-batches of one reduction add up."""
    accumulating_bytes: float = 0.0
    """Moved for each parameter by the product that computes its gradient, where it adds to a sum that it reads and writes;
    0 means that the gradient is just written, in the usual format."""
    unit_gradient_bytes: float = 0.0
    """Of a parameter of the largest block: its whole gradient before it is reduced and divided."""
    embedding_gradient_bytes: float = 0.0
    """Of a parameter of the embedding: its gradient of one micro-batch on the way to the sum, a block too large for the
    allocator to make of those that layers have freed."""
    flash_attention: bool = True
    dropout: bool = False
    keeps_gathered_inputs: bool = False
    """Whether the gathered input of a divided product is kept, rather than its piece gathered again in backward."""
    fused_pointwise: bool = True
    """Whether pointwise operations are fused, so that each reads and writes once."""
    logit_bytes: float = 8.0
    """Of a token's score for one row of the vocabulary while the loss is computed (bf16, fp32, and its gradient)."""
    loss_passes: tuple[float, float] | None = None
    """How often a score's two bytes could be moved while its loss is computed, and then its gradient; ``None``: as often as they are."""
    loss_chunk: int = 0
    """Tokens whose logits are held at once; 0 means all of a micro-batch."""
    context_bytes: float = 0.6e9
    """Of the driver's context and of libraries, which no allocator counts."""
    communicator_bytes: float = 0.25e9
    """Of each communicator's buffers."""
    further_communicators: int = 0
    """Beside one for each axis."""
    buffer_bytes: float = 0.0
    """Of fixed buffers, for reducing gradients and gathering weights."""
    keeps_stage_outputs: bool = False
    """Whether a rank keeps what it has handed on of every micro-batch in flight."""
    fragmentation: float = 0.04
    """Of what is allocated: memory that the allocator holds and cannot use."""
    tensor_overlap: float = 0.0
    """Of the tensor axis's communication, what is hidden behind products."""
    context_overlap: float = 1.0
    """Of the time of a ring's block of attention, what can hide the next block's way."""
    context_balanced: bool = True
    """Whether ranks of the context axis have equal shares of causal attention, rather than contiguous pieces of the sequence."""
    blocking_sends: bool = False
    """Whether a stage computes nothing while it hands a micro-batch to its neighbor."""
    expert_overlap: float = 0.0
    """Of the exchange of tokens, what can be hidden, as far as there is something to compute meanwhile."""
    data_overlap: float = 0.8
    """Of the time of backward, what can hide the reduction of gradients (and, ZeRO-3, of a block the gathering of the next)."""
    paired_overlap: float = 0.0
    """Of the exchange of tokens and of stages' inputs, what a schedule that pairs forward with backward hides."""
    time_scalar: float = 1.0
    """Measured over predicted time, fitted on runs of this stack."""
    tax_per_doubling: float = 0.006
    """What each doubling of the ranks beyond one node adds to the time in which ranks wait for each other; see
    ``phalanx.plan.step_cost.step_time.scale_tax``."""
    reduces_each_micro_batch: bool = False
    """Whether ZeRO-2 and ZeRO-3 reduce gradients after every micro-batch rather than after the last of a slot."""
    gathers_per_block: int = 1
    """Collectives in which a block's weights are gathered and its gradients reduced, where these overlap with computing."""
    shards: Literal["flat", "rows"] = "flat"
    """What data-parallel ranks divide: one flat buffer, or each parameter by whole rows (of stacked experts: whole experts)."""
    dispatch: Literal["once per node", "hybrid", "every copy"] = "every copy"
    """What of a token crosses the network to its experts: one copy for each node, which spreads it by a few multiprocessors
    (DeepEP) or at the full rate of its links ("hybrid": HybridEP), or one for each expert (an all-to-all)."""
    narrow_dispatch: bool = False
    """Whether tokens go to their experts in the format of products."""
    expert_streams: int = 0
    """Streams on which the products of a rank's experts start one after the other; 0 where one kernel computes all."""
    fused_permutation: bool = True
    """Whether tokens are brought into the order of experts, weighted and added up again by one kernel each."""
    weighs_inside: bool = False
    """Whether experts weight their rows before the last product, so that nothing of their results is kept for the weights' gradient."""
    narrow_gates: bool = False
    """Whether the inputs of experts' activation are kept in the format of products."""
    narrow_attention: bool = False
    """Whether attention multiplies in fp8 where other products are narrow."""
    cast_kernels: int = 0
    """Kernels that cast one expert's operand to a narrow format; 0 where one casts those of all experts."""
    cast_reads: int = 1
    """How often a cast reads its tensor: once more where the scale is found first, from the tensor itself (current scaling)."""
    wide_operands: bool = False
    """Whether operands of narrow products are kept as they were before the cast."""
    weighs_biases: bool = False
    """Whether experts' results have biases, which are weighted and added by one small kernel after the other, in fp32."""
    clamps_apart: bool = False
    """Whether kernels of their own clamp experts' gates and values before the activation."""
    pads_apart: bool = False
    """Whether copies bring experts' rows to a multiple that narrow products need, and their results back."""
    turns_apart: bool = False
    """Whether queries and keys are turned to their positions by one small kernel after the other rather than by one."""
    context_exchange: Literal["ring", "gather"] = "ring"
    """How keys and values come: block by block while attention computes with the last, or all before it begins."""
    launch_s: float = 20e-6
    """The host's time to launch a kernel, with its share of Python, autograd and casts; 0 where launches are recorded (CUDA
    graphs) or compiled into one program. Fitted on published runs of small mixtures, which wait for the host."""
    graphed: frozenset[str] = frozenset()
    """Parts of a layer (``phalanx.plan.workload.candidates.PARTS``) that CUDA graphs replay: the host launches them at no cost."""
    blocking_launches: bool = False
    """Whether the host waits for every kernel before it launches the next, as under CUDA_LAUNCH_BLOCKING=1."""
    slot_tree: bool = False
    """Whether gradients of slots are added up as a binary tree, whose open branches are held."""
    reduces_once: bool = False
    """Whether gradients are reduced over replicas, and below ZeRO-3 over shards, once a step rather than after each slot; below
    ZeRO-3 they are kept whole till then."""
    optimizer: OptimizerSpec | None = None
    """This project's own, whose state is known tensor by tensor; ``None`` where every parameter keeps what ``states`` says."""


_MEGATRON_STATES = (
    State("gradients", 4, 2),
    State("master weights", 4, 1, optimizer=True),
    State("moments", 8, 1, optimizer=True),
)
_MEGATRON_SCHEDULES = ("1f1b", "interleaved")

STACKS = {
    stack.name: stack
    for stack in (
        Stack(
            "phalanx",
            states=(
                State("master weights", 4, 2),
                State("gradients", 4, 2),
                State("moments", 8, 2, optimizer=True),
            ),
            zero_stages=(2, 3),
            schedules=("gpipe", "1f1b", "interleaved", "zbv", "dualpipev"),
            split="balanced",
            slot_gradient_bytes=4,
            unit_gradient_bytes=4,
            keeps_gathered_inputs=True,
            fused_pointwise=False,
            loss_chunk=2048,
            shards="rows",
            slot_tree=True,
        ),
        Stack(
            "megatron",
            _MEGATRON_STATES,
            zero_stages=(0, 1),
            schedules=_MEGATRON_SCHEDULES,
            split="even",
            accumulating_bytes=8,
            expert_streams=4,
            tensor_overlap=0.3,
            weighs_inside=True,
        ),
        Stack(
            "fsdp",
            states=(State("master weights", 4, 3), State("gradients", 4, 2), State("moments", 8, 1)),
            zero_stages=(3,),
            schedules=_MEGATRON_SCHEDULES,
            split="balanced",
            copies_unsharded=False,
            unit_gradient_bytes=4,
            keeps_gathered_inputs=True,
            reduces_each_micro_batch=True,
            wide_operands=True,
        ),
        Stack(
            "deepspeed",
            _MEGATRON_STATES,
            zero_stages=(0, 1),
            schedules=("1f1b",),
            split="even",
            accumulating_bytes=8,
            blocking_sends=True,
            buffer_bytes=2e9,
            context_bytes=1.65e9,
            further_communicators=5,
            embedding_gradient_bytes=2.0,
            keeps_stage_outputs=True,
            flash_attention=False,
            dropout=True,
            data_overlap=0.0,
        ),
        Stack(
            "megatron-2022",
            (
                State("gradients", 4, 2),
                State("master weights", 4, NEVER, optimizer=True),
                State("moments", 8, NEVER, optimizer=True),
            ),
            zero_stages=(0,),
            schedules=_MEGATRON_SCHEDULES,
            split="even",
            accumulating_bytes=8,
            flash_attention=False,
            dropout=True,
            data_overlap=0.0,
        ),
        Stack(
            "deepseek",
            states=(
                State("gradients", 4, 2),
                State("master weights", 4, 1, optimizer=True),
                State("moments", 4, 1, optimizer=True),
            ),
            zero_stages=(1,),
            schedules=("1f1b", "dualpipev"),
            split="even",
            accumulating_bytes=8,
            dispatch="once per node",
            narrow_dispatch=True,
            narrow_gates=True,
            paired_overlap=0.9,
            expert_overlap=0.75,
            tensor_overlap=0.3,
        ),
    )
}
"""Known stacks by name. Transformer Engine's grouped products run on four streams. Megatron Core weights rows at experts' activation
since 0.13 (commit 2659630, "Memory efficient token permutation"); DeepSeek-V3 keeps that activation's inputs in fp8 (arXiv
2412.19437, section 3.3.3); torchao's float8 products, which FSDP2's users take, keep their operand in bf16 (float8_linear.py). "megatron-2022" and "deepspeed" are without
flash attention, with dropout, as published then; DeepSpeed's buckets for reducing and gathering are of 5e8 elements of two bytes,
and its pipeline engine keeps a stage's outputs. Its context is that of an A100 with torch 1.11, 1573 MiB before any tensor
(bigscience, train/tr11-176B-ml/chronicles-prequel.md); beside the axes it has communicators of all ranks, of a model's ranks, of the tied
embedding, and of a stage with each neighbor."""


def stack_named(name: str) -> Stack:
    """The stack called ``name``; raises ``ValueError`` that lists those known."""
    try:
        return STACKS[name]
    except KeyError:
        raise ValueError(f"no stack {name!r} is known; take one of {', '.join(STACKS)}") from None


@dataclass(frozen=True)
class Workload:
    """What is to be computed, whoever computes it."""

    model: ModelSpec
    """Resolved: every dimension written out."""
    seq_len: int
    batch: int
    """Sequences of a step."""
    slots: int = 0
    """Pieces that a batch is reduced in, each with its own pass through the pipeline; 0 means one for each data-parallel
    rank."""
    imbalance: float = 1.1
    """Largest load of a rank's experts over the mean."""
    attended: float = 1.0
    """Of the scores of causal attention, those that are computed, as the mean of layers: fewer with sliding windows."""

    @property
    def counts(self) -> Counts:
        """Parameters and FLOP."""
        return _counts(self.model, self.seq_len)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.seq_len


@lru_cache(maxsize=64)
def _counts(model: ModelSpec, seq_len: int) -> Counts:
    return count(model, seq_len)


def workload_of(spec: RunSpec, *, keep_slots: bool = True) -> Workload:
    """The workload of a run file; without ``keep_slots``, slots are as the layout likes them."""
    model = resolve(spec.model, spec.data.vocab_size)
    slots = spec.train.slots if keep_slots else 0
    return Workload(model, spec.train.seq_len, spec.train.batch_size, slots)


def stack_of(spec: RunSpec) -> Stack:
    """This project's own stack as a run file sets it: the optimizer's state, format of computing, chunks of the loss."""
    stack = STACKS["phalanx"]
    compute = spec.precision.compute
    narrow = compute == "bf16" or (compute == "auto" and spec.runtime.device != "cpu")
    model = resolve(spec.model, spec.data.vocab_size)
    master, gradients, moments = stack.states
    moments = dataclasses.replace(moments, bytes=_mean_moment_bytes(spec.optimizer, model))
    return dataclasses.replace(
        stack,
        states=(master, gradients, moments),
        copy_bytes=2.0 if narrow else 4.0,
        copies_unsharded=narrow,
        gather_bytes=2.0 if narrow else 4.0,
        loss_chunk=spec.train.loss_chunk,
        fused_pointwise=spec.runtime.compile,
        tensor_overlap=0.5 if spec.parallel.async_tensor else 0.0,
        context_exchange="gather" if spec.parallel.context_mode == "allgather" else "ring",
        slot_tree=spec.train.reduction == "reproducible",
        reduces_once=spec.train.reduction == "fast",
        optimizer=spec.optimizer,
    )


@lru_cache(maxsize=64)
def _mean_moment_bytes(optimizer: OptimizerSpec, model: ModelSpec) -> float:
    """Bytes of the optimizer's state for each parameter, the mean of the whole model."""
    state = sum(state_bytes_by_name(optimizer, parameters(model)).values())
    return state / sum(parameter.numel for parameter in parameters(model))


@dataclass(frozen=True)
class Job:
    """A workload, by a stack, on a cluster: what every estimate is of."""

    workload: Workload
    stack: Stack
    cluster: Cluster
    profile: Profile
    modes: tuple[Recompute, ...] = RECOMPUTE
    """What a candidate's ``recompute`` indexes."""
