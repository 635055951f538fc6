"""Starts what ``phalanx serve`` was asked for, and says what becomes of it."""

from __future__ import annotations

import json
import platform
import socket
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import structs

from phalanx.cli.errors import explained
from phalanx.cli.run_folder import demand_folder
from phalanx.cli.weights.options import require_trusted_code
from phalanx.cli.weights.service.worker_roles import Degrees
from phalanx.run.directory.paths import is_published
from phalanx.serve.served.served_run import ServedRun
from phalanx.traffic.events import Role

if TYPE_CHECKING:
    from phalanx.serve.engine.engine import KeptPages
    from phalanx.serve.http.worker import WorkerPort
    from phalanx.serve.prompt import ModelText
    from phalanx.serve.workers.page_client import PageWay
    from phalanx.serve.workers.service import Notice


class Said:
    """What is printed while serving: standard output says where it listens, standard error what happens to workers; or all as lines of JSON."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def listening(self, model: str, url: str) -> None:
        """The service takes requests at ``url``."""
        if self._as_json:
            self._line({"event": "listening", "model": model, "url": url})
        else:
            click.echo(f"{model} at {url} (Ctrl-C finishes what goes on, then ends)")

    def notice(self, notice: Notice) -> None:
        """Something has happened to a worker."""
        if self._as_json:
            self._line({"event": notice.event, "text": notice.text, **notice.facts})
        else:
            self.text(notice.text)

    def text(self, text: str) -> None:
        """For people, whatever the form."""
        click.echo(text, err=True)

    @staticmethod
    def _line(content: dict[str, object]) -> None:
        click.echo(json.dumps(content))


@dataclass(frozen=True)
class Start:
    """A service as it was asked for."""

    served: ServedRun
    name: str | None
    host: str
    port: int
    key_file: Path | None
    follow: KeptPages | None
    """What becomes of texts that go on when newer weights take over; ``None``: none do."""
    workers: tuple[Role, ...]
    """The roles of processes that compute; none where this one does."""
    threads: int
    audit: float
    requests: int
    drain_s: float
    pipeline: Degrees
    """With workers, into how many processes one of each role divides the layers, """
    tensor: Degrees
    """and each layer."""
    pages: PageWay = "auto"
    """How they take pages from one another."""
    trust_code: bool = False
    """True if code that the run names may be run, whoever's it is."""


def make_key(file: Path, name: str, limits: str) -> None:
    """Adds a new key's hash to ``file``, and prints the key."""
    from phalanx.serve.http.keys import KeyFileError, add_key, parse_limits

    with explained(KeyFileError):
        click.echo(add_key(file, name, parse_limits(limits)))


def join_stages(run_dir: Path, at: str, token_file: Path) -> None:
    """Is a stage of the server at ``at`` until that ends, with weights from the run in ``run_dir``."""
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx.serve.engine.errors import EngineError
    from phalanx.serve.stages.door import address, read_token
    from phalanx.serve.stages.stage_main import StageTask, join
    from phalanx.wire.messages import WireError

    with explained(CheckpointError, EngineError, WireError, OSError):
        host, port = address(at, "--join")
        require_trusted_code(run_dir, trust_code=False)
        why = join(StageTask(host, port, read_token(token_file), -1), run_dir)
        if why:
            raise EngineError(why)
    click.echo(f"the server at {at} has ended", err=True)


def start(asked: Start, said: Said) -> None:
    """Serves until a signal. Raises UsageError for an address that is open to others without keys, ClickException for what cannot be served."""
    from phalanx.hardware.local.network import ListenError, is_private, listen

    if asked.key_file is None and not is_private(asked.host):
        raise click.UsageError(
            f"--host {asked.host} is open to others: give --key-file (made by phalanx serve --new-key FILE)"
        )
    path = asked.served.path
    if not path.exists():
        demand_folder(path)
    with explained(ListenError):
        # Before PyTorch is imported: a port that is taken is told at once.
        sock = listen(asked.host, asked.port)
    with closing(sock):
        if not is_published(path):
            _start(asked, said, sock)
            return
        from phalanx.checkpoint.format.errors import CheckpointError
        from phalanx.checkpoint.interop.huggingface.stored.stand_in import stand_in

        with explained(CheckpointError), stand_in(path) as found:
            for note in found.notes:
                said.text(f"note: {note}")
            _start(replace(asked, served=structs.replace(asked.served, run_dir=str(found.path))), said, sock)


def _start(asked: Start, said: Said, sock: socket.socket) -> None:
    """Serves a run's directory, or a pack, at ``sock``."""
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx.data.errors import TokenizerError
    from phalanx.model.custom import CustomModelError
    from phalanx.observe.serving import ServingNote
    from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
    from phalanx.run.peers.addresses import loopback_names
    from phalanx.serve.engine.errors import EngineError
    from phalanx.serve.http.admission import Limits
    from phalanx.serve.http.app import Gateway
    from phalanx.serve.http.keys import KeyFileError, read_keys
    from phalanx.serve.http.server import serve, serving_of
    from phalanx.serve.served.of_run import served_folder

    path = asked.served.path
    directory = RunDirectory(path)
    kinds = (CheckpointError, TokenizerError, RunDirectoryError, EngineError, KeyFileError, CustomModelError)
    with explained(*kinds):
        with served_folder(asked.served) as folder:
            require_trusted_code(folder, trust_code=asked.trust_code, place=path if path.is_file() else None)
        keys = None if asked.key_file is None else read_keys(asked.key_file)
        model, worker = _opened(asked, said)
        if model.note:
            said.text(model.note)
        # A server of other machines has keys, which no web page has.
        hosts = () if keys is not None else loopback_names(asked.host)
        gateway = Gateway(model, worker, keys, Limits(requests=asked.requests), hosts=hosts)
        shown = f"[{asked.host}]" if ":" in asked.host else asked.host
        port = sock.getsockname()[1]
        url = f"http://{shown}:{port}/v1"
        note = None
        # Not of a pack, which may be anywhere, nor of what stands in for a published model, which nobody sees.
        if directory.run_file.is_file() and not directory.weights_elsewhere.exists():
            note = ServingNote(directory, f"{platform.node()}-{port}", partial(serving_of, gateway, url))
        said.listening(model.name, url)
        serve(gateway, sock, drain_s=asked.drain_s, tell=said.text, note=note)


def _opened(asked: Start, said: Said) -> tuple[ModelText, WorkerPort]:
    """The model's words and what computes: processes, or an engine in this one, which may go on to newer steps."""
    from phalanx.serve.served.of_run import open_followed, open_run
    from phalanx.serve.workers.service import WorkerDivision, devices_of, open_service

    if asked.workers:
        divisions = {
            role: WorkerDivision(asked.pipeline.of(role), asked.tensor.of(role)) for role in asked.workers
        }
        places = devices_of(asked.served, len(asked.workers), divisions)
        if {*asked.workers} in ({"prefill"}, {"decode"}):
            said.text(f"all workers are {asked.workers[0]} workers: they also do what the other role would")
        # By their names alone: asking a GPU for more begins CUDA, and this process computes nothing.
        said.text(f"computing on {', '.join(map(str, places))}")
        return open_service(
            asked.served,
            asked.name,
            asked.workers,
            divisions=divisions,
            threads=asked.threads,
            audit_share=asked.audit,
            tell=said.notice,
            pages=asked.pages,
        )
    if asked.follow:
        return open_followed(asked.served, asked.name, asked.follow, said.text)
    return open_run(asked.served, asked.name, said.text)
