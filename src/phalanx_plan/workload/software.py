"""Software that has trained published runs: stacks of other software as data, and each software's own habits.

``SOFTWARE`` lists the differences of each from its stack; ``stack_of_software`` applies them in the circumstances of one run. Published
runs are judged with these facts (``python -m validation``), and ``phalanx plan layout --stack NAME`` plans with the same. Nothing here is
fitted: fitted factors (``phalanx_plan.evidence``) are kept by the names in this table.

Sources: gradients of NeMo's and Megatron-Bridge's performance recipes are reduced in bf16 (grad_reduce_in_fp32 = False; the
memory that NVIDIA/dgxc-benchmarking prints after a step agrees with no other size); llm-foundry's and torchtitan's benchmarks
reduce gradients as in their READMEs; Megatron 2021 as arXiv 2104.04473.

Transformer Engine's grouped products run on four streams. Megatron Core weights rows at experts' activation since 0.13 (commit
2659630, "Memory efficient token permutation"); DeepSeek-V3 keeps that activation's inputs in fp8 (arXiv 2412.19437, section 3.3.3), and its kernel of the backward pass makes the weighted product
and the weights' gradient from these (deepseek-ai/TileKernels, tests/quant/test_swiglu_backward_and_per_token_cast.py);
torchao's float8 products, which FSDP2's users take, keep their operand in bf16 (float8_linear.py). "megatron-2022" and "deepspeed"
are without flash attention, with dropout, as published then. Megatron-LM's sends then block: p2p_communication.py waits for
every request and then for the device (torch.cuda.synchronize). Their layers, and Megatron-DeepSpeed's, which are the same, have biases,
dropout and learned positions (megatron/model/transformer.py, 55ba1f7b of May 2022): of a bias, and of a norm's weight and bias, backward takes
a sum over rows, and a kernel adds each to main_grad (megatron/model/distributed.py); apex's norm takes three kernels backward; the bias of
queries, keys and values is added apart. Dropout of attention forks the state of random numbers by four calls, and a checkpointed layer gets and sets
three states four times (megatron/mpu/random.py). PyTorch, which FSDP is of, runs one kernel for each pointwise
operation unless a model is compiled. DeepSpeed's buckets for reducing and gathering are of 5e8 elements of
two bytes, and its pipeline engine keeps a stage's outputs. Its context is that of an A100 with torch 1.11, 1573 MiB before any tensor
(bigscience, train/tr11-176B-ml/chronicles-prequel.md); beside the axes it has communicators of all ranks, of a model's ranks, of
the tied embedding, and of a stage with each neighbor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.hardware.profile import Profile
from phalanx_plan.workload import stacks
from phalanx_plan.workload.recipes import Circumstances, PerformanceRecipe, with_recipe

# Stacks: ``phalanx plan layout --stack NAME``, and the base of what validation sets for published runs.


_MEGATRON_STATES = (
    stacks.ParameterState("gradients", 4, 2),
    stacks.ParameterState("master weights", 4, 1, optimizer=True),
    stacks.ParameterState("moments", 8, 1, optimizer=True),
)
_MEGATRON_SCHEDULES = ("1f1b", "interleaved")
_ACCUMULATING = stacks.KernelFacts(accumulating_bytes=8)
_OF_2022 = replace(_ACCUMULATING, small_gradients=True, random_states=4, checkpoint_states=12)
_ATTENTION_OF_2022 = stacks.AttentionPath(flash=False, rotary=False)

MEGATRON = stacks.Stack(
    "megatron",
    stacks.States(_MEGATRON_STATES),
    zero_stages=(0, 1),
    schedules=_MEGATRON_SCHEDULES,
    split="even",
    overlap=stacks.Overlap(tensor=0.3),
    kernels=_ACCUMULATING,
    experts=stacks.ExpertPath(streams=4, weighs_inside=True),
)
FSDP = stacks.Stack(
    "fsdp",
    stacks.States(
        (
            stacks.ParameterState("master weights", 4, 3),
            stacks.ParameterState("gradients", 4, 2),
            stacks.ParameterState("moments", 8, 1),
        ),
        copies_unsharded=False,
        unit_gradient_bytes=4,
    ),
    zero_stages=(3,),
    schedules=_MEGATRON_SCHEDULES,
    split="balanced",
    data=stacks.DataExchange(reduces_each_micro_batch=True),
    kernels=stacks.KernelFacts(fused_pointwise=False),
    activations=stacks.KeptActivations(gathered_inputs=True, wide_operands=True),
)
DEEPSPEED = stacks.Stack(
    "deepspeed",
    stacks.States(_MEGATRON_STATES, embedding_gradient_bytes=2.0),
    zero_stages=(0, 1),
    schedules=("1f1b",),
    split="even",
    overlap=stacks.Overlap(data=0.0, blocking_sends=True),
    kernels=_OF_2022,
    attention=_ATTENTION_OF_2022,
    activations=stacks.KeptActivations(stage_outputs=True, dropout=True),
    allocator=stacks.Allocator(context_bytes=1.65e9, further_communicators=5, buffer_bytes=2e9),
)
MEGATRON_2022 = stacks.Stack(
    "megatron-2022",
    stacks.States(
        (
            stacks.ParameterState("gradients", 4, 2),
            stacks.ParameterState("master weights", 4, stacks.NEVER, optimizer=True),
            stacks.ParameterState("moments", 8, stacks.NEVER, optimizer=True),
        )
    ),
    zero_stages=(0,),
    schedules=_MEGATRON_SCHEDULES,
    split="even",
    overlap=stacks.Overlap(data=0.0, blocking_sends=True, scattered_sends=True),
    kernels=_OF_2022,
    attention=_ATTENTION_OF_2022,
    activations=stacks.KeptActivations(dropout=True),
)
DEEPSEEK = stacks.Stack(
    "deepseek",
    stacks.States(
        (
            stacks.ParameterState("gradients", 4, 2),
            stacks.ParameterState("master weights", 4, 1, optimizer=True),
            stacks.ParameterState("moments", 4, 1, optimizer=True),
        )
    ),
    zero_stages=(1,),
    schedules=("1f1b", "dualpipev"),
    split="even",
    overlap=stacks.Overlap(tensor=0.3, expert=0.75, paired=0.9),
    kernels=_ACCUMULATING,
    experts=stacks.ExpertPath(
        dispatch="once per node", narrow_dispatch=True, narrow_gates=True, weighs_inside=True
    ),
)

STACKS = {stack.name: stack for stack in (stacks.PHALANX, MEGATRON, FSDP, DEEPSPEED, MEGATRON_2022, DEEPSEEK)}
"""Stacks that can be planned for, by name."""


def stack_on(stack: stacks.Stack, vendor: str) -> stacks.Stack:
    """Return ``stack`` as it runs on accelerators of ``vendor``: XLA compiles whatever a TPU runs, and fuses its pointwise operations."""
    if vendor != "Google":
        return stack
    return replace(stack, kernels=replace(stack.kernels, fused_pointwise=True))


# Software.


Adjustment = Callable[[stacks.Stack, Circumstances], stacks.Stack]
"""Sets what a software does unlike its stack, some of it depending on the run."""


@dataclass(frozen=True)
class TrainingSoftware:
    """One software: its stack, and its differences from it."""

    name: str
    stack: str
    """The planner's stack whose facts hold."""
    adjust: tuple[Adjustment, ...] = ()
    gradient_bytes: float = 0.0
    """Bytes per parameter of a gradient, kept and reduced, where it is not the stack's usual format."""
    compiled: bool = True
    """True if pointwise operations are fused, by a compiler or by hand, even if the row does not state it."""
    attention: Literal["", "flash-1", "flash-2"] = ""
    """Generation of fused attention, where it is older than the accelerator's profile supposes."""
    logit_bytes: float = 0.0
    """Bytes per token and vocabulary entry while the loss is computed, where they are not the stack's."""
    scales_blocks: bool = False
    """True if its products in fp8 have a scale for each block of 128."""
    recompute: str = ""
    """Parts of a layer that it computes again in backward by a mode of its own, joined by "+"."""


