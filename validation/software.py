"""Software of a published row: the planner's stack with the software's own habits, and the machines it ran on.

A row names its software (column ``software``); ``SOFTWARE`` says what follows from that. ``software_of_run`` joins it with the
row's recipe into the one stack that a row is planned with. Nothing here is fitted: fitted factors (``validation.factors``) are kept
by the names in this table.

Sources: gradients of NeMo's and Megatron-Bridge's performance recipes are reduced in bf16 (grad_reduce_in_fp32 = False; the
memory that NVIDIA/dgxc-benchmarking prints after a step agrees with no other size); Jean Zay's nodes have eight A100 and four
Omni-Path links of 100 Gb/s (BLOOM, arXiv 2211.05100, section 3.4); llm-foundry's and torchtitan's benchmarks reduce gradients as
their READMEs say; Megatron 2021 as arXiv 2104.04473.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.hardware.catalog import cluster, systems
from phalanx.hardware.cluster import Accelerator, Cluster, Fact
from phalanx.hardware.profiles import Profile, profile_of
from phalanx.plan.workload.foreign_stacks import FSDP, STACKS
from phalanx.plan.workload.stacks import Allocator, AttentionPath, Kernels, ParameterState, Stack
from validation.recipes import PerformanceRecipe, recipe_of, with_recipe
from validation.runs import Excluded, PublishedRun

Adjustment = Callable[[Stack, PublishedRun], Stack]
"""Sets what a software does unlike its stack, some of it depending on the row."""


@dataclass(frozen=True)
class Software:
    """Habits of one software, and defaults for what a row leaves open."""

    name: str
    stack: str
    """The planner's stack whose facts hold."""
    adjust: tuple[Adjustment, ...] = ()
    sequence_parallel: bool = True
    """True if tensor parallelism divides the sequence too, where the row does not say."""
    interleaves: bool = True
    """True if stages may have been interleaved, where the row does not say."""
    gradient_bytes: float = 0.0
    """Bytes per parameter of a gradient, kept and reduced, where it is not the stack's usual format."""
    compiled: bool = True
    """True if pointwise operations are fused, by a compiler or by hand, even where the row does not say so."""
    attention: Literal["", "flash-1", "flash-2"] = ""
    """Generation of fused attention, where it is older than the accelerator's profile supposes."""
    logit_bytes: float = 0.0
    """Bytes per token and vocabulary entry while the loss is computed, where they are not the stack's."""
    system: str = ""
    """A system of the catalog that the runs are known to have used."""
    fabric: Fact | None = None
    """Bytes per second of the network, where the runs' machines have another than the system."""
    micro_batch: int = 0
    """Sequences, where the row does not say and the software's recipes do."""
    accumulates: bool = True
    """True if a step may have several micro-batches without a pipeline; else a row's figure is of each device."""
    selects_products: bool = False
    """True if "selective" recomputation keeps every second product."""
    recomputes_activation: bool = False
    """True if the activation's output is recomputed beside the parts that the row names."""


@dataclass(frozen=True)
class RunSoftware:
    """Software, recipe and stack of one row."""

    software: Software
    recipe: PerformanceRecipe | None
    stack: Stack


def _with_states(stack: Stack, **sizes: float) -> Stack:
    """The stack with other bytes per parameter for states, by kind with underscores for blanks."""
    states = (
        replace(state, bytes=sizes.get(state.kind.replace(" ", "_"), state.bytes))
        for state in stack.states.kept
    )
    return replace(stack, states=replace(stack.states, kept=tuple(states)))


def _with_logits(stack: Stack, size: float) -> Stack:
    return replace(stack, loss=replace(stack.loss, logit_bytes=size))


def _bloom(stack: Stack, run: PublishedRun) -> Stack:
    """DeepSpeed as it trained BLOOM.

    CUDA_LAUNCH_BLOCKING=1 is set in its scripts (train/tr11-176B-ml/tr11-176B-ml.slurm): a hang had made it necessary.
    """
    stack = replace(stack, kernels=replace(stack.kernels, blocking_launches=True))
    if run.precision.startswith("bf16"):
        # BF16_Optimizer accumulates in fp32 beside the gradients that autograd leaves in bf16; each is copied to fp32 on its way.
        stack = _with_states(stack, gradients=6.0)
        return replace(stack, states=replace(stack.states, embedding_gradient_bytes=6.0))
    # The fp16 optimizer keeps gradients in fp16, and makes of a rank's share a flat copy and one in fp32 for the update.
    copies = ParameterState("gradients of the update", 6.0, 1, optimizer=True)
    states = _with_states(stack, gradients=2.0).states
    return replace(
        stack,
        states=replace(states, kept=(*states.kept, copies)),
        kernels=replace(stack.kernels, accumulating_bytes=4),
    )


