"""The options of ``phalanx serve``, and which of them go together."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import click

from phalanx.cli.errors import Bytes, DeviceName, DtypeName, HostName, TrustCode
from phalanx.command import Argument, AsJson, ExistingFile, Heading, Option, given_options
from phalanx.run.directory.paths import is_published
from phalanx.run.fields import FRACTION, NOT_NEGATIVE, POSITIVE, ValueRange
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.traffic.events import Role

# Workers on the command line: ``2``, or ``prefill:1,decode:2``; and into how many processes each divides the model.


MOST_WORKERS = 256


class WorkerRoles(click.ParamType[tuple[Role, ...]]):
    """The role of each worker."""

    name = "workers"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Role, ...]:
        """Parse ``2`` or ``prefill:1,decode:2`` into the role of each worker, in order; a plain number means both
        roles.

        Fails for a missing count, an unknown role, or more than ``MOST_WORKERS`` workers.
        """
        roles: list[Role] = []
        for part in str(value).split(","):
            name, _, count = part.strip().rpartition(":")
            role = next((known_role for known_role in get_args(Role) if known_role == (name or "both")), None)
            if role is None or not count.isdecimal() or int(count) < 1:
                self.fail(
                    f"{part.strip()!r}: write how many workers there are, 2, or how many of each role, prefill:1,decode:2 "
                    "(roles: prefill, decode, both)",
                    param,
                    ctx,
                )
            if len(roles) + int(count) > MOST_WORKERS:
                self.fail(f"more than {MOST_WORKERS} workers on one machine", param, ctx)
            roles += [role] * int(count)
        return tuple(roles)


@dataclass(frozen=True)
class Degrees:
    """Number of processes that a model is divided into."""

    every: int = 1
    """Degree of a worker of any role, and of a service without workers."""
    by_role: Mapping[Role, int] = field(default_factory=dict)
    """Degrees by role, if roles are named. Workers of other roles are not divided."""

    def of(self, role: Role) -> int:
        """The degree of a worker that starts in this role."""
        return self.by_role.get(role, self.every)

    @property
    def most(self) -> int:
        """The largest degree."""
        return max((self.every, *self.by_role.values()))


UNDIVIDED = Degrees()
"""One process."""


class RoleDegrees(click.ParamType[Degrees]):
    """A number of processes, or one for each role."""

    name = "processes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Degrees:
        """Parse ``2`` (all roles) or ``prefill:2,decode:1`` (others 1) into degrees.

        Fails for a value that is no positive number, an unknown role, or a role that is named twice.
        """
        if isinstance(value, Degrees):
            return value
        text = str(value).strip()
        if text.isdecimal() and int(text) > 0:
            return Degrees(int(text))
        degrees: dict[Role, int] = {}
        for part in text.split(","):
            name, _, count = part.strip().partition(":")
            role = next((known_role for known_role in get_args(Role) if known_role == name), None)
            if role is None or role in degrees or not count.isdecimal() or int(count) < 1:
                self.fail(
                    f"{part.strip()!r}: write how many processes there are, 2, or how many a worker of each role has, prefill:2,decode:1 "
                    "(roles: prefill, decode, both)",
                    param,
                    ctx,
                )
            degrees[role] = int(count)
        return Degrees(1, degrees)


# The options.


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    run_dir: Annotated[Path | None, Argument(metavar="PLACE")] = None
    step: Annotated[int | None, Heading("Model")] = None
    """A step other than the newest."""
    name: str | None = None
    """The model's name for clients. Without it, the name of PLACE."""
    host: Annotated[str, HostName(), Heading("Address")] = "127.0.0.1"
    """Address; any but a loopback one needs --key-file."""
    port: Annotated[int, ValueRange(at_least=0, at_most=65535)] = 8000
    """Port (0: any)."""
    dtype: Annotated[str, DtypeName(), Heading("Computation")] = "float32"
    context: Annotated[int | None, ValueRange(at_least=2)] = None
    """Most tokens of a request. Without it, the limit that an imported model's publisher gives, else the training
    sequence length.
    """
    memory: Annotated[int | None, Bytes()] = None
    """Memory of keys and values: 2GiB, 500MiB (1GiB). The running texts' own copies take half of it, or more with --kv
    int8 and fp8. On a GPU, of its memory. With --stream, of the whole process (four fifths of the free memory).
    """
    stream: bool = False
    """Read the weights during computation; for models larger than memory."""
    rows: Annotated[int, ValueRange(at_least=16)] = 256
    """Most tokens per pass."""
    numerics: Literal["exact", "fast"] = "exact"
    """exact: a token's bits depend on its request and the weights alone, on any CPU. fast: they may depend on more."""
    device: Annotated[str, DeviceName()] = "auto"
    """Device: cpu, cuda, or one GPU, cuda:1. auto: with --numerics fast a GPU if there is one, else the CPU. Of --workers, each takes the next
    GPU."""
    kv: Literal["compute", "int8", "fp8"] = "compute"
    """Storage format of keys and values: as computed, or with 8 bits, which changes log-probabilities."""
    drafts: Annotated[int | None, NOT_NEGATIVE] = None
    """Tokens that the model's multi-token prediction drafts in each pass, which changes no text. Without it,
    model.mtp_depth of the run.
    """
    follow: Annotated[Literal["recompute", "mixed"] | None, Heading("Model")] = None
    """Switch to each newer checkpoint of the run. Keys and values of running texts are computed again by the new
    weights (recompute), or kept (mixed).
    """
    workers: Annotated[tuple[Role, ...] | None, WorkerRoles(), Heading("Workers")] = None
    """Processes that compute: 2, or prefill:1,decode:2. Without it, this process computes."""
    threads: Annotated[int, NOT_NEGATIVE] = 0
    """Threads of each process of --workers. Without it, the processors are divided among them."""
    pages: Literal["auto", "socket", "nixl"] = "auto"
    """Transport of keys and values between --workers. auto: shared memory, else sockets. socket: never shared
    memory. nixl: NIXL (pip install 'phalanx-train[nixl]'), else sockets.
    """
    pipeline: Annotated[
        Degrees, RoleDegrees(), Option(default="1"), Heading("Processes that share the model")
    ] = UNDIVIDED
    """Processes that share the layers, for models larger than the memory of one. With --workers, of each worker, or prefill:2,decode:1."""
    tensor: Annotated[Degrees, RoleDegrees(), Option(default="1")] = UNDIVIDED
    """Processes that share each layer: its heads, inner elements, and experts. With --workers, of each worker, or prefill:2,decode:1."""
    stages_at: Annotated[str, Option(metavar="HOST:PORT")] = ""
    """Address where the other processes of --pipeline or --tensor join from their machines (--join). Without it
    they are started here.
    """
    stage_timeout: Annotated[float, ValueRange(at_least=1, at_most=86400)] = 30.0
    """Seconds without a heartbeat after which one of these processes counts as lost."""
    join: Annotated[str, Option(metavar="HOST:PORT")] = ""
    """Join the --pipeline or --tensor server that waits there, and compute the part that it assigns."""
    token_file: Path | None = None
    """With --stages-at and --join: a file of at least 16 characters, shared by both sides and secret."""
    audit: Annotated[float, FRACTION, Option(show_default=True), Heading("Workers")] = 0.0
    """Share of texts that another of --workers scores again, to compare bits."""
    requests: Annotated[int, POSITIVE, Heading("Requests")] = 256
    """Most texts at a time; further requests get status 429."""
    chat_template: ExistingFile | None = None
    """Jinja file that replaces the model's chat template."""
    trust_code: Annotated[TrustCode, Heading("Model")] = False
    drain_s: Annotated[float, NOT_NEGATIVE, Heading("Requests")] = 60.0
    """Seconds for running requests at SIGTERM."""
    as_json: AsJson = False
    """Print the address and worker events as JSON lines."""
    key_file: Annotated[Path | None, Heading("Keys")] = None
    """File with the hashes of the clients' keys."""
    new_key: Annotated[Path | None, Option(metavar="FILE")] = None
    """Make a key, add its hash to FILE, print it, and end."""
    key_name: str = ""
    """With --new-key: the key's name in metrics and messages."""
    key_limits: Annotated[str, Option(metavar="LIMITS")] = ""
    """With --new-key: requests=60,tokens=100000,concurrent=4 (the first two in a minute)."""

    @property
    def divided(self) -> str:
        """The option that divides the model over several processes; empty if none does."""
        return "--pipeline" if self.pipeline.most > 1 else "--tensor" if self.tensor.most > 1 else ""


