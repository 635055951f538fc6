"""A planner query: from a user's request to the job to estimate and the options of the search.

A run file (or a known model) and a cluster become a ``TrainingJob``, a number of tokens becomes steps. Errors name the field
and the remedy. The only file that is read is the accelerator's calibration, if it has one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, get_args

from phalanx.hardware.cluster import Cluster
from phalanx.hardware.profile import profile_of
from phalanx.launch.planner import PlannerError
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import count
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.layout import SPLIT_BACKWARD, layout_problems
from phalanx.run.read import compute_format, read_table
from phalanx.run.spec import PrecisionSpec, RunSpec
from phalanx_plan.evidence import Evidence, evidence_for, generation_of, learned
from phalanx_plan.run_fields import SEARCHED
from phalanx_plan.search.options import Options
from phalanx_plan.search.search import Objective
from phalanx_plan.workload.candidates import RECOMPUTE, mode_of_parts, parts_of, with_modes
from phalanx_plan.workload.recipes import NEWEST_RELEASE, Circumstances, recipe_of
from phalanx_plan.workload.software import (
    SOFTWARE,
    STACKS,
    TrainingSoftware,
    profile_of_software,
    stack_of_software,
    stack_on,
)
from phalanx_plan.workload.stacks import Overlap, Stack, TrainingJob, TrainingWorkload, stack_of, workload_of

OWN = "phalanx"
"""This project's own stack, the only one that run files are for."""

_TRAINABLE = tuple(mode for mode in RECOMPUTE if mode.name in ("none", "selective", "full"))
"""Recomputation modes that run files support and the planner models."""
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_LONGEST_RUN_STEPS = 10**9
_TOKENS_PER_PARAMETER = 20
"""Tokens per parameter of a known model without a run file: compute-optimal for dense models (Hoffmann et al., arXiv 2203.15556)."""


class PlanRequestError(PlannerError):
    """An invalid planner request; the message names the field and the remedy."""


@dataclass(frozen=True)
class Aim:
    """A planner query in the words of the command line: objective, conditions, layout, tokens and assumptions."""

    optimize: str = "time"
    require: tuple[str, ...] = ()
    top: int = 8
    stack: str = OWN
    layout: str | None = None
    tokens: str | None = None
    step_error: float | None = None
    """Relative standard deviation of the true step time around the estimate; ``None`` for that of published runs (``phalanx_plan.evidence``)."""
    assume: tuple[str, ...] = ()
    """Assumptions about the run as ``NAME=VALUE``, with the names of ``RunAssumptions``."""


def run_of_model(name: str, seq_len: int, batch: int, overrides: Sequence[str] = ()) -> RunSpec:
    """Return a run of the known model ``name`` with the fields in ``overrides``; the words of a name may be in any order.

    Other fields have the defaults of a run file, except for the slots, one for each sequence, and the steps, which follow from the
    model's size. Raises ``PlanRequestError`` for an unknown name, ``RunFileError`` for an invalid override.
    """
    words = sorted(name.lower().split("-"))
    preset = next((key for key in PRESETS if sorted(key.split("-")) == words), None)
    if preset is None:
        raise PlanRequestError(
            f"there is no model {name!r}{_meant(name, PRESETS)}: there are {', '.join(PRESETS)}; or give a run file"
        )
    table = {
        "name": preset,
        "model": {"preset": preset},
        "train": {"steps": _LONGEST_RUN_STEPS, "batch_size": batch, "seq_len": seq_len},
    }
    place = Path(f"--model {preset}")
    sequences = dict(text.split("=", 1) for text in overrides if "=" in text).get("train.batch_size", batch)
    overrides = (f"train.slots={sequences}", *overrides)
    spec = read_table(deepcopy(table), PRESETS, overrides, place)
    active = count(resolve(spec.model, spec.data.vocab_size), spec.train.seq_len).active_parameters
    steps = steps_for(_TOKENS_PER_PARAMETER * active, spec.train.batch_size * spec.train.seq_len)
    return read_table(table, PRESETS, (f"train.steps={steps}", *overrides), place)


