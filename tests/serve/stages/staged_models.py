"""Models whose layers several processes of this machine share: kinds of them, and engines over threads that join as other machines do."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec
from phalanx_serve.served.of_run import open_engine
from phalanx_serve.served.opened import OpenedEngine
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.stages.door import StageTask, join
from serve.packed_runs import DENSE, LATENT, MIXTURE

TOKEN = "a token that nobody else has"
KINDS: dict[str, ModelSpec] = {
    "dense": DENSE,
    "tied": resolve(replace(DENSE, tie_embeddings=True, logit_cap=5.0)),
    "latent mixture": MIXTURE,
    "absorbed": replace(MIXTURE, layers=2, mla=replace(LATENT, absorbed=True)),
    "window": resolve(replace(DENSE, attention_pattern=("window", "full"), window=40)),
}


def served(run: Path, **options: object) -> ServedRun:
    base = ServedRun(str(run), None, "float32", 256, 12 << 20, 33, "exact")
    return structs.replace(base, **options)


def token_file(folder: Path, text: str = TOKEN, mode: int = 0o600) -> Path:
    file = folder / "token"
    file.write_text(text)
    file.chmod(mode)
    return file


def staged(
    run: Path, count: int, other_run: Path | None = None, notices: list[str] | None = None, **options: object
) -> OpenedEngine:
    """The engine of stages that join over the loopback, as from other machines, whenever it waits for them.

    They end with its connections. Its other messages are appended to ``notices``.
    """

    def report(text: str) -> None:
        if not text.startswith("waiting"):
            assert notices is not None, text
            notices.append(text)
            return
        port = int(text.split(":")[1].split()[0])
        task = StageTask("127.0.0.1", port, TOKEN, -1)
        for _ in range(count - 1):
            threading.Thread(target=join, args=(task, other_run or run), daemon=True).start()

    file = token_file(run.parent)
    at = {"stages_at": "127.0.0.1:0", "token_file": str(file)}
    return open_engine(served(run, **{"stages": count, **at, **options}), report)


def shared(run: Path, shares: int, **options: object) -> OpenedEngine:
    """The engine of processes that share each layer."""
    return staged(run, shares, stages=1, tensor=shares, **options)