_TE_LOSS_PASSES = (5.1, 5.1)
"""Transformer Engine's fused cross-entropy: on B200 its two kernels and the product with the gradient take 3.3 ps a score, forward
and backward (MooreThreads/SimuMax v1.2, configs/system/b200_bf16_ceperm.json: 8 bytes at 0.2795 of 8000 GiB/s)."""


def _bridge(stack: Stack, run: PublishedRun) -> Stack:
    """Megatron-Bridge: its executors set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.

    The recipes of DeepSeek-V3 and Moonlight use the precision-aware optimizer with moments in bf16 (recipes/deepseek,
    recipes/moonlight); it keeps of master weights the 16 bits that bf16 weights lack (store_param_remainders), except for
    weights in fp8, whose master weights are Megatron Core's own in fp32 (core/optimizer/optimizer_config.py).

    Its tables call current scaling FP8 or FP8-CS. A cast then takes four kernels: the maximum is set to zero and found, then the
    scale, then the cast (Float8CurrentScalingQuantizer::quantize_impl; pytorch/csrc/extensions/cast.cpp, v2.9).
    """
    stack = replace(
        stack,
        allocator=replace(stack.allocator, fragmentation=0.01),
        loss=replace(stack.loss, passes=_TE_LOSS_PASSES),
    )
    if re.match(r"deepseek|moonlight", run.model, re.IGNORECASE):
        stack = _with_states(
            stack, moments=4.0, master_weights=2.0 if run.precision.startswith("bf16") else 4.0
        )
    if run.precision not in ("fp8", "fp8-cs"):
        return stack
    return replace(stack, kernels=replace(stack.kernels, cast_kernels=4, cast_reads=2))


def _megatron_core(stack: Stack, run: PublishedRun) -> Stack:
    """Megatron Core with Transformer Engine, whose multi_tensor_quantize_impl casts one expert after the other unless scaling is
    delayed."""
    if re.match(r"deepseek|kimi", run.model, re.IGNORECASE):
        # 61 layers: get_deepseek_v3_pipeline_layout and that of Kimi (Megatron-Bridge) leave the last stage the fewest.
        stack = replace(stack, split="last")
    if not re.search(r"mx|block|nvfp4", run.precision):
        return stack
    return replace(stack, kernels=replace(stack.kernels, cast_kernels=1))


def _weighs_afterwards(stack: Stack, _run: PublishedRun) -> Stack:
    """Megatron Core before 0.13."""
    return replace(stack, experts=replace(stack.experts, weighs_inside=False))


def _permutes_apart(stack: Stack, _run: PublishedRun) -> Stack:
    """Megatron Core before 0.11."""
    return replace(stack, experts=replace(stack.experts, fused_permutation=False))


def _torchtitan(stack: Stack, run: PublishedRun) -> Stack:
    """torchtitan: its default rotate method is all-gather. How times grow with the ranks says that pieces were contiguous."""
    stack = replace(stack, attention=AttentionPath(exchange="gather", balanced=False))
    # It compiles the loss too since January 2025.
    return _with_logits(stack, _FUSED_LOSS) if run.compiled == "model and loss" else stack


def _nanotron(stack: Stack, run: PublishedRun) -> Stack:
    """nanotron as in its scaling benchmarks: stages are cut by cost, and gradients accumulated in fp32.

    Those that autograd leaves in bf16 meet a further micro-batch's activations only where there is one. That gathered inputs are
    kept is what the memory of its runs says, over all degrees of tensor parallelism.
    """
    activations = replace(stack.activations, gathered_inputs=True)
    stack = replace(stack, split="balanced", activations=activations)
    further = (run.pp or 1) > 1 or run.global_batch_seqs != (run.dp or 1) * (run.micro_batch or 1)
    return _with_states(stack, gradients=6.0) if further else stack


