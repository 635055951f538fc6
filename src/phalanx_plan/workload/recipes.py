"""Performance recipes of Megatron-Bridge: dispatcher, overlap, CUDA graphs and recomputation by model, accelerator and release.

The recipe of a release completes the layout of NVIDIA-NeMo/Megatron-Bridge's fast runs
(scripts/performance/configs/*/*_workload_base_configs.py and src/megatron/bridge/perf_recipes, tags v0.2.0 to v0.6.0, containers
25.11 to 26.08). ``RECIPES`` transcribes them; the first that matches is used. Runs without a recipe state their circumstances
themselves (``Circumstances``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from phalanx_plan.workload.stacks import Stack

NEWEST_RELEASE = 26.08
"""The newest release that ``RECIPES`` were transcribed from."""
ATTENTION_PARTS = frozenset({"norm", "projection", "latent_up", "core", "out"})
ROUTER_PARTS = frozenset({"router"})
_HIDDEN = 0.6
"""Share of the exchange of tokens that another micro-batch's computing hides, less what computing is slowed by the multiprocessors
that carry it. DeepSeek-V3's 20 of 132 (arXiv 2412.19437, section 3.2.2) would leave three quarters; fitted on one half of the models,
it took the error of overlapped runs of the other half from 17 to 15 %."""


@dataclass(frozen=True)
class Circumstances:
    """Circumstances of a run that facts of its software depend on."""

    model: str = ""
    """Name of the model."""
    gpu: str = ""
    """Name of the accelerator, which begins with its generation's: H100-80GB, gb200."""
    precision: str = "bf16"
    release: float | None = None
    """Release (25.11) of Megatron-Bridge's container whose performance recipes the run follows; ``None`` without a recipe."""
    pipeline: int = 0
    """Pipeline ranks; 0 where they are not decided yet."""
    zero: int | None = None
    """ZeRO stage, where it is known."""
    accumulates: bool = True
    """True if a rank has more than one micro-batch in a step."""
    narrow_reduction: bool = False
    """True if gradients are reduced in bf16, though the software usually does otherwise."""
    compiled: Literal["", "model", "model and loss"] = ""
    """Parts of the step that torch.compile compiles."""
    dispatcher: Literal["", "deepep", "hybridep"] = ""
    """Library of the exchange of tokens, in a run without a recipe; empty for an all-to-all."""
    expert_overlap: bool = False
    """True if the exchange of tokens is hidden behind another micro-batch, in a run without a recipe."""
    cuda_graphs: Literal["", "router", "layer", "step"] = ""
    """Extent of CUDA graphs, in a run without a recipe."""


@dataclass(frozen=True)
class PerformanceRecipe:
    """One recipe: the runs that it is for (model, gpu, precision, since, until, pipeline), and what it sets for them."""

    model: str
    """Regular expression for the model's name, as ``gpu`` and ``precision`` are for those; case is ignored."""
    gpu: str
    precision: str = ""
    since: float = 0.0
    """The first release, as a container's number: 25.11."""
    until: float = 99.0
    """The first release that it no longer holds for."""
    pipeline: int = 0
    """Pipeline ranks, where the recipe is for that number only."""
    flex: Literal["", "deepep", "hybridep"] = ""
    """The library that carries tokens once to each node; without one, an all-to-all carries every copy."""
    overlap: bool = False
    """True if the exchange of tokens is hidden behind another micro-batch."""
    graphed: frozenset[str] = frozenset()
    """Parts of a layer that CUDA graphs replay."""
    whole_graph: bool = False
    """True if one CUDA graph replays the whole step."""
    recompute: str = "none"
    """Recomputation, in the words of Megatron's ``recompute_modules``."""
    narrow_attention: bool = False
    """True if attention is in fp8 (fp8_dot_product_attention)."""
    offload: bool = False
    """True if activations are offloaded to the host's memory."""


_SOME = ATTENTION_PARTS | ROUTER_PARTS
_UP, _UP_MLP = "selective(mla_up_proj)", "selective(mla_up_proj,mlp)"
_NORM_ACT = "selective(layernorm,moe_act)"
_WHOLE = PerformanceRecipe("", "", flex="hybridep", overlap=True, whole_graph=True)
_WHOLE_FP8 = replace(_WHOLE, narrow_attention=True)

