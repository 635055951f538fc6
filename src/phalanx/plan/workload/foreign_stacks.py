"""Stacks of other software, as data: ``phalanx plan --stack NAME``, and the base of what validation sets for published runs.

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

from dataclasses import replace

from phalanx.plan.workload.stacks import (
    NEVER,
    PHALANX,
    Allocator,
    AttentionPath,
    DataExchange,
    ExpertPath,
    KeptActivations,
    Kernels,
    Overlap,
    ParameterState,
    Stack,
    States,
)

_MEGATRON_STATES = (
    ParameterState("gradients", 4, 2),
    ParameterState("master weights", 4, 1, optimizer=True),
    ParameterState("moments", 8, 1, optimizer=True),
)
_MEGATRON_SCHEDULES = ("1f1b", "interleaved")
_ACCUMULATING = Kernels(accumulating_bytes=8)
_OF_2022 = replace(_ACCUMULATING, small_gradients=True, random_states=4, checkpoint_states=12)
_ATTENTION_OF_2022 = AttentionPath(flash=False, rotary=False)

MEGATRON = Stack(
    "megatron",
    States(_MEGATRON_STATES),
    zero_stages=(0, 1),
    schedules=_MEGATRON_SCHEDULES,
    split="even",
    overlap=Overlap(tensor=0.3),
    kernels=_ACCUMULATING,
    experts=ExpertPath(streams=4, weighs_inside=True),
)
FSDP = Stack(
    "fsdp",
    States(
        (
            ParameterState("master weights", 4, 3),
            ParameterState("gradients", 4, 2),
            ParameterState("moments", 8, 1),
        ),
        copies_unsharded=False,
        unit_gradient_bytes=4,
    ),
    zero_stages=(3,),
    schedules=_MEGATRON_SCHEDULES,
    split="balanced",
    data=DataExchange(reduces_each_micro_batch=True),
    kernels=Kernels(fused_pointwise=False),
    activations=KeptActivations(gathered_inputs=True, wide_operands=True),
)
DEEPSPEED = Stack(
    "deepspeed",
    States(_MEGATRON_STATES, embedding_gradient_bytes=2.0),
    zero_stages=(0, 1),
    schedules=("1f1b",),
    split="even",
    overlap=Overlap(data=0.0, blocking_sends=True),
    kernels=_OF_2022,
    attention=_ATTENTION_OF_2022,
    activations=KeptActivations(stage_outputs=True, dropout=True),
    allocator=Allocator(context_bytes=1.65e9, further_communicators=5, buffer_bytes=2e9),
)
MEGATRON_2022 = Stack(
    "megatron-2022",
    States(
        (
            ParameterState("gradients", 4, 2),
            ParameterState("master weights", 4, NEVER, optimizer=True),
            ParameterState("moments", 8, NEVER, optimizer=True),
        )
    ),
    zero_stages=(0,),
    schedules=_MEGATRON_SCHEDULES,
    split="even",
    overlap=Overlap(data=0.0, blocking_sends=True, scattered_sends=True),
    kernels=_OF_2022,
    attention=_ATTENTION_OF_2022,
    activations=KeptActivations(dropout=True),
)
DEEPSEEK = Stack(
    "deepseek",
    States(
        (
            ParameterState("gradients", 4, 2),
            ParameterState("master weights", 4, 1, optimizer=True),
            ParameterState("moments", 4, 1, optimizer=True),
        )
    ),
    zero_stages=(1,),
    schedules=("1f1b", "dualpipev"),
    split="even",
    overlap=Overlap(tensor=0.3, expert=0.75, paired=0.9),
    kernels=_ACCUMULATING,
    experts=ExpertPath(dispatch="once per node", narrow_dispatch=True, narrow_gates=True, weighs_inside=True),
)

STACKS = {stack.name: stack for stack in (PHALANX, MEGATRON, FSDP, DEEPSPEED, MEGATRON_2022, DEEPSEEK)}
"""Stacks that can be planned for, by name."""


def stack_on(stack: Stack, vendor: str) -> Stack:
    """``stack`` as it runs on accelerators of ``vendor``: XLA compiles whatever a TPU runs, and fuses its pointwise operations."""
    if vendor != "Google":
        return stack
    return replace(stack, kernels=replace(stack.kernels, fused_pointwise=True))