_EAGER_LOSS = 14.0
"""bf16 scores, their fp32 copy, its logarithm of softmax and gradient."""
_IN_PLACE_LOSS = 10.0
"""bf16 scores, their fp32 copy less the maximum, and for a moment the copy before (nanotron's sharded_cross_entropy)."""
_FUSED_LOSS = 4.0
"""Scores and gradient in bf16: flash-attention's fused cross-entropy, llm-foundry's default, and Transformer Engine's, which all
performance recipes of Megatron-Bridge set (cross_entropy_fusion_impl = "te")."""
_JEAN_ZAY = Fact(
    6.25e9, "BLOOM, arXiv 2211.05100, section 3.4: four Omni-Path links of 100 Gb/s for eight A100"
)

SOFTWARE = {
    software.name: software
    for software in (
        Software("llm-foundry", "fsdp", compiled=False, attention="flash-1", logit_bytes=_FUSED_LOSS),
        Software(
            "torchtitan",
            "fsdp",
            (_torchtitan,),
            compiled=False,
            attention="flash-2",
            logit_bytes=_EAGER_LOSS,
            selects_products=True,
        ),
        Software("maxtext", "xla", accumulates=False),
        Software(
            "nanotron",
            "megatron",
            (_nanotron,),
            interleaves=False,
            compiled=False,
            attention="flash-2",
            logit_bytes=_IN_PLACE_LOSS,
        ),
        Software(
            "bigscience", "deepspeed", (_bloom,), sequence_parallel=False, interleaves=False, fabric=_JEAN_ZAY
        ),
        Software("mt-nlg", "deepspeed", sequence_parallel=False, interleaves=False, system="selene"),
        Software("deepspeed-zero3", "deepspeed-zero3", sequence_parallel=False),
        Software("megatron-2022", "megatron-2022", system="selene"),
        Software("megatron-2021", "megatron-2022", sequence_parallel=False, system="selene"),
        Software("megatron-2020", "megatron-2022", sequence_parallel=False),
        Software("vtrain", "megatron-2022", sequence_parallel=False, system="a100-4nic"),
        Software("megascale", "megatron"),
        # SwiGLU's output is recomputed too, though no table says so (arXiv 2412.19437, section 3.3.2).
        Software("deepseek", "deepseek", recomputes_activation=True),
        Software("simumax", "megatron"),
        Software("parallel-folding", "megatron", (_weighs_afterwards, _permutes_apart), micro_batch=1),
        Software("nemo", "megatron", (_weighs_afterwards,), interleaves=False, gradient_bytes=2.0),
        Software(
            "megatron-bridge",
            "megatron",
            (_bridge, _megatron_core),
            interleaves=False,
            gradient_bytes=2.0,
            logit_bytes=_FUSED_LOSS,
        ),
        Software("megatron-core", "megatron", (_megatron_core,)),
    )
}
"""Software by name."""

_PARAMETERS_OF_A_BLOCK = 12
"""Parameters of a GPT block: four matrices, their biases, and two norms; DeepSpeed's ZeRO-3 gathers each for itself (arXiv
1910.02054)."""
_STACKS = {
    **STACKS,
    # XLA plans its memory ahead: no allocator that fragments, no communicators beside the program. Each matrix's gradient is
    # reduced as soon as it is there, and the loss is one fused loop.
    "xla": _with_logits(
        replace(
            FSDP,
            name="xla",
            states=replace(FSDP.states, unit_gradient_bytes=0.0),
            kernels=Kernels(launch_s=0.0),
            allocator=Allocator(context_bytes=0.3e9, communicator_bytes=0.0, fragmentation=0.0),
        ),
        4.0,
    ),
    "deepspeed-zero3": replace(
        FSDP,
        name="deepspeed-zero3",
        data=replace(FSDP.data, reduce_bytes=2.0, gathers_per_block=_PARAMETERS_OF_A_BLOCK),
        attention=AttentionPath(flash=False),
        activations=replace(FSDP.activations, dropout=True),
    ),
}