RECIPES = (
    replace(_WHOLE_FP8, model="deepseek", gpu="gb300", precision="mxfp8", since=26.06),
    replace(_WHOLE, model="deepseek", gpu="gb200", precision="mxfp8", since=26.06, recompute=_UP),
    PerformanceRecipe(
        "deepseek", "gb300", "bf16", flex="hybridep", graphed=_SOME, recompute="selective(moe_act)"
    ),
    PerformanceRecipe("deepseek", "gb300", flex="hybridep", recompute=_UP),
    PerformanceRecipe(
        "deepseek", "gb200", "fp8", 26.04, flex="hybridep", graphed=_SOME, recompute="selective(mlp)"
    ),
    PerformanceRecipe("deepseek", "gb200", flex="hybridep", graphed=ROUTER_PARTS, recompute=_UP),
    PerformanceRecipe(
        "deepseek",
        "b200",
        "fp8",
        26.04,
        pipeline=8,
        flex="deepep",
        overlap=True,
        graphed=_SOME,
        recompute=_UP_MLP,
    ),
    PerformanceRecipe("deepseek", "b[23]00", since=26.02, flex="hybridep", recompute=_UP),
    PerformanceRecipe("deepseek", "b200", recompute=_UP),
    PerformanceRecipe("deepseek", "h100", until=26.02, flex="deepep", overlap=True, recompute=_UP_MLP),
    PerformanceRecipe("deepseek", "h100", flex="hybridep", recompute=_UP_MLP),
    PerformanceRecipe("kimi", "gb300", flex="hybridep", recompute=_UP),
    PerformanceRecipe("kimi", "gb200", flex="hybridep", graphed=ROUTER_PARTS, recompute=_UP),
    replace(_WHOLE_FP8, model="qwen3", gpu="gb[23]00", precision="mxfp8", since=26.06),
    replace(_WHOLE_FP8, model="qwen3.30b", gpu="b300", precision="mxfp8", since=26.06),
    PerformanceRecipe("qwen3.30b", "gb[23]00|b300", since=25.11, flex="hybridep", graphed=ROUTER_PARTS),
    PerformanceRecipe("qwen3.30b", "b200", since=26.04, flex="hybridep", graphed=_SOME),
    PerformanceRecipe("qwen3.30b", "b200", graphed=ROUTER_PARTS),
    PerformanceRecipe("qwen3.30b", "h100", since=26.04, flex="hybridep"),
    PerformanceRecipe("qwen3.30b", "h100", since=26.02, flex="deepep", overlap=True),
    PerformanceRecipe("qwen3.30b", "h100", overlap=True),
    PerformanceRecipe("qwen3.235b", "gb300", until=26.02, flex="hybridep", graphed=ROUTER_PARTS),
    PerformanceRecipe("qwen3.235b", "gb[23]00", flex="hybridep", graphed=_SOME),
    PerformanceRecipe("qwen3.235b", "b200", until=26.02, overlap=True),
    PerformanceRecipe("qwen3.235b", "b300", until=26.04, overlap=True),
    PerformanceRecipe("qwen3.235b", "h100", overlap=True),
    PerformanceRecipe("qwen3.235b", "b[23]00"),
    replace(_WHOLE_FP8, model="gpt.oss", gpu="gb[23]00", precision="mxfp8", since=26.06),
    PerformanceRecipe("gpt.oss", "gb300", "bf16", graphed=_SOME),
    PerformanceRecipe("gpt.oss", "b300", "bf16", 26.04, flex="hybridep", graphed=_SOME),
    PerformanceRecipe("gpt.oss", "b300", "bf16", graphed=_SOME),
    PerformanceRecipe("gpt.oss", "", "bf16", recompute=_NORM_ACT),
    PerformanceRecipe("llama3.8b", "[gb]+[23]00", whole_graph=True),
    PerformanceRecipe("llama3.70b", "gb[23]00", "bf16|fp8$|fp8-cs", pipeline=1, offload=True),
    PerformanceRecipe("llama", "", since=25.11),
)


def recipe_of(run: Circumstances) -> PerformanceRecipe | None:
    """The recipe of a run of Megatron-Bridge; ``None`` if it follows none."""
    if run.release is None:
        return None
    return next((recipe for recipe in RECIPES if _holds(recipe, run, run.release)), None)


def _holds(recipe: PerformanceRecipe, run: Circumstances, release: float) -> bool:
    """Return True if a recipe's patterns match model, GPU and precision, its releases include ``release``, and its pipeline fits."""
    precision = run.precision.replace("fp8-mx", "mxfp8")  # the MX format has two names
    sought = ((recipe.model, run.model), (recipe.gpu, run.gpu), (recipe.precision, precision))
    return (
        all(re.match(pattern, text, re.IGNORECASE) for pattern, text in sought)
        and recipe.since <= release < recipe.until
        and recipe.pipeline in (0, run.pipeline)
    )


def with_recipe(stack: Stack, run: Circumstances, published: PerformanceRecipe | None) -> Stack:
    """Return the stack configured by the ``published`` recipe; if None, by the run's own dispatcher, overlap and CUDA
    graphs.

    GPT-OSS models have separate kernels for rotation, and, except in a graph of the whole step, for biases and
    clamping. Published fp8 and fp4 runs pad separately, except with HybridEP or such a graph.
    """
    recipe = published or PerformanceRecipe(
        "",
        "",
        flex=run.dispatcher,
        overlap=run.expert_overlap,
        graphed=_GRAPHED.get(run.cuda_graphs, frozenset()),
        whole_graph=run.cuda_graphs == "step",
    )
    experts, attention, kernels, overlap = stack.experts, stack.attention, stack.kernels, stack.overlap
    if recipe.flex:
        experts = replace(experts, dispatch="hybrid" if recipe.flex == "hybridep" else "once per node")
    if re.match("gpt.oss", run.model, re.IGNORECASE):
        # Megatron Core's TEGroupedMLP._apply_bias and weighted_bias_quick_geglu_impl, unless CuTe's grouped products do both;
        # and its apply_rotary_pos_emb, whose kernel lacks YaRN's scaling.
        apart = not recipe.whole_graph
        experts = replace(experts, weighs_biases=apart, clamps_apart=apart)
        attention = replace(attention, turns_apart=True)
    if (
        published
        and re.search("fp8|fp4", run.precision)
        and recipe.flex != "hybridep"
        and not recipe.whole_graph
    ):
        experts = replace(experts, pads_apart=True)  # TEGroupedMLP's Fp8Padding; HybridEP pads as it sorts
    if recipe.narrow_attention:
        attention = replace(attention, narrow=True)
    if recipe.overlap:
        overlap = replace(overlap, expert=_HIDDEN)
    if recipe.whole_graph:  # with CuTe's fused grouped products
        kernels, experts = replace(kernels, launch_s=0.0), replace(experts, streams=0)
    elif recipe.graphed:
        kernels = replace(kernels, graphed=recipe.graphed)
    return replace(stack, experts=experts, attention=attention, kernels=kernels, overlap=overlap)


_GRAPHED = {"router": ROUTER_PARTS, "layer": ATTENTION_PARTS | ROUTER_PARTS}
