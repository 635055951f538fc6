"""``phalanx serve``: a run's model behind OpenAI's HTTP interface."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from phalanx.cli.address_options import HostName
from phalanx.cli.weights.options import Bytes, DeviceName, DtypeName, trust_option
from phalanx.cli.weights.service.options import another_machine, require_consistent, require_stage_options
from phalanx.cli.weights.service.start import Said, Start, join_stages, make_key, start
from phalanx.cli.weights.service.worker_roles import Degrees, RoleDegrees, WorkerRoles
from phalanx.run.directory.paths import is_published
from phalanx.serve.served.served_run import ServedRun
from phalanx.traffic.events import Role

if TYPE_CHECKING:
    from phalanx.serve.engine.engine import KeptPages
    from phalanx.serve.kv_cache.memory import KVFormatName
    from phalanx.serve.workers.page_client import PageWay

_PAGES_BYTES = 1 << 30


@click.command("serve")
@click.argument("run_dir", metavar="PLACE", required=False, type=click.Path(path_type=Path))
@click.option("--step", type=int, help="A step other than the newest.")
@click.option("--name", help="What clients call the model. Without it, the name of PLACE.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    type=HostName(),
    help="Address; any but a loopback one needs --key-file.",
)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port (0: any).")
@click.option("--dtype", default="float32", show_default=True, type=DtypeName())
@click.option(
    "--context",
    type=click.IntRange(2),
    help="Most tokens of a request. Without it, those that its publisher gives an imported model, else those of a training sequence.",
)
@click.option(
    "--memory",
    type=Bytes(),
    help="What keys and values may take: 2GiB, 500MiB (1GiB); as much again goes to texts that are being computed. On a GPU, of its memory. With "
    "--stream what the whole process may take (four fifths of what is free).",
)
@click.option(
    "--stream",
    is_flag=True,
    help="Read the weights as they are computed with; for models larger than memory.",
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
    help="exact: a token's bits depend on its request and the weights alone, on any CPU. fast: they may depend on more.",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    type=DeviceName(),
    help="What computes: cpu, cuda, or one GPU, cuda:1. auto: with --numerics fast a GPU if there is one, else the CPU. Of --workers, each takes the "
    "next GPU.",
)
@click.option(
    "--kv",
    default="compute",
    show_default=True,
    type=click.Choice(["compute", "int8", "fp8"]),
    help="How keys and values are kept: as computed, or with 8 bits, which changes log-probabilities.",
)
@click.option(
    "--drafts",
    type=click.IntRange(0),
    help="Tokens that the model's predictions ahead guess in each pass, which changes no text. Without it, model.mtp_depth of the run.",
)
@click.option(
    "--follow",
    type=click.Choice(["recompute", "mixed"]),
    help="Go on to each newer checkpoint of the run. Texts that go on: computed again by the new weights, or from old keys and values.",
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
    help="Threads of each process of --workers. Without it, the processors are divided among them.",
)
@click.option(
    "--pages",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "socket", "nixl"]),
    help="How --workers take keys and values from one another. auto: in memory that they share, else through sockets. socket: never in memory. "
    "nixl: over NIXL (pip install 'phalanx-train[nixl]'), else through sockets.",
)
@click.option(
    "--pipeline",
    default="1",
    show_default=True,
    type=RoleDegrees(),
    help="Processes that share the layers, for models larger than the memory of one. With --workers, of each worker, or prefill:2,decode:1.",
)
@click.option(
    "--tensor",
    default="1",
    show_default=True,
    type=RoleDegrees(),
    help="Processes that share each layer: its heads, inner elements, and experts. With --workers, of each worker, or prefill:2,decode:1.",
)
@click.option(
    "--stages-at",
    default="",
    metavar="HOST:PORT",
    help="Where the other processes of --pipeline or --tensor join from their machines (--join). Without it they are started here.",
)
@click.option(
    "--stage-timeout",
    default=30.0,
    show_default=True,
    type=click.FloatRange(1, 86_400),
    help="Seconds after which one of these processes that gives no sign of life is given up.",
)
@click.option(
    "--join",
    default="",
    metavar="HOST:PORT",
    help="Be one of the processes of the --pipeline or --tensor that waits there, with the part that it gives out.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="With --stages-at and --join: a file of 16 characters or more that both sides have, and nobody else.",
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
    "--chat-template",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file of Jinja that frames conversations, in the place of the model's own.",
)
@trust_option
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
    memory: int | None,
    stream: bool,
    rows: int,
    numerics: Literal["exact", "fast"],
    device: str,
    kv: KVFormatName,
    drafts: int | None,
    follow: KeptPages | None,
    workers: tuple[Role, ...] | None,
    threads: int,
    pages: PageWay,
    pipeline: Degrees,
    tensor: Degrees,
    stages_at: str,
    stage_timeout: float,
    join: str,
    token_file: Path | None,
    audit: float,
    requests: int,
    chat_template: Path | None,
    trust_code: bool,
    drain_s: float,
    as_json: bool,
    key_file: Path | None,
    new_key: Path | None,
    key_name: str,
    key_limits: str,
) -> None:
    """Serve the model of PLACE, a run directory, a pack or a folder of Hugging Face: /v1/completions, /v1/chat/completions, /v1/models, /health,
    /ready, /metrics.

    Ctrl-C or SIGTERM takes nothing new and finishes what goes on; a second one ends. Prompts are not logged.

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
    if new_key is not None:
        return make_key(new_key, key_name, key_limits)
    if key_name or key_limits:
        raise click.UsageError("--key-name and --key-limits are for --new-key FILE")
    if run_dir is None:
        raise click.UsageError("give a run directory, a pack, or a folder of Hugging Face")
    if join or stages_at or token_file:
        require_stage_options(
            max(pipeline.most, tensor.most), stages_at, join, token_file, with_workers=bool(workers)
        )
    if join and is_published(run_dir):
        raise click.UsageError(f"--join: {another_machine(run_dir)}")
    if join and token_file:
        return join_stages(run_dir, join, token_file)
    memory_bytes = (0 if stream else _PAGES_BYTES) if memory is None else max(1, memory)
    served = ServedRun(
        str(run_dir),
        step,
        dtype,
        context,
        memory_bytes,
        rows,
        numerics,
        drafts=drafts,
        kept=kv,
        stream=stream,
        stages=pipeline.every,
        tensor=tensor.every,
        silence_s=stage_timeout,
        stages_at=stages_at,
        token_file="" if token_file is None else str(token_file),
        texts=requests,
        device=device,
        chat_template="" if chat_template is None else str(chat_template),
    )
    asked = Start(
        served,
        name,
        host,
        port,
        key_file,
        follow,
        workers or (),
        threads,
        audit,
        requests,
        drain_s,
        pipeline,
        tensor,
        pages,
        trust_code,
    )
    require_consistent(asked)
    return start(asked, Said(as_json))