_ATTENTION = {
    ("flash-1", "a"): (0.40, 0.30),
    ("flash-1", "h"): (0.23, 0.17),
    ("flash-2", "h"): (0.34, 0.34),
}
"""Shares of the peak, forward and backward, by generation and first letter of the accelerator: arXiv 2307.08691, section 1
(30-50 % and 25-35 % on A100 before, 335 TFLOP/s of an H100 after); the first on an H100 is assumed in the same proportion."""

_SYSTEMS = (
    (r"h100-96|h100.*96gb", "h100-96gb"),
    (r"h100.*pcie", "h100-pcie"),
    (r"a100.*40", "a100-40"),
    (r"gb300", "gb300-nvl72"),
    (r"gb200", "gb200-nvl72"),
    (r"tpu[- ]?v5p", "tpu-v5p"),
    (r"tpu[- ]?v5e", "tpu-v5e"),
    (r"tpu[- ]?v6e", "tpu-v6e"),
    (r"tpu[- ]?v4", "tpu-v4"),
    (r"(?<![a-z])(h100|h200|h800|h20|b200|b300|a100|v100|mi300x|mi325x)\b", ""),
)


def software_of_run(run: PublishedRun) -> RunSoftware:
    """Software, recipe and stack of a row. Raises ``Excluded`` for a software that the table does not have."""
    software = SOFTWARE.get(run.software)
    if software is None:
        raise Excluded(f"no software {run.software!r} is known: write one of {', '.join(SOFTWARE)}")
    recipe = recipe_of(run)
    return RunSoftware(software, recipe, _stack(run, software, recipe))


def _stack(run: PublishedRun, software: Software, recipe: PerformanceRecipe | None) -> Stack:
    stack = _STACKS[software.stack]
    if run.zero == 3 and 3 not in stack.zero_stages:
        stack = _STACKS["fsdp"]
    if run.reduce_precision == "bf16":
        stack = replace(stack, data=replace(stack.data, reduce_bytes=2.0))
    if software.gradient_bytes and stack.name != "fsdp":
        stack = _with_states(stack, gradients=software.gradient_bytes)
        stack = replace(stack, data=replace(stack.data, reduce_bytes=software.gradient_bytes))
        if stack.kernels.accumulating_bytes:
            kernels = replace(stack.kernels, accumulating_bytes=2 * software.gradient_bytes)
            stack = replace(stack, kernels=kernels)
    if software.logit_bytes:
        stack = _with_logits(stack, software.logit_bytes)
    for adjust in software.adjust:
        stack = adjust(stack, run)
    stack = with_recipe(stack, run, recipe)
    fused = software.compiled or bool(run.compiled)
    return stack if fused else replace(stack, kernels=replace(stack.kernels, fused_pointwise=False))


def profile_of_run(accelerator: Accelerator, software: Software, run: PublishedRun) -> Profile:
    """The accelerator's constants, with the attention that the software had and the products of the row's format."""
    profile = profile_of(accelerator)
    blocks = profile.constants.matmul.get("fp8_block")
    if blocks and re.search(r"block|fine-grained", run.precision):
        matmul = {**profile.constants.matmul, "fp8": blocks}
        profile = replace(profile, constants=replace(profile.constants, matmul=matmul))
    shares = _ATTENTION.get((software.attention, accelerator.key[:1]))
    if shares is None:
        return profile
    attention = replace(profile.constants.attention, forward=shares[0], backward=shares[1], half_tokens=0.0)
    return replace(profile, constants=replace(profile.constants, attention=attention))


def cluster_of_run(run: PublishedRun, software: Software) -> Cluster:
    """The machines that a row names. Raises ``Excluded`` if the catalog does not have them."""
    gpu = run.gpu.lower()
    found = next(((match, key) for pattern, key in _SYSTEMS if (match := re.search(pattern, gpu))), None)
    if found is None:
        raise Excluded(f"the catalog has no accelerator {run.gpu!r}")
    if not run.gpus:
        raise Excluded("does not state how many accelerators ran")
    match, key = found
    key = key or match[1]
    if software.system and systems()[software.system].accelerator.key == systems()[key].accelerator.key:
        key = software.system
    machines = cluster(f"{key}:{run.gpus}")
    if software.fabric:
        machines = replace(machines, fabric=replace(machines.fabric, bytes_per_s=software.fabric))
    if run.slices:
        machines = replace(machines, domain=replace(machines.domain, size=run.gpus // run.slices))
    return machines
