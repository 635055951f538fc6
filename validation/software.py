"""Software of a published row: its stack as the row's circumstances set it, and the machines it ran on.

A row names its software (column ``software``). Its stack is in ``phalanx_plan.workload.software``, which ``phalanx plan
--stack`` uses too; ``HABITS`` has the facts that only a row needs: the choices that its software leaves, and its machines.
``software_of_run`` joins both with the row's recipe into the one stack that a row is planned with.

Sources: Jean Zay's nodes have eight A100 and four Omni-Path links of 100 Gb/s (BLOOM, arXiv 2211.05100, section 3.4).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from phalanx.hardware.catalog import cluster, systems
from phalanx.hardware.cluster import Accelerator, Cluster, Fact
from phalanx.hardware.profile import Profile, profile_of
from phalanx_plan.workload.recipes import Circumstances, PerformanceRecipe, recipe_of
from phalanx_plan.workload.software import (
    FSDP,
    SOFTWARE,
    STACKS,
    TrainingSoftware,
    profile_of_software,
    stack_of_software,
    stack_on,
)
from phalanx_plan.workload.stacks import Stack
from validation.runs import Excluded, PublishedRun


@dataclass(frozen=True)
class Habits:
    """Defaults for values that a row of one software leaves open, and its machines."""

    sequence_parallel: bool = True
    """True if tensor parallelism divides the sequence too, if the row does not state it."""
    interleaves: bool = True
    """True if stages may have been interleaved, if the row does not state it."""
    system: str = ""
    """A system of the catalog that the runs are known to have used."""
    fabric: Fact | None = None
    """Bytes per second of the network, if the runs' machines have another than the system."""
    micro_batch: int = 0
    """Sequences, if the row does not state them and the software's recipes do."""
    accumulates: bool = True
    """True if a step may have several micro-batches without a pipeline; else a row's figure is of each device."""
    selects_products: bool = False
    """True if "selective" recomputation keeps every second product."""
    recomputes_activation: bool = False
    """True if the activation's output is recomputed beside the parts that the row names."""


_JEAN_ZAY = Fact(
    6.25e9, "BLOOM, arXiv 2211.05100, section 3.4: four Omni-Path links of 100 Gb/s for eight A100"
)
HABITS: Mapping[str, Habits] = {
    "torchtitan": Habits(selects_products=True),
    "maxtext": Habits(accumulates=False),
    "nanotron": Habits(interleaves=False),
    "bigscience": Habits(sequence_parallel=False, interleaves=False, fabric=_JEAN_ZAY),
    "mt-nlg": Habits(sequence_parallel=False, interleaves=False, system="selene"),
    "deepspeed-zero3": Habits(sequence_parallel=False),
    "megatron-2022": Habits(system="selene"),
    "megatron-2021": Habits(sequence_parallel=False, system="selene"),
    "megatron-2020": Habits(sequence_parallel=False),
    "vtrain": Habits(sequence_parallel=False, system="a100-4nic"),
    # SwiGLU's output is recomputed too, though no table states it (arXiv 2412.19437, section 3.3.2).
    "deepseek": Habits(recomputes_activation=True),
    "parallel-folding": Habits(micro_batch=1),
    "nemo": Habits(interleaves=False),
    "megatron-bridge": Habits(interleaves=False),
}
"""Habits by software; those that are not named have the defaults."""


@dataclass(frozen=True)
class RunSoftware:
    """Software, habits, recipe and stack of one row."""

    software: TrainingSoftware
    habits: Habits
    recipe: PerformanceRecipe | None
    stack: Stack


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


def circumstances_of(run: PublishedRun) -> Circumstances:
    """Return the circumstances of a row that facts of its software depend on."""
    return Circumstances(
        model=run.model,
        gpu=run.gpu,
        precision=run.precision,
        release=run.recipe_release,
        pipeline=run.pp or 0,
        zero=run.zero,
        accumulates=run.global_batch_seqs != (run.dp or 1) * (run.micro_batch or 1),
        narrow_reduction=run.reduce_precision == "bf16",
        compiled=run.compiled,
        dispatcher=run.dispatcher,
        expert_overlap=run.expert_overlap,
        cuda_graphs=run.cuda_graphs,
    )


def software_of_run(run: PublishedRun) -> RunSoftware:
    """Return software, recipe and stack of a row. Raises ``Excluded`` for a software that the table does not have."""
    software = SOFTWARE.get(run.software)
    if software is None:
        raise Excluded(f"no software {run.software!r} is known: write one of {', '.join(SOFTWARE)}")
    circumstances = circumstances_of(run)
    recipe = recipe_of(circumstances)
    return RunSoftware(
        software,
        HABITS.get(software.name, Habits()),
        recipe,
        stack_of_software(software, circumstances, recipe),
    )


def unseen_software_of_run(run: PublishedRun) -> RunSoftware:
    """Return the row's software as one that the planner has not seen: the stack of its kind as it is, without habits or recipe."""
    name = SOFTWARE[run.software].stack if run.software in SOFTWARE else ""
    stack = STACKS.get(name, FSDP)
    if run.zero == 3 and 3 not in stack.zero_stages:
        stack = FSDP
    stack = stack_on(stack, "Google" if run.gpu.lower().startswith("tpu") else "")
    if run.compiled:
        stack = replace(stack, kernels=replace(stack.kernels, fused_pointwise=True))
    return RunSoftware(
        TrainingSoftware(run.software, stack.name), HABITS.get(run.software, Habits()), None, stack
    )


def profile_of_run(accelerator: Accelerator, software: TrainingSoftware, run: PublishedRun) -> Profile:
    """Return the accelerator's constants, with the attention that the software had and the products of the row's format."""
    return profile_of_software(profile_of(accelerator), software, run.precision)


def cluster_of_run(run: PublishedRun, habits: Habits) -> Cluster:
    """Return the machines that a row names. Raises ``Excluded`` if the catalog does not have them."""
    gpu = run.gpu.lower()
    system = next(((match, key) for pattern, key in _SYSTEMS if (match := re.search(pattern, gpu))), None)
    if system is None:
        raise Excluded(f"the catalog has no accelerator {run.gpu!r}")
    if not run.gpus:
        raise Excluded("does not state how many accelerators ran")
    match, key = system
    key = key or match[1]
    if habits.system and systems()[habits.system].accelerator.key == systems()[key].accelerator.key:
        key = habits.system
    machines = cluster(f"{key}:{run.gpus}")
    if habits.fabric:
        machines = replace(machines, fabric=replace(machines.fabric, bytes_per_s=habits.fabric))
    if run.slices:
        machines = replace(machines, domain=replace(machines.domain, size=run.gpus // run.slices))
    return machines
