"""Runs whose data, cache and checkpoints lie in a store that fails, on fleets that are killed and change their size meanwhile."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from bench.fleet.outside import programs
from phalanx.cli.fleet.fleet_command import send_request
from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.data.reading.cached_dataset import CachedShards, CacheOptions, open_cached
from phalanx.data.stored.index import TRAIN
from phalanx.fleet.core.messages import Grow, Shrink
from phalanx_process import TIMEOUT_S, steps_done
from store.faulty_proxy import FaultyProxy


def scattered_dataset(folder: Path, megabytes: int, shards: int) -> Path:
    """A dataset of so many blocks, in several shards, that a short run still reads new ones when it ends."""
    chance = random.Random(5)
    documents = [Document(f"document-{n}", chance.randbytes(5_000).hex()) for n in range(100 * megabytes)]
    tokens = sum(len(document.text) + 1 for document in documents)
    prepare(documents, folder, tokenizer="bytes", held_out_fraction=0.01, shard_tokens=tokens // shards)
    return folder


def fill_half(url: str, cache: Path) -> None:
    """Fills the first half of a dataset's cache, and damages part of that as a killed writer and a bad disk would."""
    dataset = open_cached(url, CacheOptions(str(cache)))
    tokens = CachedShards(dataset, TRAIN)
    tokens.read(0, tokens.tokens // 2)
    first, *_ = sorted(dataset.folder.glob("*.bin"))
    with first.open("r+b") as shard:
        shard.seek(1000)
        shard.write(b"not what was written")
        shard.seek(-4096, os.SEEK_END)
        shard.truncate()


@dataclass(frozen=True)
class Mishap:
    """An event that befalls a run once ``at_step`` is in its event stream: "shrink", "grow", "outage", or a program of the fleet that is killed."""

    at_step: int
    kind: str


def drawn(seed: int, steps: int) -> list[Mishap]:
    """Three processes killed, the store away, and the fleet made smaller and larger again, in an order that the seed draws."""
    chance = random.Random(seed)
    kinds = ["agent", "worker", "shrink", "grow", "outage", chance.choice(("agent", "worker", "coordinator"))]
    chance.shuffle(kinds)
    smaller, larger = sorted((kinds.index("shrink"), kinds.index("grow")))
    kinds[smaller], kinds[larger] = "shrink", "grow"
    places = sorted(chance.sample(range(2, steps - 4), len(kinds)))
    return [Mishap(place, kind) for place, kind in zip(places, kinds, strict=True)]


def befall(
    process: subprocess.Popen[str],
    run_dir: Path,
    mishaps: Sequence[Mishap],
    proxy: FaultyProxy,
    chance: random.Random,
    outage_s: float = 3.0,
) -> list[Mishap]:
    """Lets ``mishaps`` befall a run in turn; returns those that did before it ended. The store is away for ``outage_s``."""
    happened: list[Mishap] = []
    port, back_s = proxy.upstream_port, math.inf
    deadline_s = time.monotonic() + TIMEOUT_S
    while process.poll() is None and (len(happened) < len(mishaps) or back_s < math.inf):
        if time.monotonic() > deadline_s:
            process.kill()
            raise TimeoutError(f"step {steps_done(run_dir)} after {TIMEOUT_S} s; so far {happened}")
        if time.monotonic() > back_s:
            proxy.upstream_port, back_s = port, math.inf
        time.sleep(0.05)
        if len(happened) == len(mishaps) or steps_done(run_dir) < mishaps[len(happened)].at_step:
            continue
        mishap = mishaps[len(happened)]
        if mishap.kind == "outage":
            proxy.upstream_port, back_s = 1, time.monotonic() + outage_s  # nothing answers there
        elif not _done(mishap.kind, process.pid, run_dir, chance):
            continue
        happened.append(mishap)
    proxy.upstream_port = port
    return happened


def _done(kind: str, launcher: int, run_dir: Path, chance: random.Random) -> bool:
    """True if a process was killed, or the coordinator has agreed to another size; it may be gone just now."""
    if kind in ("shrink", "grow"):
        with suppress(click.ClickException):
            request = Shrink(1, ()) if kind == "shrink" else Grow(1)
            return send_request(run_dir, request, None).startswith("accepted")
        return False
    victims = programs(launcher)[kind]
    if victims:
        with suppress(ProcessLookupError):
            os.kill(chance.choice(victims), signal.SIGKILL)
    return bool(victims)
