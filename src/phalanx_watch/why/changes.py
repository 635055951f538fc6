"""Planned changes of a run that can change its loss: a stage of its data, or other fields than its parent's."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.observe.events import Evaluated, Step
from phalanx.run.rules import stages_of
from phalanx.run.spec import RunSpec
from phalanx_watch.why import observed as o

_MOST_LISTED = 8
"""Sources and fields in a line; the run files have all."""


@dataclass(frozen=True)
class Change:
    """A step after which a run trains on other data, or with other fields than its parent."""

    step: int
    """The last step before the change."""
    of_data: bool
    """True if the data change: another level of the loss is expected."""
    losses_before: tuple[float, ...]
    """Losses of logged steps before it, the newest last."""
    evidence: tuple[str, ...]
    next: str
    """Recommended next step if the loss has not come back."""


def change_before(observed: o.Observed, step: int) -> Change | None:
    """Return the newest change before ``step``; None in the first stage of the data of a run that continues no parent."""
    if observed.spec is None:
        return None
    stage, _ = observed.stage_of(step)
    origin = observed.origin
    # More steps alone are a continuation as planned.
    fields = (
        [field for field in origin.changed_fields if not field.startswith("train.steps:")] if origin else []
    )
    if origin is not None and fields and origin.step >= stage:
        of_data = origin.step == stage or any(field.startswith("data.") for field in fields)
        return Change(
            origin.step,
            of_data,
            origin.losses,
            (
                f"the run continues step {origin.step:,} of {origin.run} with {'; '.join(fields[:_MOST_LISTED])}",
            ),
            f"if that is not meant, continue with the earlier values: phalanx train {origin.run} --from {origin.step}",
        )
    if not stage:
        return None
    steps = [step for _, step in o.of_kind(Step, observed.all_events)]
    return Change(
        stage,
        True,
        tuple(step.loss for step in steps if step.step <= stage),
        tuple(_stage_evidence(observed, observed.spec, stage)),
        f"phalanx data show {observed.run} --step {stage + 1} (are these the texts that you mean?)",
    )


def _stage_evidence(observed: o.Observed, spec: RunSpec, stage: int) -> list[str]:
    """Return the weights of the sources before and after ``stage``, and the newest held-out loss of each source."""
    number = stages_of(spec.data).index(stage)
    weights = [
        f"{source.name} {source.weights[number - 1]:g} -> {source.weights[number]:g}"
        for source in spec.data.sources
        if number < len(source.weights) and source.weights[number - 1] != source.weights[number]
    ][:_MOST_LISTED]
    evaluated = observed.newest(Evaluated)
    held_out = (
        sorted(evaluated[1].sources.items(), key=lambda item: -item[1])[:_MOST_LISTED] if evaluated else []
    )
    return [
        f"the data change after step {stage:,} (data.stages): weights {', '.join(weights)}",
        *(
            [
                f"held out at step {evaluated[1].step:,}: {', '.join(f'{name} {loss:.4g}' for name, loss in held_out)}"
            ]
            if evaluated and held_out
            else []
        ),
    ]