def _with_states(stack: stacks.Stack, **sizes: float) -> stacks.Stack:
    """The stack with other bytes per parameter for states, by kind with underscores for blanks."""
    states = (
        replace(state, bytes=sizes.get(state.kind.replace(" ", "_"), state.bytes))
        for state in stack.states.kept
    )
    return replace(stack, states=replace(stack.states, kept=tuple(states)))


def _with_logits(stack: stacks.Stack, size: float) -> stacks.Stack:
    return replace(stack, loss=replace(stack.loss, logit_bytes=size))


def _bloom(stack: stacks.Stack, run: Circumstances) -> stacks.Stack:
    """Set how DeepSpeed trained BLOOM: blocking launches, and gradient bytes that depend on the format.

    CUDA_LAUNCH_BLOCKING=1 is set in its scripts (train/tr11-176B-ml/tr11-176B-ml.slurm): a hang had made it
    necessary.
    """
    stack = replace(stack, kernels=replace(stack.kernels, blocking_launches=True))
    if run.precision.startswith("bf16"):
        # BF16_Optimizer accumulates in fp32 beside the gradients that autograd leaves in bf16; each is copied to fp32 on its way.
        stack = _with_states(stack, gradients=6.0)
        return replace(stack, states=replace(stack.states, embedding_gradient_bytes=6.0))
    # The fp16 optimizer keeps gradients in fp16, and makes of a rank's share a flat copy and one in fp32 for the update.
    copies = stacks.ParameterState("gradients of the update", 6.0, 1, optimizer=True)
    states = _with_states(stack, gradients=2.0).states
    return replace(
        stack,
        states=replace(states, kept=(*states.kept, copies)),
        kernels=replace(stack.kernels, accumulating_bytes=4),
    )


