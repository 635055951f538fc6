"""``phalanx serve``: a run's model behind OpenAI's HTTP interface. Starts the service and prints its events."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import structs

from phalanx.cli.errors import demand_folder, explained, refuse_unused, require_trusted_code
from phalanx.command import command_options, given_options
from phalanx.command_help import Command
from phalanx.process.this_process import host_name
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, is_published
from phalanx_serve.cli.serve_options import (
    ServeOptions,
    another_machine,
    require_consistent,
    require_stage_options,
    served_run,
)
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.traffic.events import PartLostError, ServeError

if TYPE_CHECKING:
    from phalanx_serve.http.worker import WorkerPort
    from phalanx_serve.prompt import ModelText
    from phalanx_serve.workers.service import Notice


@click.command("serve", cls=Command)
@command_options(ServeOptions)
def command(options: ServeOptions) -> None:
    """Serve the model of PLACE, a run directory, a pack or a folder of Hugging Face: /v1/completions, /v1/chat/completions, /v1/models, /health,
    /ready, /metrics.

    Ctrl-C or SIGTERM refuses new requests and finishes the running ones; a second one ends the server. Prompts are not logged.

    \b
      phalanx serve runs/quickstart-1f3a9c04
      phalanx serve runs/quickstart-1f3a9c04 --workers prefill:1,decode:2
      phalanx serve runs/quickstart-1f3a9c04 --workers prefill:1,decode:2 --pages nixl
      phalanx serve runs/quickstart-1f3a9c04 --numerics fast --device cuda --memory 20GiB --dtype bfloat16
      phalanx serve Llama-3.1-8B --numerics fast --dtype bfloat16
      phalanx serve model.pack --stream --memory 8GiB
      phalanx serve runs/quickstart-1f3a9c04 --pipeline 2
      phalanx serve runs/quickstart-1f3a9c04 --tensor 2
      phalanx serve --new-key keys.txt --key-name alice --key-limits requests=60,concurrent=4
      phalanx serve runs/quickstart-1f3a9c04 --host 0.0.0.0 --key-file keys.txt
    """
    if options.new_key is not None:
        others = [
            name
            for field, name in given_options().items()
            if field not in ("new_key", "key_name", "key_limits")
        ]
        refuse_unused(others, "--new-key writes a key, and serves nothing")
        return make_key(options.new_key, options.key_name, options.key_limits)
    if options.key_name or options.key_limits:
        raise click.UsageError("--key-name and --key-limits are for --new-key FILE")
    run_dir = options.run_dir
    if run_dir is None:
        raise click.UsageError("give a run directory, a pack, or a folder of Hugging Face")
    if options.join or options.stages_at or options.token_file:
        require_stage_options(options)
    if options.join and is_published(run_dir):
        raise click.UsageError(f"--join: {another_machine(run_dir)}")
    if options.join and options.token_file:
        return join_stages(run_dir, options.join, options.token_file)
    require_consistent(options, run_dir)
    return start(options, served_run(options, run_dir), ServePrinter(options.as_json))


# Start of the service.


class ServePrinter:
    """Printer of a running service. Prints the address on standard output and worker events on standard error, or
    both as JSON lines.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def listening(self, model: str, url: str) -> None:
        """Print that the service takes requests at ``url``."""
        if self._as_json:
            self._line({"event": "listening", "model": model, "url": url})
        else:
            click.echo(f"{model} at {url} (Ctrl-C finishes running requests, then ends)")

    def notice(self, notice: Notice) -> None:
        """Print an event of a worker: as a JSON line with its facts, or its text."""
        if self._as_json:
            self._line({"event": notice.event, "text": notice.text, **notice.facts})
        else:
            self.text(notice.text)

    def text(self, text: str) -> None:
        """Print a message on standard error, in both formats."""
        click.echo(text, err=True)

    @staticmethod
    def _line(content: dict[str, object]) -> None:
        """Print one JSON object on a line of its own."""
        click.echo(json.dumps(content))


def make_key(file: Path, name: str, limits: str) -> None:
    """Add a new key's hash to ``file``, and print the key. Raises ClickException if the file or the limits are invalid."""
    from phalanx_serve.http.admission import KeyFileError, add_key, parse_limits

    with explained(KeyFileError):
        click.echo(add_key(file, name, parse_limits(limits)))


def join_stages(run_dir: Path, at: str, token_file: Path) -> None:
    """Run a stage of the server at ``at`` until the server ends, with weights from the run in ``run_dir``; print that
    it has ended.

    Raises ClickException for an error, or for the server's reason to end; untrusted code of the run is refused.
    """
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx.wire.messages import WireError
    from phalanx_serve.stages.door import StageTask, address, join, read_token

    with explained(CheckpointError, ServeError, WireError, OSError):
        host, port = address(at, "--join")
        require_trusted_code(run_dir, trust_code=False)
        reason = join(StageTask(host, port, read_token(token_file), -1), run_dir)
        if reason:
            raise ServeError(reason)
    click.echo(f"the server at {at} has ended", err=True)