def _meant(name: str, names: Iterable[str]) -> str:
    """Suggest names similar to ``name``, as a question; case, owner and dashes are ignored. Empty if there is none."""
    plain = {re.sub(r"[^a-z0-9]", "", candidate): candidate for candidate in names}
    sought = re.sub(r"[^a-z0-9]", "", name.lower().rpartition("/")[2])
    likely = [sought] if sought in plain else get_close_matches(sought, plain, n=3, cutoff=0.7)
    near = [plain[candidate] for candidate in likely]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def refuse_unused(overrides: Sequence[str], *, searching: bool, tokens: str | None) -> None:
    """Raise ``PlanRequestError`` for an override that a search or ``tokens`` replaces: a field of the layout, or ``train.steps``."""
    for text in overrides:
        field = text.partition("=")[0].strip()
        if field == "train.steps" and tokens:
            raise PlanRequestError(
                f"--set {text}: --tokens {tokens} sets the length of the run; give one of the two"
            )
        if searching and field in SEARCHED:
            raise PlanRequestError(
                f"--set {text}: a search tries every layout, for any {field}: leave it out, give a condition "
                f"(--require '{SEARCHED[field]}=...'), or ask for one layout (--layout)"
            )


def job_of(spec: RunSpec, cluster: Cluster, *, stack: str = OWN, keep_slots: bool = True) -> TrainingJob:
    """Return the job to estimate: the workload of ``spec``, by a stack, on ``cluster``, with bias or calibration
    applied.

    A compute format that the cluster lacks is replaced as configured. Other stacks choose their slots. Raises
    ``PlanRequestError`` for an unknown stack.
    """
    compute = _compute_on(cluster, spec.precision)
    spec = replace(spec, precision=replace(spec.precision, compute=compute))
    profile = profile_of(cluster.accelerator)
    workload = workload_of(spec, keep_slots=keep_slots and stack == OWN)
    if stack in SOFTWARE:
        return _with_factor(_published_job(spec, cluster, SOFTWARE[stack], workload))
    if stack != OWN:
        if stack not in STACKS:
            stack_names = tuple(dict.fromkeys((*STACKS, *SOFTWARE)))
            raise PlanRequestError(
                f"--stack {stack}{_meant(stack, stack_names)}: take one of {', '.join(stack_names)}"
            )
        return _with_factor(
            TrainingJob(workload, stack_on(STACKS[stack], cluster.accelerator.vendor), cluster, profile)
        )
    modes = tuple(mode for mode in _TRAINABLE if not (spec.runtime.compile and mode.name == "selective"))
    own = TrainingJob(workload, _own_stack(spec, cluster), cluster, profile, modes=modes)
    if is_calibrated(cluster):
        return replace(own, stack=calibrated(own.stack, cluster))
    return _with_factor(own)


def _published_job(
    spec: RunSpec, cluster: Cluster, software: TrainingSoftware, workload: TrainingWorkload
) -> TrainingJob:
    """Return the job for software with published runs, configured by its newest recipe for the model; fp8 on Blackwell is mxfp8."""
    precision = precision_of(spec, cluster)
    if precision == "fp8" and generation_of(cluster.accelerator.key) == "blackwell":
        precision = "mxfp8"  # the format of Blackwell's newest recipes
    run = Circumstances(
        model=spec.model.preset or spec.name,
        gpu=cluster.accelerator.key,
        precision=precision,
        release=NEWEST_RELEASE if software.name == "megatron-bridge" else None,
    )
    stack = replace(stack_of_software(software, run, recipe_of(run)), name=software.name)
    profile = profile_of_software(profile_of(cluster.accelerator), software, precision)
    return TrainingJob(
        workload, stack, cluster, profile, modes=with_modes(RECOMPUTE, _own_modes(software, run))
    )


