"""What the performance recipes behind published rows set that the rows do not say: dispatcher, overlap, CUDA graphs, recomputation.

A row of NVIDIA-NeMo/Megatron-Bridge's performance summary states a layout; the rest is in the recipe of that release
(scripts/performance/configs/*/*_workload_base_configs.py and src/megatron/bridge/perf_recipes, tags v0.2.0 to v0.6.0, containers
25.11 to 26.08). ``RECIPES`` transcribes them, first match first. What a row's own notes say is taken from there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.plan.workload.stacks import Stack
from validation.runs import PublishedRun

ATTENTION_PARTS = frozenset({"norm", "projection", "latent_up", "core", "out"})
ROUTER_PARTS = frozenset({"router"})
_HIDDEN = 0.6
"""Of the exchange of tokens, what another micro-batch's computing hides, less what computing is slowed by the multiprocessors that
carry it. DeepSeek-V3's 20 of 132 (arXiv 2412.19437, section 3.2.2) would leave three quarters; fitted on one half of the models,
it took the error of overlapped runs of the other half from 17 to 15 %."""


@dataclass(frozen=True)
class Recipe:
    """What a recipe sets. The first four fields say which rows it is for."""

    model: str
    """A regular expression for the row's model, as the others are for its columns; all are sought without regard to case."""
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
    """Whether the exchange of tokens is hidden behind another micro-batch."""
    graphed: frozenset[str] = frozenset()
    """Parts of a layer that CUDA graphs replay."""
    whole_graph: bool = False
    """Whether one CUDA graph replays the whole step."""
    recompute: str = "none"
    """As the row's own column has it."""
    narrow_attention: bool = False
    """Whether attention is in fp8 (fp8_dot_product_attention)."""
    offload: bool = False
    """Whether activations wait in the host's memory."""


_SOME = ATTENTION_PARTS | ROUTER_PARTS
_UP, _UP_MLP = "selective(mla_up_proj)", "selective(mla_up_proj,mlp)"
_NORM_ACT = "selective(layernorm,moe_act)"
_WHOLE = {"flex": "hybridep", "overlap": True, "whole_graph": True}
_WHOLE_FP8 = {**_WHOLE, "narrow_attention": True}

