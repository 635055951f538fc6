"""Runs on real ranks whose weights are damaged in layer 1 before a step, for tests and benches of what names such faults."""

from __future__ import annotations

from typing import Any

from phalanx.run.spec import RunSpec
from tiny_runs import train_on_this_rank

_LASTING = "growing"
"""The fault that is done again before each later step."""


def damage(fault: str, parameters: dict[str, Any]) -> None:
    """Change the weights as the fault does: "growing", "saturated", "dead", "collapsed", "infinite", or "" for none."""
    import torch

    with torch.no_grad():
        match fault:
            case "growing":
                parameters["blocks.1.attention.value.weight"].mul_(1.35)
            case "saturated":
                parameters["blocks.1.attention.query.weight"].mul_(1e3)
                parameters["blocks.1.attention.key.weight"].mul_(1e3)
            case "dead":
                for name in ("gate", "up"):
                    parameters[f"blocks.1.ffn.{name}.weight"][:24] = 0
            case "collapsed":
                bias = parameters["blocks.1.ffn.router.logit_bias"]
                bias.zero_()
                bias[2:4] = 60.0
            case "infinite":
                parameters["blocks.1.ffn.up.weight"][3, 4] = torch.inf


def train_damaged(spec: RunSpec, fault: str, step: int = 1) -> dict[str, Any] | None:
    """Train ``spec`` on this rank, with the fault from before ``step`` on."""
    from phalanx.parallel.reduction.data_parallel import named_parameters
    from phalanx.train.step.step import Stepper

    original = Stepper.run

    def run(self: Any, number: int, *args: Any, **named: Any) -> Any:
        if number == step or (fault == _LASTING and number > step):
            damage(fault, named_parameters(self.built.model.parts))
        return original(self, number, *args, **named)

    Stepper.run = run  # type: ignore[method-assign]
    try:
        return train_on_this_rank(spec)
    finally:
        Stepper.run = original  # type: ignore[method-assign]
