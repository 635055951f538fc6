"""Which software a published row ran, as facts: the planner's stack, what its defaults are, and the machines it ran on.

A row names its source, not its software's habits. This table maps the one to the other, first match first; a source that no
entry knows is taken for Megatron Core, or for FSDP where the row says ZeRO-3. Nothing here is fitted: factors that are
(``validation.factors``) are kept by the names in this table.

Sources: gradients of NeMo's and Megatron-Bridge's performance recipes are reduced in bf16 (grad_reduce_in_fp32 = False; the
memory that NVIDIA/dgxc-benchmarking prints after a step agrees with no other size); Jean Zay's nodes have eight A100 and four Omni-Path links of 100 Gb/s (BLOOM, arXiv 2211.05100, section 3.4);
llm-foundry's and torchtitan's benchmarks reduce gradients as their READMEs say; Megatron 2021 as arXiv 2104.04473.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.hardware.catalog import cluster, systems
from phalanx.hardware.cluster import Accelerator, Cluster, Fact
from phalanx.hardware.profiles import Profile, profile_of
from phalanx.plan.workload.stacks import STACKS, Stack, State
from validation.recipes import with_recipe
from validation.runs import Excluded, PublishedRun


@dataclass(frozen=True)
class Software:
    """What trained, as far as a published row leaves it open."""

    name: str
    pattern: str
    """A regular expression that is sought in the row's source and notes."""
    stack: str
    """The planner's stack whose facts hold."""
    sequence_parallel: bool = True
    """Whether tensor parallelism divides the sequence too, where the row does not say."""
    interleaves: bool = True
    """Whether stages may have been interleaved, where the row does not say."""
    gradient_bytes: float = 0.0
    """Of a parameter, kept and reduced, where it is not the stack's usual format."""
    compiled: bool = True
    """Whether pointwise operations are fused, by a compiler or by hand, where the row does not say that they are."""
    attention: Literal["", "flash-1", "flash-2"] = ""
    """The generation of fused attention, where it is older than the accelerator's profile supposes."""
    logit_bytes: float = 0.0
    """Of a token's score while the loss is computed, where it is not as the stack supposes."""
    system: str = ""
    """A system of the catalog that the runs are known to have used."""
    micro_batch: int = 0
    """Sequences, where the row does not say and the software's recipes do."""
    accumulates: bool = True
    """Whether a step may have several micro-batches where there is no pipeline; else a row's figure is of each device."""
    unfolded_experts: str = ""
    """A regular expression for the names of rows whose experts are divided as the dense layers are."""


_EAGER_LOSS = 14.0
"""bf16 scores, their fp32 copy, its logarithm of softmax and gradient."""
_IN_PLACE_LOSS = 10.0
"""bf16 scores, their fp32 copy less the maximum, and for a moment the copy before (nanotron's sharded_cross_entropy)."""
_FUSED_LOSS = 4.0
"""Scores and gradient in bf16: flash-attention's fused cross-entropy, llm-foundry's default, and Transformer Engine's, which all
performance recipes of Megatron-Bridge set (cross_entropy_fusion_impl = "te")."""
_TE_LOSS_PASSES = (5.1, 5.1)
"""Of Transformer Engine's fused cross-entropy: on B200 its two kernels and the product with the gradient take 3.3 ps a score, forward
and backward (MooreThreads/SimuMax v1.2, configs/system/b200_bf16_ceperm.json: 8 bytes at 0.2795 of 8000 GiB/s)."""
_2021 = {"stack": "megatron-2022", "sequence_parallel": False}

SOFTWARE = (
    Software(
        "llm-foundry", r"llm-foundry", "fsdp", compiled=False, attention="flash-1", logit_bytes=_FUSED_LOSS
    ),
    Software(
        "torchtitan", r"torchtitan", "fsdp", compiled=False, attention="flash-2", logit_bytes=_EAGER_LOSS
    ),
    Software("maxtext", r"[Mm]ax[Tt]ext|tpu-recipes|gpu-recipes", "xla", accumulates=False),
    Software(
        "nanotron",
        r"nanotron",
        "megatron",
        interleaves=False,
        compiled=False,
        attention="flash-2",
        logit_bytes=_IN_PLACE_LOSS,
    ),
    Software("bigscience", r"bigscience|BLOOM", "deepspeed", sequence_parallel=False, interleaves=False),
    Software(
        "mt-nlg",
        r"2201\.11990|MT-NLG",
        "deepspeed",
        sequence_parallel=False,
        interleaves=False,
        system="selene",
    ),
    Software(
        "deepspeed-zero3", r"DeepSpeed ZeRO-3|deepspeed-azure", "deepspeed-zero3", sequence_parallel=False
    ),
    Software("megatron-2022", r"2205\.05198|Korthikanti", "megatron-2022", system="selene"),
    Software("megatron-2021", r"2104\.04473|cases_april2021", system="selene", **_2021),  # type: ignore[arg-type]
    Software("megatron-2020", r"Sept 2020|1909\.08053", **_2021),  # type: ignore[arg-type]
    Software("vtrain", r"vTrain|2312\.12391", system="a100-4nic", **_2021),  # type: ignore[arg-type]
    Software("megascale", r"MegaScale|2402\.15627", "megatron"),
    Software("deepseek", r"Insights into DeepSeek-V3|2505\.09343|2412\.19437", "deepseek"),
    Software("simumax", r"SimuMax", "megatron"),
    Software(
        "parallel-folding",
        r"MoE Parallel Folding|2504\.14960",
        "megatron",
        micro_batch=1,
        unfolded_experts=r"-(mcore|tp\+ep\+dp)-\d+$",
    ),
    Software("nemo", r"dgxc-benchmarking", "megatron", interleaves=False, gradient_bytes=2.0),
    Software(
        "megatron-bridge",
        r"Megatron-Bridge|NeMo",
        "megatron",
        interleaves=False,
        gradient_bytes=2.0,
        logit_bytes=_FUSED_LOSS,
    ),
    Software("megatron-core", r"", "megatron"),
)