RECIPES = (
    Recipe("deepseek", "gb300", "mxfp8", 26.06, **_WHOLE_FP8),  # type: ignore[arg-type]
    Recipe("deepseek", "gb200", "mxfp8", 26.06, recompute=_UP, **_WHOLE),  # type: ignore[arg-type]
    Recipe("deepseek", "gb300", "bf16", flex="hybridep", graphed=_SOME, recompute="selective(moe_act)"),
    Recipe("deepseek", "gb300", flex="hybridep", recompute=_UP),
    Recipe("deepseek", "gb200", "fp8", 26.04, flex="hybridep", graphed=_SOME, recompute="selective(mlp)"),
    Recipe("deepseek", "gb200", flex="hybridep", graphed=ROUTER_PARTS, recompute=_UP),
    Recipe(
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
    Recipe("deepseek", "b[23]00", since=26.02, flex="hybridep", recompute=_UP),
    Recipe("deepseek", "b200", recompute=_UP),
    Recipe("deepseek", "h100", until=26.02, flex="deepep", overlap=True, recompute=_UP_MLP),
    Recipe("deepseek", "h100", flex="hybridep", recompute=_UP_MLP),
    Recipe("kimi", "gb300", flex="hybridep", recompute=_UP),
    Recipe("kimi", "gb200", flex="hybridep", graphed=ROUTER_PARTS, recompute=_UP),
    Recipe("qwen3", "gb[23]00", "mxfp8", 26.06, **_WHOLE_FP8),  # type: ignore[arg-type]
    Recipe("qwen3.30b", "b300", "mxfp8", 26.06, **_WHOLE_FP8),  # type: ignore[arg-type]
    Recipe("qwen3.30b", "gb[23]00|b300", since=25.11, flex="hybridep", graphed=ROUTER_PARTS),
    Recipe("qwen3.30b", "b200", since=26.04, flex="hybridep", graphed=_SOME),
    Recipe("qwen3.30b", "b200", graphed=ROUTER_PARTS),
    Recipe("qwen3.30b", "h100", since=26.04, flex="hybridep"),
    Recipe("qwen3.30b", "h100", since=26.02, flex="deepep", overlap=True),
    Recipe("qwen3.30b", "h100", overlap=True),
    Recipe("qwen3.235b", "gb300", until=26.02, flex="hybridep", graphed=ROUTER_PARTS),
    Recipe("qwen3.235b", "gb[23]00", flex="hybridep", graphed=_SOME),
    Recipe("qwen3.235b", "b200", until=26.02, overlap=True),
    Recipe("qwen3.235b", "b300", until=26.04, overlap=True),
    Recipe("qwen3.235b", "h100", overlap=True),
    Recipe("qwen3.235b", "b[23]00"),
    Recipe("gpt.oss", "gb[23]00", "mxfp8", 26.06, **_WHOLE_FP8),  # type: ignore[arg-type]
    Recipe("gpt.oss", "gb300", "bf16", graphed=_SOME),
    Recipe("gpt.oss", "b300", "bf16", 26.04, flex="hybridep", graphed=_SOME),
    Recipe("gpt.oss", "b300", "bf16", graphed=_SOME),
    Recipe("gpt.oss", "", "bf16", recompute=_NORM_ACT),
    Recipe("llama3.8b", "[gb]+[23]00", whole_graph=True),
    Recipe("llama3.70b", "gb[23]00", "bf16|fp8$|fp8-cs", pipeline=1, offload=True),
    Recipe("llama", "", since=25.11),
)


def recipe_of(run: PublishedRun) -> Recipe | None:
    """The recipe of a row of Megatron-Bridge's performance summary; ``None`` for other rows."""
    release = re.search(r"Megatron-Bridge (\d\d\.\d\d)[\d.]* container", run.notes)
    if release is None or re.search("SFT|LoRA", run.notes):
        return None
    return next((recipe for recipe in RECIPES if _holds(recipe, run, float(release[1]))), None)


def _holds(recipe: Recipe, run: PublishedRun, release: float) -> bool:
    sought = ((recipe.model, run.model), (recipe.gpu, run.gpu), (recipe.precision, _precision(run)))
    return (
        all(re.match(pattern, text, re.IGNORECASE) for pattern, text in sought)
        and recipe.since <= release < recipe.until
        and recipe.pipeline in (0, run.pp)
    )


def _precision(run: PublishedRun) -> str:
    """The MX format has two names."""
    return run.precision.replace("fp8-mx", "mxfp8")


def with_recipe(stack: Stack, run: PublishedRun) -> Stack:
    """The stack as the row's recipe and notes set it."""
    known = recipe_of(run)
    recipe = known or _noted(run)
    if recipe.flex:
        stack = replace(stack, dispatch="hybrid" if recipe.flex == "hybridep" else "once per node")
    if re.match("gpt.oss", run.model, re.IGNORECASE):
        # Megatron Core's TEGroupedMLP._apply_bias and weighted_bias_quick_geglu_impl, unless CuTe's grouped products do both;
        # and its apply_rotary_pos_emb, whose kernel does not scale as YaRN asks for.
        apart = not recipe.whole_graph
        stack = replace(stack, weighs_biases=apart, clamps_apart=apart, turns_apart=True)
    if known and re.search("fp8|fp4", run.precision) and recipe.flex != "hybridep" and not recipe.whole_graph:
        stack = replace(stack, pads_apart=True)  # TEGroupedMLP's Fp8Padding; HybridEP pads as it sorts
    if recipe.narrow_attention:
        stack = replace(stack, narrow_attention=True)
    if recipe.overlap:
        stack = replace(stack, expert_overlap=_HIDDEN)
    if recipe.whole_graph:
        return replace(stack, launch_s=0.0, expert_streams=0)  # with CuTe's fused grouped products
    return replace(stack, graphed=recipe.graphed) if recipe.graphed else stack


def _noted(run: PublishedRun) -> Recipe:
    """What a row's own notes say."""
    notes = run.notes
    graphed = (
        _SOME if "partial CG" in notes else ROUTER_PARTS if "router/preprocess CG" in notes else frozenset()
    )
    return Recipe(
        "",
        "",
        flex="hybridep" if "HybridEP" in notes else "deepep" if re.search(r"DeepEP|\bflex\b", notes) else "",
        overlap=bool(re.search(r"EP overlap|A2A overlap", notes)),
        graphed=graphed,
        whole_graph=bool(re.search(r"full CG|CUDA graphs", notes)),
    )