_PAGES_BYTES = 1 << 30


def served_run(options: ServeOptions, run_dir: Path) -> ServedRun:
    """Describe the computation, as every process of the service gets it.

    Without ``--memory``, pages get ``_PAGES_BYTES``, or the rest if weights are streamed.
    """
    memory_bytes = (0 if options.stream else _PAGES_BYTES) if options.memory is None else options.memory
    return ServedRun(
        str(run_dir),
        options.step,
        options.dtype,
        options.context,
        memory_bytes,
        options.rows,
        options.numerics,
        drafts=options.drafts,
        kept=options.kv,
        stream=options.stream,
        stages=options.pipeline.every,
        tensor=options.tensor.every,
        silence_s=options.stage_timeout,
        stages_at=options.stages_at,
        token_file=str(options.token_file or ""),
        texts=options.requests,
        device=options.device,
        chat_template=str(options.chat_template or ""),
    )


def require_consistent(options: ServeOptions, path: Path) -> None:
    """Raise UsageError for options that contradict each other or the kind of place: a run directory, a pack or a published folder."""
    _require_workers(options)
    if options.memory == 0:
        raise click.UsageError("--memory 0 has no room for keys and values: give more, such as 1GiB")
    divided, workers = options.divided, options.workers or ()
    for option, degrees in (("--pipeline", options.pipeline), ("--tensor", options.tensor)):
        if degrees.by_role and not workers:
            raise click.UsageError(
                f"{option} names roles, which are those of --workers: give that, or {option} one number"
            )
        if unknown := sorted(set(degrees.by_role) - set(workers)):
            role_names = ", ".join(dict.fromkeys(workers))
            raise click.UsageError(
                f"{option} names the role {' or '.join(unknown)}, which no worker of --workers has: its roles are {role_names}"
            )
    if any(options.pipeline.of(role) > 1 < options.tensor.of(role) for role in workers or ("both",)):
        raise click.UsageError("--tensor shares out each layer, and --pipeline the layers: give one of them")
    if math.isnan(options.stage_timeout):
        raise click.UsageError("--stage-timeout nan is no time: give seconds, from 1 to 86400")
    if not divided and "stage_timeout" in given_options():
        raise click.UsageError(
            "--stage-timeout is for the processes of --pipeline or --tensor: give one of them, 2 or more"
        )
    if divided and (options.stream or options.drafts or path.is_file()):
        raise click.UsageError(
            f"{divided} divides the model of a run directory, which drafts nothing then: leave out --stream and --drafts, and give no pack"
        )
    if options.follow:
        if options.divided:
            raise click.UsageError(
                f"--follow exchanges the weights of one process: leave out {options.divided}"
            )
        if options.workers or options.step is not None or options.stream or path.is_file():
            raise click.UsageError(
                "--follow switches to newer steps of a run directory in this process: leave out --workers (all workers hold the same weights), "
                "--step and --stream, and give the run's directory, not a pack"
            )
    if is_published(path):
        _require_for_published(options, path)