_TE_LOSS_PASSES = (5.1, 5.1)
"""Transformer Engine's fused cross-entropy: on B200 its two kernels and the product with the gradient take 3.3 ps a score, forward
and backward (MooreThreads/SimuMax v1.2, configs/system/b200_bf16_ceperm.json: 8 bytes at 0.2795 of 8000 GiB/s)."""


def _bridge(stack: stacks.Stack, run: Circumstances) -> stacks.Stack:
    """Set Megatron-Bridge's 1 % of fragmentation and fused loss; by model and format also its states and casts.

    Its executors set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. The recipes of DeepSeek-V3 and Moonlight use
    the precision-aware optimizer with moments in bf16 (recipes/deepseek, recipes/moonlight). It keeps of master
    weights the 16 bits that bf16 weights lack (store_param_remainders), except for weights in fp8, whose master
    weights are Megatron Core's own in fp32 (core/optimizer/optimizer_config.py).

    Its tables call current scaling FP8 or FP8-CS. A cast then takes four kernels: the maximum is set to zero and
    found, then the scale, then the cast (Float8CurrentScalingQuantizer::quantize_impl;
    pytorch/csrc/extensions/cast.cpp, v2.9).
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


def _megatron_core(stack: stacks.Stack, run: Circumstances) -> stacks.Stack:
    """Set how Megatron Core with Transformer Engine runs: DeepSeek and Kimi have the shortest stage last; block
    formats cast in one kernel.

    Its multi_tensor_quantize_impl casts one expert after the other unless scaling is delayed.
    """
    if re.match(r"deepseek|kimi", run.model, re.IGNORECASE):
        # 61 layers: get_deepseek_v3_pipeline_layout and that of Kimi (Megatron-Bridge) leave the last stage the fewest.
        stack = replace(stack, split="last")
    if not re.search(r"mx|block|nvfp4", run.precision):
        return stack
    return replace(stack, kernels=replace(stack.kernels, cast_kernels=1))


def _weighs_afterwards(stack: stacks.Stack, _run: Circumstances) -> stacks.Stack:
    """Weigh experts' results after their products, as Megatron Core before 0.13."""
    return replace(stack, experts=replace(stack.experts, weighs_inside=False))


def _permutes_apart(stack: stacks.Stack, _run: Circumstances) -> stacks.Stack:
    """Permute tokens in kernels that are not fused, as Megatron Core before 0.11."""
    return replace(stack, experts=replace(stack.experts, fused_permutation=False))


def _torchtitan(stack: stacks.Stack, run: Circumstances) -> stacks.Stack:
    """Set torchtitan's gathered, contiguous context parallelism, and a fused loss if the run compiled it.

    Its default rotate method is all-gather. Its times by number of ranks show that pieces were contiguous.
    """
    stack = replace(stack, attention=stacks.AttentionPath(exchange="gather", balanced=False))
    # It compiles the loss too since January 2025.
    return _with_logits(stack, _FUSED_LOSS) if run.compiled == "model and loss" else stack


def _nanotron(stack: stacks.Stack, run: Circumstances) -> stacks.Stack:
    """Set nanotron's stages cut by cost and kept gathered inputs, and 6 bytes of gradients with a pipeline or
    accumulation.

    The gradients that autograd leaves in bf16 exist beside a further micro-batch's activations only if there is one.
    The memory of its runs shows, over all degrees of tensor parallelism, that gathered inputs are kept.
    """
    activations = replace(stack.activations, gathered_inputs=True)
    stack = replace(stack, split="balanced", activations=activations)
    further = run.pipeline > 1 or run.accumulates
    return _with_states(stack, gradients=6.0) if further else stack


