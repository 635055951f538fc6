"""``PlannedLayout``: one layout that the planner names, and the table of the names that users write for its fields.

A search computes with arrays of codes (``phalanx.plan.workload.candidates``); whatever leaves it is a ``PlannedLayout``, whose
schedule, recomputation and precision are names. ``LAYOUT_FIELDS`` is the one place that says how a field is called in
``--layout``, ``--require`` and everything that is printed.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.parallel.pipeline.schedules import ScheduleName
from phalanx.run.layout import Layout


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with all that is chosen beside the mesh. ``str()`` writes it in the words of ``--layout``."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    stages_per_rank: int = 1
    expert: int = 1
    expert_tensor: int = 1
    replicate: int = 1
    shard: int = 1
    """Data-parallel ranks that state is sharded over, whatever ``zero`` says is sharded."""
    zero: int = 3
    """0: nothing is sharded over data-parallel ranks; 1: the optimizer's state; 2: gradients too; 3: weights too."""
    micro_batch: int = 1
    """Sequences of one forward pass."""
    schedule: ScheduleName = "1f1b"
    recompute: str = "none"
    """The name of one of the job's modes."""
    precision: str = "bf16"
    """The name of one of ``candidates.PRECISIONS``."""
    offload_activations: bool = False
    offload_optimizer: bool = False
    sequence_parallel: bool = True
    """True if tensor ranks divide the sequence between matrix products, rather than repeat that work."""

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def mesh(self) -> Layout:
        """The degrees of the mesh's axes."""
        return Layout(
            pipeline=self.pipeline,
            replicate=self.replicate,
            shard=self.shard,
            context=self.context,
            tensor=self.tensor,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
        )

    def __str__(self) -> str:
        """One line in the words of ``--layout``; what is 1 or off is left out."""
        degrees = ("tensor", "context", "pipeline", "stages_per_rank", "expert", "expert_tensor", "data")
        shown: dict[str, object] = {name: getattr(self, name) for name in degrees if getattr(self, name) > 1}
        if self.replicate > 1:
            shown["shard"] = self.shard
        shown |= {"micro_batch": self.micro_batch, "zero": self.zero}
        if self.pipeline > 1:
            shown["schedule"] = self.schedule
        if self.recompute != "none":
            shown["recompute"] = self.recompute
        shown |= {name: 1 for name in ("offload_activations", "offload_optimizer") if getattr(self, name)}
        if self.precision != "bf16":
            shown["precision"] = self.precision
        if not self.sequence_parallel:
            shown["sequence_parallel"] = 0
        return ",".join(f"{_SHORT[name]}={value}" for name, value in shown.items())


@dataclass(frozen=True)
class LayoutField:
    """A field of a layout as users write it."""

    name: str
    short: str = ""
    """Its other name, beside ``name``; both are understood."""
    not_in_layout: str = ""
    """Why ``--layout`` does not take it."""
    not_in_require: str = ""
    """Why ``--require`` does not take it."""

    @property
    def shown(self) -> str:
        """Its name in what is printed."""
        return self.short or self.name


_NOT_SEARCHED = "every layout that is looked at has the same"

LAYOUT_FIELDS = (
    LayoutField("tensor", "tp"),
    LayoutField("context", "cp"),
    LayoutField("pipeline", "pp"),
    LayoutField("stages_per_rank", "vpp"),
    LayoutField("expert", "ep"),
    LayoutField("expert_tensor", "etp"),
    LayoutField("data", "dp"),
    LayoutField("shard", "fsdp"),
    LayoutField("replicate", not_in_layout="it is dp / fsdp: give these"),
    LayoutField("micro_batch", "mbs"),
    LayoutField("ranks", "gpus"),
    LayoutField("zero"),
    LayoutField("offload_activations"),
    LayoutField("offload_optimizer"),
    LayoutField("schedule"),
    LayoutField("recompute"),
    LayoutField(
        "precision",
        not_in_require=f"{_NOT_SEARCHED}: set precision.compute or precision.matmul of the run file",
    ),
    LayoutField("sequence_parallel", not_in_require=_NOT_SEARCHED),
)
"""Every field of a layout that a user can name."""

_SHORT = {field.name: field.shown for field in LAYOUT_FIELDS}


def layout_field(word: str) -> LayoutField | None:
    """The field that is called ``word``, in short or in full; ``None`` if none is."""
    return next((field for field in LAYOUT_FIELDS if word in (field.name, field.shown)), None)