def _own_modes(software: TrainingSoftware, run: Circumstances) -> Iterator[str]:
    """Yield the parts that a software and its recipe recompute, in modes that the planner lacks. Empty if it names none."""
    if software.recompute:
        yield software.recompute
    recipe = recipe_of(run)
    if recipe and (named := re.fullmatch(r"selective\((.*)\)", recipe.recompute)):
        yield named[1].replace(",", "+")


def with_requested_modes(job: TrainingJob, aim: Aim) -> TrainingJob:
    """Add the recomputation modes that a layout or conditions name by parts; this project's trainer has none of them.

    Raises ``PlanRequestError`` for a part or module of such a mode that the model lacks, and ``ValueError`` for an unknown one.
    """
    if job.stack.name == OWN:
        return job
    texts = (*(aim.layout or "").split(","), *aim.require)
    words = (re.fullmatch(r"\s*recompute\s*[!=]?=\s*(\S+)\s*", text) for text in texts)
    modes = with_modes(job.modes, (word[1] for word in words if word))
    has = parts_of(job.workload.model)
    for mode in modes[len(job.modes) :]:
        for name in mode.name.split("+"):
            parts = mode_of_parts(name).parts
            if not parts & has:
                lacks = "no experts" if parts - {"latent_up"} else "no latent attention"
                raise PlanRequestError(
                    f"recompute={mode.name}: the model has {lacks}, and so no {name.strip()!r} in a layer: leave it out"
                )
    return replace(job, modes=modes)


def _with_factor(job: TrainingJob) -> TrainingJob:
    """Return the job with the factor of measured over predicted time from published runs."""
    return replace(job, stack=replace(job.stack, time_scalar=evidence_of(job).factor))


def evidence_of(job: TrainingJob) -> Evidence:
    """Return the evidence from published runs for this stack on this accelerator."""
    name, accelerator = job.stack.name, job.cluster.accelerator
    own = name == OWN and is_calibrated(job.cluster)
    mixture = job.workload.model.moe is not None
    return evidence_for(learned(), name, accelerator.key, mixture=mixture, calibrated=own)


def is_calibrated(cluster: Cluster) -> bool:
    """True if constants were fitted on steps of this project's stack on the cluster's accelerator (``phalanx calibrate``)."""
    path = Path(cluster.accelerator.profile)
    return path.suffix == ".toml" and path.is_file()


def _own_stack(spec: RunSpec, cluster: Cluster) -> Stack:
    """Return this project's stack as the run file and the cluster change it.

    Compiled runs lack split-backward schedules. fp32 gathers 4 bytes an element, and keeps attention's scores except on
    CPUs. CPUs have no launch time and no overlap, and keep gradients.
    """
    stack = stack_of(spec)
    if spec.runtime.compile:
        schedules = tuple(name for name in stack.schedules if name not in SPLIT_BACKWARD)
        stack = replace(stack, schedules=schedules)
    if spec.precision.compute == "fp32":
        attention = replace(stack.attention, keeps_scores=not _is_cpu(cluster))
        stack = replace(stack, data=replace(stack.data, gather_bytes=4.0), attention=attention)
    if _is_cpu(cluster):
        # gloo's collectives block the caller: nothing is hidden. The host computes, so a kernel launch is part of its work.
        kernels = replace(stack.kernels, launch_s=0.0)
        states = replace(stack.states, frees_gradients=False)
        stack = replace(stack, states=states, overlap=Overlap(context=0.0, data=0.0), kernels=kernels)
    return stack


def calibrated(stack: Stack, cluster: Cluster) -> Stack:
    """Return ``stack`` with the scalar that a calibration of this accelerator measured on real steps, else unchanged.

    Ranks that work at the same time share caches, memory and cores' units. More than one rank has a separate scalar.
    Reads the accelerator's file.
    """
    if not is_calibrated(cluster):
        return stack
    measured = (
        tomllib.loads(Path(cluster.accelerator.profile).read_text()).get("profile", {}).get("stack", {})
    )
    name = "time_scalar_together" if cluster.accelerators > 1 else "time_scalar"
    scalar = measured.get(name, measured.get("time_scalar", stack.time_scalar))
    return replace(stack, time_scalar=scalar)