def _require_for_published(options: ServeOptions, path: Path) -> None:
    """Raise UsageError for ``--follow``, ``--stream`` or ``--stages-at``, none of which the Hugging Face folder ``path`` permits."""
    if options.follow:
        raise click.UsageError(f"{path} is a published model, which saves no newer steps: leave out --follow")
    if options.stream:
        raise click.UsageError(
            f"--stream reads weights in the order of layers, as a pack has them: phalanx pack {shlex.quote(str(path))} --out NEW.pack, and serve that"
        )
    if options.stages_at:
        raise click.UsageError(f"--stages-at: {another_machine(path)}")


def another_machine(path: Path) -> str:
    """Return why a Hugging Face folder cannot be divided over several machines, and the alternative."""
    return (
        f"that two machines have the same files of {path} is not looked at: make it a run directory on each (phalanx import "
        f"{shlex.quote(str(path))} --out RUN_DIR), whose checkpoints are compared"
    )


def _require_workers(options: ServeOptions) -> None:
    """Raise UsageError for an empty name, options of worker processes without ``--workers``, and those that need two of them."""
    if options.name == "":
        raise click.UsageError("--name is empty: leave it out for the name of PLACE")
    if not options.workers and (options.threads or options.audit):
        raise click.UsageError("--threads and --audit are for --workers")
    if len(options.workers or ()) < 2 and "pages" in given_options():
        raise click.UsageError(
            "--pages sets how workers take keys and values from one another: it needs --workers 2 or more"
        )
    if options.audit and len(options.workers or ()) < 2:
        raise click.UsageError("--audit has another worker score a text again: it needs --workers 2 or more")


def require_stage_options(options: ServeOptions) -> None:
    """Raise UsageError unless ``--token-file`` comes with exactly one of ``--stages-at`` and ``--join``; also if all three are missing.
    ``--join`` excludes all other options; ``--stages-at`` needs a divided model without ``--workers``.
    """
    if options.token_file is None:
        raise click.UsageError("--stages-at and --join need --token-file, a file that both sides have")
    if options.join:
        beside = ("run_dir", "join", "token_file")
        if others := [name for field, name in given_options().items() if field not in beside]:
            raise click.UsageError(
                f"--join takes part in another server, which decides what to compute: leave out {', '.join(others)}"
            )
        return
    if not options.stages_at:
        raise click.UsageError("--token-file is for --stages-at and --join")
    if not options.divided:
        raise click.UsageError(
            "--stages-at is where the other processes of --pipeline or --tensor join: give one of them, 2 or more"
        )
    if options.workers:
        raise click.UsageError(
            "--stages-at is for one server: with --workers, stages are started on this machine"
        )
