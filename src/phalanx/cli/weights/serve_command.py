"""``phalanx serve``: a run's model behind OpenAI's HTTP interface."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from phalanx.cli.errors import explained
from phalanx.cli.weights.memory_option import Bytes
from phalanx.cli.weights.worker_roles import WorkerRoles
from phalanx.traffic.events import Role

if TYPE_CHECKING:
    from phalanx.serve.workers.router_port import Notice


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
            click.echo(notice.text, err=True)

    def text(self, text: str) -> None:
        """For people, whatever the form."""
        click.echo(text, err=True)

    @staticmethod
    def _line(content: dict[str, object]) -> None:
        click.echo(json.dumps(content))


@click.command("serve")
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
@click.option("--step", type=int, help="A step other than the newest.")
@click.option("--name", help="What clients call the model. Without it, the name of RUN_DIR.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address; any but a loopback one needs --key-file."
)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port (0: any).")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@click.option(
    "--context",
    type=click.IntRange(2),
    help="Most tokens of a request. Without it, those of a training sequence.",
)
@click.option(
    "--memory",
    type=Bytes(),
    default="1GiB",
    show_default=True,
    help="What keys and values may take: 2GiB, 500MiB. As much again goes to texts that are being computed.",
)
@click.option(
    "--rows",
    default=256,
    show_default=True,
    type=click.IntRange(16),
    help="Most tokens that a pass computes.",
)
@click.option(
    "--numerics",
    default="exact",
    show_default=True,
    type=click.Choice(["exact", "fast"]),
    help="exact: a token's bits do not depend on what is computed beside it. fast: they may.",
)
@click.option(
    "--workers",
    type=WorkerRoles(),
    help="Processes that compute: 2, or prefill:1,decode:2. Without it, this process does.",
)
@click.option(
    "--threads",
    default=0,
    type=click.IntRange(0),
    help="Threads of each of --workers. Without it, the processors are divided among them.",
)
@click.option(
    "--audit",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share of texts that another of --workers scores again, to compare bits.",
)
@click.option(
    "--requests",
    default=256,
    show_default=True,
    type=click.IntRange(1),
    help="Most texts at a time; more are sent away (429).",
)
@click.option(
    "--drain-s",
    default=60.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds for what goes on at SIGTERM.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print what listens where, and what becomes of workers, as lines of JSON.",
)
@click.option(
    "--key-file", type=click.Path(path_type=Path), help="Hashes of the keys that clients must have."
)
@click.option(
    "--new-key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Make a key, add its hash to FILE, print it, and end.",
)
@click.option("--key-name", default="", help="With --new-key: the name that metrics and messages call it by.")
@click.option(
    "--key-limits",
    default="",
    metavar="LIMITS",
    help="With --new-key: requests=60,tokens=100000,concurrent=4 (the first two in a minute).",
)
def command(
    run_dir: Path | None,
    step: int | None,
    name: str | None,
    host: str,
    port: int,
    dtype: str,
    context: int | None,
    memory: int,
    rows: int,
    numerics: Literal["exact", "fast"],
    workers: tuple[Role, ...] | None,
    threads: int,
    audit: float,
    requests: int,
    drain_s: float,
    as_json: bool,
    key_file: Path | None,
    new_key: Path | None,
    key_name: str,
    key_limits: str,
) -> None:
    """Serve the model of RUN_DIR: /v1/completions, /v1/chat/completions, /v1/models, /health, /ready, /metrics.

    Ctrl-C or SIGTERM takes nothing new and finishes what goes on; a second one ends. Prompts are not logged.

    \b
      phalanx serve runs/quickstart-1f3a9c04
      phalanx serve runs/quickstart-1f3a9c04 --workers prefill:1,decode:2
      phalanx serve --new-key keys.txt --key-name alice --key-limits requests=60,concurrent=4
      phalanx serve runs/quickstart-1f3a9c04 --host 0.0.0.0 --key-file keys.txt
    """
    from phalanx.serve.gateway.access.keys import KeyFileError, add_key, parse_limits, read_keys

    if new_key is not None:
        with explained(KeyFileError):
            click.echo(add_key(new_key, key_name, parse_limits(key_limits)))
        return
    if key_name or key_limits:
        raise click.UsageError("--key-name and --key-limits are for --new-key FILE")
    if run_dir is None:
        raise click.UsageError("give a run directory")
    if run_dir.is_file():
        raise click.UsageError(
            f"{run_dir} is a file, and a run directory is served: a pack (phalanx pack) is read by phalanx generate PACK --stream"
        )
    from phalanx.watch.page.guard import is_loopback

    if key_file is None and not is_loopback(host):
        raise click.UsageError(
            f"--host {host} is open to others: give --key-file (made by phalanx serve --new-key FILE)"
        )
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx.data.errors import TokenizerError
    from phalanx.run.directory.paths import RunDirectoryError
    from phalanx.serve.engine.errors import EngineError
    from phalanx.serve.gateway.access.admission import Limits
    from phalanx.serve.gateway.app import Gateway
    from phalanx.serve.gateway.served.of_run import open_run
    from phalanx.serve.gateway.served.served_run import ServedRun
    from phalanx.serve.gateway.server import ServerError, listen, serve
    from phalanx.serve.gateway.worker import WorkerPort
    from phalanx.serve.workers.service import open_service

    if not workers and (threads or audit):
        raise click.UsageError("--threads and --audit are for --workers")
    if audit and workers is not None and len(workers) < 2:
        raise click.UsageError("--audit has another worker score a text again: it needs --workers 2 or more")
    said = Said(as_json)
    with explained(
        CheckpointError, TokenizerError, RunDirectoryError, EngineError, KeyFileError, ServerError
    ):
        keys = None if key_file is None else read_keys(key_file)
        sock = listen(host, port)
        served = ServedRun(str(run_dir), step, dtype, context, memory, rows, numerics)
        worker: WorkerPort
        if workers:
            model, worker = open_service(
                served, name, workers, threads=threads, audit_share=audit, tell=said.notice
            )
        else:
            model, worker = open_run(served, name)
        gateway = Gateway(model, worker, keys, Limits(requests=requests))
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{sock.getsockname()[1]}/v1"
        said.listening(model.name, url)
        serve(gateway, sock, drain_s=drain_s, tell=said.text)
