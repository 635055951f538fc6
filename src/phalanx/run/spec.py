"""``RunSpec``: the one description that planner, trainer, scheduler and dashboard read.

Every section is a table of the run file (TOML), declared in ``phalanx.run.sections``; every field has a type, a default, a range and a
sentence. ``phalanx.run.read`` turns a file into a ``RunSpec`` and reports all mistakes at once;
``phalanx.run.rules.check`` holds the rules that span several fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from phalanx.run.fields import FLEET
from phalanx.run.sections.checkpoint import CheckpointSpec
from phalanx.run.sections.data import DataSpec, SourceSpec
from phalanx.run.sections.evaluation import EvalSpec, ExpectSpec, SampleSpec
from phalanx.run.sections.fleet import FleetSpec
from phalanx.run.sections.launch import LaunchSpec
from phalanx.run.sections.model import MlaSpec, ModelSpec, MoeSpec, RopeScalingSpec
from phalanx.run.sections.observe import ObserveSpec
from phalanx.run.sections.parallel import ParallelSpec
from phalanx.run.sections.runtime import MemorySpec, PrecisionSpec, RuntimeSpec
from phalanx.run.sections.train import OptimizerSpec, ScheduleSpec, TrainSpec

__all__ = [
    "CheckpointSpec",
    "DataSpec",
    "EvalSpec",
    "ExpectSpec",
    "FleetSpec",
    "LaunchSpec",
    "MemorySpec",
    "MlaSpec",
    "ModelSpec",
    "MoeSpec",
    "ObserveSpec",
    "OptimizerSpec",
    "ParallelSpec",
    "PrecisionSpec",
    "RopeScalingSpec",
    "RunSpec",
    "RuntimeSpec",
    "SampleSpec",
    "ScheduleSpec",
    "SourceSpec",
    "TrainSpec",
]


@dataclass(frozen=True)
class RunSpec:
    """A run file."""

    name: Annotated[str, FLEET] = "run"
    """Name of the run; the run directory is named after it."""
    run_dir: Annotated[str, FLEET] = ""
    """Path of the run directory; empty means runs/NAME-IDENTITY."""
    unfilled: Annotated[tuple[str, ...], FLEET] = ()
    """Paths of fields that hold defaults nobody chose, as `phalanx plan --model NAME --out` leaves them. The run is not trained until each was
    given by --set, or written into the file and taken off this list."""
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    memory: MemorySpec = field(default_factory=MemorySpec)
    runtime: RuntimeSpec = field(default_factory=RuntimeSpec)
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    evaluation: EvalSpec = field(default_factory=EvalSpec)
    sample: SampleSpec = field(default_factory=SampleSpec)
    expect: ExpectSpec = field(default_factory=ExpectSpec)
    observe: ObserveSpec = field(default_factory=ObserveSpec)
    fleet: FleetSpec = field(default_factory=FleetSpec)
    launch: LaunchSpec = field(default_factory=LaunchSpec)