_PARAMETERS_OF_A_BLOCK = 12
"""Of GPT: four matrices, their biases, and two norms; DeepSpeed's ZeRO-3 gathers each for itself (arXiv 1910.02054)."""
_JEAN_ZAY = Fact(
    6.25e9, "BLOOM, arXiv 2211.05100, section 3.4: four Omni-Path links of 100 Gb/s for eight A100"
)

_STACKS = {
    **STACKS,
    # XLA plans its memory ahead: no allocator that fragments, no communicators beside the program. Each matrix's gradient is
    # reduced as soon as it is there, and the loss is one fused loop.
    "xla": replace(
        STACKS["fsdp"],
        name="xla",
        context_bytes=0.3e9,
        communicator_bytes=0.0,
        fragmentation=0.0,
        unit_gradient_bytes=0.0,
        logit_bytes=4.0,
        launch_s=0.0,
    ),
    "deepspeed-zero3": replace(
        STACKS["fsdp"],
        name="deepspeed-zero3",
        flash_attention=False,
        dropout=True,
        reduce_bytes=2.0,
        gathers_per_block=_PARAMETERS_OF_A_BLOCK,
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


def software_of(run: PublishedRun) -> Software:
    """The first entry of ``SOFTWARE`` that the row's source or notes match."""
    text = f"{run.source}; {run.notes}"
    return next(software for software in SOFTWARE if re.search(software.pattern, text))


def stack_of_run(run: PublishedRun, software: Software) -> Stack:
    """The planner's stack, with what the row says of it."""
    stack = _STACKS[software.stack]
    if run.zero == 3 and 3 not in stack.zero_stages:
        stack = _STACKS["fsdp"]
    if "pure" in run.precision.lower() or "MP mode PURE" in run.notes:
        stack = replace(stack, reduce_bytes=2.0)
    if software.gradient_bytes and stack.name != "fsdp":
        stack = replace(_with_gradients(stack, software.gradient_bytes), reduce_bytes=software.gradient_bytes)
        if stack.accumulating_bytes:
            stack = replace(stack, accumulating_bytes=2 * software.gradient_bytes)
    if software.logit_bytes:
        stack = replace(stack, logit_bytes=software.logit_bytes)
    if software.name == "bigscience":
        stack = _bigscience(stack, run)
    if software.name == "megatron-bridge":
        stack = _bridge(stack, run)
    if software.name in ("parallel-folding", "nemo"):  # Megatron Core before 0.13
        stack = replace(stack, weighs_inside=False)
    if software.name == "torchtitan":
        # Its default rotate method is all-gather. How times grow with the ranks says that pieces were contiguous.
        stack = replace(stack, context_exchange="gather", context_balanced=False)
        if "compile" in run.notes and re.search(r"_2025\d\d_", run.source):
            stack = replace(stack, logit_bytes=_FUSED_LOSS)  # it compiles the loss too since January 2025
    if software.name == "nanotron":
        stack = _nanotron(stack, run)
    if software.name in ("megatron-bridge", "megatron-core") and re.match(
        r"deepseek|kimi", run.model, re.IGNORECASE
    ):
        # 61 layers: get_deepseek_v3_pipeline_layout and that of Kimi (Megatron-Bridge) leave the last stage the fewest.
        stack = replace(stack, split="last")
    if software.unfolded_experts:
        stack = replace(stack, fused_permutation=False)  # Megatron Core fuses it since 0.11
    stack = with_recipe(_casting(stack, software, run), run)
    eager = not software.compiled and not re.search(r"\bcompile", run.notes)
    return replace(stack, fused_pointwise=False) if eager else stack


def _casting(stack: Stack, software: Software, run: PublishedRun) -> Stack:
    """Transformer Engine's casts, by the row's recipe for eight bits.

    Its multi_tensor_quantize_impl casts one expert after the other unless scaling is delayed; with current scaling, which
    Megatron-Bridge's tables call FP8 or FP8-CS, each takes four kernels: the maximum is set to zero and found, then the scale,
    then the cast (Float8CurrentScalingQuantizer::quantize_impl; pytorch/csrc/extensions/cast.cpp, v2.9).
    """
    if software.name not in ("megatron-bridge", "megatron-core"):
        return stack
    if software.name == "megatron-bridge" and run.precision in ("fp8", "fp8-cs"):
        return replace(stack, cast_kernels=4, cast_reads=2)
    blocks = re.search(r"mx|block|nvfp4", run.precision)
    return replace(stack, cast_kernels=1) if blocks else stack


def _bigscience(stack: Stack, run: PublishedRun) -> Stack:
    """DeepSpeed as it trained BLOOM.

    CUDA_LAUNCH_BLOCKING=1 is set in its scripts (train/tr11-176B-ml/tr11-176B-ml.slurm): a hang had made it necessary.
    """
    stack = replace(stack, blocking_launches=True)
    if run.precision.startswith("bf16"):
        # BF16_Optimizer accumulates in fp32 beside the gradients that autograd leaves in bf16; each is copied to fp32 on its way.
        return replace(_with_gradients(stack, 6.0), embedding_gradient_bytes=6.0)
    # The fp16 optimizer keeps gradients in fp16, and makes of a rank's share a flat copy and one in fp32 for the update.
    copies = State("gradients of the update", 6.0, 1, optimizer=True)
    stack = _with_gradients(stack, 2.0)
    return replace(stack, states=(*stack.states, copies), accumulating_bytes=4)


def _bridge(stack: Stack, run: PublishedRun) -> Stack:
    """Megatron-Bridge: its executors set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.

    The recipes of DeepSeek-V3 and Moonlight use the precision-aware optimizer with moments in bf16 (recipes/deepseek,
    recipes/moonlight); it keeps of master weights the 16 bits that bf16 weights lack (store_param_remainders), except for
    weights in fp8, whose master weights are Megatron Core's own in fp32 (core/optimizer/optimizer_config.py).
    """
    stack = replace(stack, fragmentation=0.01, loss_passes=_TE_LOSS_PASSES)
    if not re.match(r"deepseek|moonlight", run.model, re.IGNORECASE):
        return stack
    sizes = {"moments": 4.0, "master weights": 2.0 if run.precision.startswith("bf16") else 4.0}
    return _with_states(stack, sizes)


def _nanotron(stack: Stack, run: PublishedRun) -> Stack:
    """nanotron as in its scaling benchmarks: stages are cut by cost, and gradients added up in fp32.

    Those that autograd leaves in bf16 meet a further micro-batch's activations only where there is one. That gathered inputs are
    kept is what the memory of its runs says, over all degrees of tensor parallelism.
    """
    stack = replace(stack, split="balanced", keeps_gathered_inputs=True)
    further = (run.pp or 1) > 1 or run.global_batch_seqs != (run.dp or 1) * (run.micro_batch or 1)
    return _with_gradients(stack, 6.0) if further else stack


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


def _with_gradients(stack: Stack, size: float) -> Stack:
    return _with_states(stack, {"gradients": size})


def _with_states(stack: Stack, sizes: Mapping[str, float]) -> Stack:
    states = (replace(state, bytes=sizes.get(state.kind, state.bytes)) for state in stack.states)
    return replace(stack, states=tuple(states))


def cluster_of_run(run: PublishedRun, software: Software) -> Cluster:
    """The machines that a row names. Raises ``Excluded`` if the catalog does not have them."""
    gpu = run.gpu.lower()
    found = next(
        ((re.search(pattern, gpu), key) for pattern, key in _SYSTEMS if re.search(pattern, gpu)), None
    )
    if found is None or found[0] is None:
        raise Excluded(f"the catalog has no accelerator {run.gpu!r}")
    if not run.gpus:
        raise Excluded("does not state how many accelerators ran")
    key = found[1] or found[0][1]
    if software.system and systems()[software.system].accelerator.key == systems()[key].accelerator.key:
        key = software.system
    machines = cluster(f"{key}:{run.gpus}")
    if software.name == "bigscience":
        machines = replace(machines, fabric=replace(machines.fabric, bytes_per_s=_JEAN_ZAY))
    slice_size = slice_of(run)
    if slice_size:
        machines = replace(machines, domain=replace(machines.domain, size=slice_size))
    return machines


def slice_of(run: PublishedRun) -> int:
    """Accelerators of one slice of a TPU, as the notes give them; 0 where the row has none."""
    if not run.gpu.startswith("TPU") or not run.gpus:
        return 0
    found = re.search(r"(\d+) (?:slice|x v\d)", run.notes)
    return run.gpus // int(found[1]) if found and int(found[1]) else 0