def start(options: ServeOptions, served: ServedRun, output: ServePrinter) -> None:
    """Serve until a signal.

    Raises UsageError for a public address without keys, and ClickException for a model that cannot be served, a
    missing folder or a taken port. Listens before the model is opened. A Hugging Face folder is served through a
    temporary run directory that refers to its weights.
    """
    from phalanx.hardware.local.network import ListenError, is_private, listen

    if options.key_file is None and not is_private(options.host):
        raise click.UsageError(
            f"--host {options.host} is open to others: give --key-file (made by phalanx serve --new-key FILE)"
        )
    path = served.path
    if not path.exists():
        demand_folder(path)
    with explained(ListenError):
        # Before PyTorch is imported, so that a port in use is reported at once.
        sock = listen(options.host, options.port)
    with closing(sock):
        if not is_published(path):
            _start(options, served, output, sock)
            return
        from phalanx.checkpoint.format.errors import CheckpointError
        from phalanx.checkpoint.interop.huggingface.stored_folder import stand_in

        with explained(CheckpointError), stand_in(path) as folder:
            for note in folder.notes:
                output.text(f"note: {note}")
            _start(options, structs.replace(served, run_dir=str(folder.path)), output, sock)


def _start(options: ServeOptions, served: ServedRun, output: ServePrinter, sock: socket.socket) -> None:
    """Serve a run directory or a pack at ``sock`` until a signal. Raises ClickException if it cannot be opened.

    Requires trust for the run's own code. Prints what it does, and records a note in a run directory's own folder.
    Without keys, only loopback host names are accepted.
    """
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx.data.errors import TokenizerError
    from phalanx.model.custom import CustomModelError
    from phalanx.observe.record.notes import ServingNote
    from phalanx.run.peers import loopback_names
    from phalanx_serve.http.admission import KeyFileError, read_keys
    from phalanx_serve.http.app import Gateway
    from phalanx_serve.http.limits import Limits
    from phalanx_serve.http.server import serve, serving_of
    from phalanx_serve.served.of_run import served_folder

    path = served.path
    directory = RunDirectory(path)
    kinds = (CheckpointError, TokenizerError, RunDirectoryError, ServeError, KeyFileError, CustomModelError)
    with explained(*kinds, PartLostError):
        with served_folder(served) as folder:
            require_trusted_code(
                folder, trust_code=options.trust_code, place=path if path.is_file() else None
            )
        keys = None if options.key_file is None else read_keys(options.key_file)
        model, worker = _opened(options, served, output)
        if model.note:
            output.text(model.note)
        # A server of other machines has keys, which no web page has.
        hosts = () if keys is not None else loopback_names(options.host)
        gateway = Gateway(model, worker, keys, Limits(requests=options.requests), hosts=hosts)
        shown = f"[{options.host}]" if ":" in options.host else options.host
        port = sock.getsockname()[1]
        url = f"http://{shown}:{port}/v1"
        note = None
        # Not for a pack, nor for the temporary folder of a published model.
        if directory.run_file.is_file() and not directory.weights_elsewhere.exists():
            note = ServingNote(directory, f"{host_name()}-{port}", partial(serving_of, gateway, url))
        output.listening(model.name, url)
        serve(gateway, sock, drain_s=options.drain_s, tell=output.text, note=note)


def _opened(options: ServeOptions, served: ServedRun, output: ServePrinter) -> tuple[ModelText, WorkerPort]:
    """Return the model's text side and its opened workers: processes, an engine that follows newer steps, or a plain
    engine.

    Prints the devices of worker processes.
    """
    from phalanx_serve.served.of_run import open_followed, open_run
    from phalanx_serve.workers.service import WorkerDivision, devices_of, open_service

    if workers := options.workers:
        divisions = {
            role: WorkerDivision(options.pipeline.of(role), options.tensor.of(role)) for role in workers
        }
        places = devices_of(served, len(workers), divisions)
        if {*workers} in ({"prefill"}, {"decode"}):
            output.text(f"all workers are {workers[0]} workers: they also do what the other role would")
        # By name only: querying a GPU starts CUDA, and this process computes nothing.
        output.text(f"computing on {', '.join(map(str, places))}")
        return open_service(
            served,
            options.name,
            workers,
            divisions=divisions,
            threads=options.threads,
            audit_share=options.audit,
            tell=output.notice,
            pages=options.pages,
        )
    if options.follow:
        return open_followed(served, options.name, options.follow, output.text)
    return open_run(served, options.name, output.text)
