"""Which options of ``phalanx serve`` go together."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from phalanx.cli.weights.service.start import Start
from phalanx.cli.weights.service.worker_roles import Degrees
from phalanx.run.directory.paths import is_published
from phalanx.traffic.events import Role


def require_consistent(asked: Start) -> None:
    """Raises UsageError for options that are for another kind of service than the one asked for."""
    _require_workers(asked)
    served = asked.served
    divided = "--pipeline" if asked.pipeline.most > 1 else "--tensor" if asked.tensor.most > 1 else ""
    for option, degrees in (("--pipeline", asked.pipeline), ("--tensor", asked.tensor)):
        _require_roles(option, degrees, asked.workers)
    if any(asked.pipeline.of(role) > 1 < asked.tensor.of(role) for role in asked.workers or ("both",)):
        raise click.UsageError("--tensor shares out each layer, and --pipeline the layers: give one of them")
    _require_stage_timeout(served.silence_s, divided)
    if divided and (served.stream or served.drafts or served.path.is_file()):
        raise click.UsageError(
            f"{divided} divides the model of a run directory, which drafts nothing then: leave out --stream and --drafts, and give no pack"
        )
    if asked.follow:
        _require_followed(asked, divided)
    if is_published(served.path):
        _require_for_published(asked)


def _require_for_published(asked: Start) -> None:
    """Raises UsageError for what needs a run's own directory, and a folder of Hugging Face has not."""
    path = asked.served.path
    if asked.follow:
        raise click.UsageError(f"{path} is a published model, which saves no newer steps: leave out --follow")
    if asked.served.stream:
        raise click.UsageError(
            f"--stream reads weights in the order of layers, as a pack has them: phalanx pack {shlex.quote(str(path))} --out NEW.pack, and serve that"
        )
    if asked.served.stages_at:
        raise click.UsageError(f"--stages-at: {another_machine(path)}")


def another_machine(path: Path) -> str:
    """Why a folder of Hugging Face is not divided over several machines, and what is."""
    return (
        f"that two machines have the same files of {path} is not looked at: make it a run directory on each (phalanx import "
        f"{shlex.quote(str(path))} --out RUN_DIR), whose checkpoints are compared"
    )


def _require_workers(asked: Start) -> None:
    if asked.name == "":
        raise click.UsageError("--name is empty: leave it out for the name of PLACE")
    if not asked.workers and (asked.threads or asked.audit):
        raise click.UsageError("--threads and --audit are for --workers")
    if len(asked.workers) < 2 and "--pages" in _given_beside():
        raise click.UsageError(
            "--pages says how workers take keys and values from one another: it needs --workers 2 or more"
        )
    if asked.audit and len(asked.workers) < 2:
        raise click.UsageError("--audit has another worker score a text again: it needs --workers 2 or more")


def _require_roles(option: str, degrees: Degrees, workers: Sequence[Role]) -> None:
    """Raises UsageError for degrees of roles that no worker has."""
    if degrees.by_role and not workers:
        raise click.UsageError(
            f"{option} names roles, which are those of --workers: give that, or {option} one number"
        )
    if unknown := sorted(set(degrees.by_role) - set(workers)):
        there = ", ".join(dict.fromkeys(workers))
        raise click.UsageError(
            f"{option} says how many processes a worker has whose role is {' or '.join(unknown)}, and --workers has none: its roles are {there}"
        )


def _require_followed(asked: Start, divided: str) -> None:
    served = asked.served
    if divided:
        raise click.UsageError(f"--follow exchanges the weights of one process: leave out {divided}")
    if asked.workers or served.step is not None or served.stream or served.path.is_file():
        raise click.UsageError(
            "--follow goes on to newer steps of a run directory in this process: leave out --workers (all workers hold the same weights), "
            "--step and --stream, and give the run's directory, not a pack"
        )


def require_stage_options(
    pipeline: int, stages_at: str, join: str, token_file: Path | None, *, with_workers: bool
) -> None:
    """Raises UsageError for options that do not go together."""
    if token_file is None:
        raise click.UsageError("--stages-at and --join need --token-file, a file that both sides have")
    if join:
        if others := _given_beside("join", "token_file"):
            raise click.UsageError(
                f"--join takes part in another server, which says what to compute: leave out {', '.join(others)}"
            )
        return
    if not stages_at:
        raise click.UsageError("--token-file is for --stages-at and --join")
    if pipeline < 2:
        raise click.UsageError(
            "--stages-at is where the other processes of --pipeline or --tensor join: give one of them, 2 or more"
        )
    if with_workers:
        raise click.UsageError(
            "--stages-at is for one server: with --workers, stages are started on this machine"
        )


def _require_stage_timeout(seconds: float, divided: str) -> None:
    """Raises UsageError for a ``--stage-timeout`` that is no time, or that is given where ``divided`` is empty: one process has no others."""
    if math.isnan(seconds):
        raise click.UsageError("--stage-timeout nan is no time: give seconds, from 1 to 86400")
    if not divided and "--stage-timeout" in _given_beside():
        raise click.UsageError(
            "--stage-timeout is for the processes of --pipeline or --tensor: give one of them, 2 or more"
        )


def _given_beside(*names: str) -> list[str]:
    """The options on the command line but those of these names."""
    context = click.get_current_context()
    return [
        one.opts[0]
        for one in context.command.params
        if isinstance(one, click.Option)
        and one.name is not None
        and one.name not in names
        and context.get_parameter_source(one.name) is ParameterSource.COMMANDLINE
    ]