_EAGER_LOSS = 14.0
"""bf16 scores, their fp32 copy, its logarithm of softmax and gradient."""
_IN_PLACE_LOSS = 10.0
"""bf16 scores, their fp32 copy less the maximum, and for a moment the copy before (nanotron's sharded_cross_entropy)."""
_FUSED_LOSS = 4.0
"""Scores and gradient in bf16: flash-attention's fused cross-entropy, llm-foundry's default, and Transformer Engine's, which all
performance recipes of Megatron-Bridge set (cross_entropy_fusion_impl = "te")."""
SOFTWARE = {
    software.name: software
    for software in (
        TrainingSoftware("llm-foundry", "fsdp", compiled=False, attention="flash-1", logit_bytes=_FUSED_LOSS),
        TrainingSoftware(
            "torchtitan",
            "fsdp",
            (_torchtitan,),
            compiled=False,
            attention="flash-2",
            logit_bytes=_EAGER_LOSS,
        ),
        TrainingSoftware("maxtext", "xla"),
        TrainingSoftware(
            "nanotron",
            "megatron",
            (_nanotron,),
            compiled=False,
            attention="flash-2",
            logit_bytes=_IN_PLACE_LOSS,
        ),
        TrainingSoftware("bigscience", "deepspeed", (_bloom,)),
        TrainingSoftware("mt-nlg", "deepspeed"),
        TrainingSoftware("deepspeed-zero3", "deepspeed-zero3"),
        TrainingSoftware("megatron-2022", "megatron-2022"),
        TrainingSoftware("megatron-2021", "megatron-2022"),
        TrainingSoftware("megatron-2020", "megatron-2022"),
        TrainingSoftware("vtrain", "megatron-2022"),
        TrainingSoftware("megascale", "megatron"),
        # arXiv 2412.19437, sections 3.2.3 and 3.3.2
        TrainingSoftware(
            "deepseek",
            "deepseek",
            scales_blocks=True,
            recompute="norm+latent_up+activation+expert_activation",
        ),
        # xformers' kernel of SwiGLU keeps its inputs and makes the product of gates again (ops/swiglu_op.py).
        TrainingSoftware("llama-3", "fsdp-accumulating", compiled=False, recompute="activation"),
        TrainingSoftware("simumax", "megatron"),
        TrainingSoftware("parallel-folding", "megatron", (_weighs_afterwards, _permutes_apart)),
        TrainingSoftware("nemo", "megatron", (_weighs_afterwards,), gradient_bytes=2.0),
        TrainingSoftware(
            "megatron-bridge",
            "megatron",
            (_bridge, _megatron_core),
            gradient_bytes=2.0,
            logit_bytes=_FUSED_LOSS,
        ),
        TrainingSoftware("megatron-core", "megatron", (_megatron_core,)),
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
            kernels=stacks.KernelFacts(launch_s=0.0),
            allocator=stacks.Allocator(context_bytes=0.3e9, communicator_bytes=0.0, fragmentation=0.0),
        ),
        4.0,
    ),
    # Llama 3's, by its report (arXiv 2407.21783, section 3.3.2): FSDP whose weights stay gathered after forward, gradients summed over
    # micro-batches in fp32 and reduced in fp32, stages of one layer each that leave first and last a layer less, and keys and
    # values gathered. The report does not state what else PyTorch fuses or hides.
    "fsdp-accumulating": replace(
        FSDP,
        name="fsdp-accumulating",
        states=stacks.States(
            (
                stacks.ParameterState("gradients", 4, stacks.NEVER),
                stacks.ParameterState("master weights", 4, 1),
                stacks.ParameterState("moments", 8, 1),
            )
        ),
        zero_stages=(1,),
        split="even",
        data=stacks.DataExchange(),
        attention=stacks.AttentionPath(exchange="gather"),
        activations=stacks.KeptActivations(),
    ),
    "deepspeed-zero3": replace(
        FSDP,
        name="deepspeed-zero3",
        data=replace(FSDP.data, reduce_bytes=2.0, gathers_per_block=_PARAMETERS_OF_A_BLOCK),
        kernels=stacks.KernelFacts(),
        attention=stacks.AttentionPath(flash=False),
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


def stack_of_software(
    software: TrainingSoftware, run: Circumstances, recipe: PerformanceRecipe | None
) -> stacks.Stack:
    """Return the stack of ``software`` in these circumstances, as its ``recipe`` sets it if it follows one.

    ZeRO-3 of a stack without it is FSDP. Bytes of reduction, gradients (except for FSDP's) and logits are the
    software's. Its own adjustments come before the recipe; fusion of pointwise operations is set last.
    """
    stack = _STACKS[software.stack]
    if run.zero == 3 and 3 not in stack.zero_stages:
        stack = _STACKS["fsdp"]
    if run.narrow_reduction:
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
    return replace(stack, kernels=replace(stack.kernels, fused_pointwise=fused))


def profile_of_software(profile: Profile, software: TrainingSoftware, precision: str) -> Profile:
    """Return an accelerator's constants with the software's attention, and with block-scaled fp8 products if it
    scales blocks.

    Constants that were not measured stay as they are.
    """
    blocks = profile.constants.matmul.get("fp8_block")
    if blocks and (software.scales_blocks or re.search(r"block|fine-grained", precision)):
        matmul = {**profile.constants.matmul, "fp8": blocks}
        profile = replace(profile, constants=replace(profile.constants, matmul=matmul))
    shares = _ATTENTION.get((software.attention, profile.accelerator.key[:1]))
    if shares is None:
        return profile
    attention = replace(profile.constants.attention, forward=shares[0], backward=shares[1], half_tokens=0.0)
    return replace(profile, constants=replace(profile.constants, attention=attention))