def _compute_on(cluster: Cluster, precision: PrecisionSpec) -> Literal["fp32", "bf16"]:
    """Return the compute format on ``cluster``; the device in the run file is ignored."""
    return compute_format(precision, "cpu" if _is_cpu(cluster) else "cuda")


def _is_cpu(cluster: Cluster) -> bool:
    return cluster.accelerator.vendor == "any"


def precision_of(spec: RunSpec, cluster: Cluster) -> str:
    """Return the number format of the run's products, one of ``PRECISIONS``; any narrow ``matmul`` counts as fp8.

    ``auto`` falls back to fp16 without bf16. Raises ``PlanRequestError`` if ``cluster`` lacks the format.
    """
    name: str = _compute_on(cluster, spec.precision)
    if spec.precision.compute == "auto" and name == "bf16" and name not in cluster.accelerator.flops:
        name = "fp16"  # its products are as fast as bf16's
    if spec.precision.matmul != "compute":
        name = "fp8"
    if name not in cluster.accelerator.flops:
        formats = ", ".join(cluster.accelerator.flops)
        raise PlanRequestError(
            f"precision: {cluster.accelerator.name} does not multiply in {name!r}, only in {formats}: set "
            "precision.compute or precision.matmul"
        )
    return name


def options_of(
    spec: RunSpec, job: TrainingJob, *, optimize: str, require: tuple[str, ...], top: int
) -> Options:
    """Return the options of a search for this run; it offloads only AdamW with fp32 state, and not on CPUs.

    Fewer accelerators are tried too, halving their number, down to one for "gpus" and three times for "cost". Raises
    ``PlanRequestError`` for an unknown objective ``optimize``.
    """
    if optimize not in get_args(Objective):
        raise PlanRequestError(f"--optimize {optimize}: take one of {', '.join(get_args(Objective))}")
    everything = job.cluster.accelerators
    fewer = {"time": 0, "cost": 3, "gpus": everything.bit_length()}[optimize]
    halved = tuple(n for step in range(fewer + 1) if (n := everything >> step) > 0)
    adam = (spec.optimizer.name, spec.optimizer.state) == ("adamw", "fp32")
    return Options(
        gpus=halved,
        precision=precision_of(spec, job.cluster),
        # A CPU's own memory is the host's, so nothing can be offloaded.
        offload=adam and not _is_cpu(job.cluster),
        require=require,
        objective=optimize,
        top=top,
        finalists=max(16, top),
    )


_MOST_TOKENS = 1e18


def read_tokens(text: str, option: str = "--tokens") -> float:
    """Parse a number of tokens such as ``15T`` or ``300B``.

    Raises ``PlanRequestError`` that names ``option`` for another text, 0, or more than ``_MOST_TOKENS``.
    """
    match = re.fullmatch(r"\s*([\d._]+(?:[eE]\d+)?)\s*([kMBGT]?)\s*", text)
    try:
        tokens = float(match[1].replace("_", "")) * _UNITS[match[2]] if match else 0.0
    except ValueError:
        tokens = 0.0
    if not 0 < tokens <= _MOST_TOKENS:
        raise PlanRequestError(
            f"{option} {text}: write a number above 0, at most {_MOST_TOKENS:.0e}, with k, M, B or T, as in 15T"
        )
    return tokens


def problems_of(spec: RunSpec, ranks: int) -> str:
    """Return the layout problems of the run on ``ranks`` ranks, one on each line; empty if there are none."""
    return "\n".join(f"  {problem}" for problem in layout_problems(spec, ranks))


def steps_for(tokens: float, tokens_per_step: int) -> int:
    """Return the number of steps that train on ``tokens``, within the limits of a run file."""
    return max(1, min(_LONGEST_RUN_STEPS, -int(-tokens // tokens_per_step)))
