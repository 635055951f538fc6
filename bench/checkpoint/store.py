"""Cost of an object store's client, against botocore; and copies and restores of checkpoints, against the library's plain calls.

All in one run against one server on this machine (ministack, started here, or the store of the environment with ``--url``), in
rounds; the figures are medians of ratios within rounds: other work on the machine moves all of a round together. Processor time is this
process's own; the server's is not in it. botocore is the base of boto3, without its managed transfers.

    python -m bench.checkpoint.store [--json] [--rounds 5] [--mib 64] [--url s3://bucket/prefix]
"""

import argparse
import json
import os
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import obstore
import torch
from obstore.store import S3Store

from bench.checkpoint.write import plain_shards
from bench.running import run_bench
from phalanx.checkpoint.committed.copying import copy_step
from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.store.open_store import open_store
from store.servers import ministack

RECORD_BYTES, READS, AT_ONCE = 32 << 10, 256, 32
BLOCK_BYTES, THREADS = 8 << 20, 8


@dataclass(frozen=True)
class Cost:
    """Seconds on the clock, and of this process's processor time."""

    wall_s: float
    cpu_s: float


def cost_of(work: Callable[[], object]) -> Cost:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall_s, time.process_time() - cpu_s)


@contextmanager
def server() -> Iterator[str]:
    """Start a ministack with a bucket, and set the environment to it. Yields the bucket's URL."""
    with tempfile.TemporaryDirectory() as folder, ministack(Path(folder) / "ministack") as started:
        os.environ |= started.environment
        yield started.url("bench")


class Bench:
    """One place in one store, seen by our store, by the library alone and by botocore."""

    def __init__(self, url: str, nbytes: int, folder: Path) -> None:
        import botocore.session

        self.url = f"{url}/{secrets.token_hex(4)}"
        self.store = open_store(self.url)
        parts = urlsplit(self.url)
        insecure = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        self.raw = S3Store(
            parts.netloc,
            prefix=parts.path.strip("/"),
            client_options={"allow_http": insecure, "timeout": "5m"},
        )
        self.bucket, self.prefix = parts.netloc, parts.path.strip("/")
        self.boto: Any = botocore.session.get_session().create_client(
            "s3", endpoint_url=os.environ.get("AWS_ENDPOINT_URL"), region_name=os.environ.get("AWS_REGION")
        )
        self.data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
        self.store.put("data", self.data)
        # Far enough apart not to be joined.
        starts = random.Random(0).sample(range(0, nbytes - RECORD_BYTES, 128 << 10), READS)
        self.spans = [(start, start + RECORD_BYTES) for start in starts]
        self.state = {f"model/{i}": torch.randn(nbytes // 16 // 4) for i in range(16)}
        self.blank = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        self.disk = DiskTier(folder)
        saver = AsyncSaver(self.disk, 0, 1)
        saver.save(1, plain_shards(self.state), {})
        saver.close()
        self.image = (self.disk.folder(1) / "rank-00000.safetensors").read_bytes()
        self.tier = ObjectTier(self.store)

    def one_round(self) -> dict[str, Cost]:
        full_box = memoryview(self.data)
        costs = {
            "ranges": cost_of(self.our_ranges),
            "ranges_boto": cost_of(lambda: [self.boto_get(a, b) for a, b in self.spans]),
            "put": cost_of(lambda: self.store.put("again", full_box)),
            "put_boto": cost_of(
                lambda: self.boto.put_object(Bucket=self.bucket, Key=f"{self.prefix}/boto", Body=self.data)
            ),
            "get": cost_of(lambda: self.store.get("data")),
            "get_boto": cost_of(lambda: self.boto_get(0, len(self.data))),
            "upload": cost_of(lambda: copy_step(self.disk, 1, self.tier)),
            "upload_raw": cost_of(self.raw_upload),
            "restore": cost_of(lambda: restore(self.tier, 1, plain_shards(self.blank))),
            "restore_raw": cost_of(self.raw_download),
        }
        assert all(torch.equal(self.blank[name], self.state[name]) for name in self.state)
        self.tier.delete(1)
        return costs

    def our_ranges(self) -> None:
        for first in range(0, READS, AT_ONCE):
            self.store.ranges("data", self.spans[first : first + AT_ONCE])

    def boto_get(self, start: int, stop: int) -> bytes:
        answer = self.boto.get_object(
            Bucket=self.bucket, Key=f"{self.prefix}/data", Range=f"bytes={start}-{stop - 1}"
        )
        content: bytes = answer["Body"].read()
        return content

    def raw_upload(self) -> None:
        obstore.put(self.raw, "raw", self.image, chunk_size=16 << 20, max_concurrency=4)

    def raw_download(self) -> None:
        def fetch(start: int) -> int:
            stop = min(start + BLOCK_BYTES, len(self.image))
            return len(obstore.get_range(self.raw, "raw", start=start, end=stop))

        with ThreadPoolExecutor(THREADS) as pool:
            assert sum(pool.map(fetch, range(0, len(self.image), BLOCK_BYTES))) == len(self.image)


def report(rounds: list[dict[str, Cost]], nbytes: int) -> dict[str, float]:
    def median(of: Callable[[dict[str, Cost]], float]) -> float:
        return round(statistics.median(map(of, rounds)), 3)

    megabytes = nbytes / 1e6
    return {
        "range_cpu_us": median(lambda r: r["ranges"].cpu_s / READS * 1e6),
        "range_cpu_us_botocore": median(lambda r: r["ranges_boto"].cpu_s / READS * 1e6),
        "range_cpu_over_botocore": median(lambda r: r["ranges"].cpu_s / r["ranges_boto"].cpu_s),
        "ranges_per_cpu_s": median(lambda r: READS / r["ranges"].cpu_s),
        **{
            f"{operation}_{unit}{peer}": median(
                lambda r, key=f"{operation}{peer}", unit=unit: megabytes / getattr(r[key], f"{unit}_s")
            )
            for operation in ("put", "get")
            for peer in ("", "_boto")
            for unit in ("wall", "cpu")
        },
        "upload_over_raw": median(lambda r: r["upload_raw"].wall_s / r["upload"].wall_s),
        "upload_mb_per_s": median(lambda r: megabytes / r["upload"].wall_s),
        "restore_over_raw": median(lambda r: r["restore_raw"].wall_s / r["restore"].wall_s),
        "restore_mb_per_s": median(lambda r: megabytes / r["restore"].wall_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=64, help="size of the object and of the checkpoint")
    parser.add_argument("--url", default="", help="a place in another S3 store, as the environment says")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, nullcontext(args.url) if args.url else server() as url:
        bench = Bench(url, args.mib << 20, Path(folder))
        bench.one_round()  # warms connections and memory
        rounds = [bench.one_round() for _ in range(args.rounds)]
    figures = report(rounds, args.mib << 20)
    if args.json:
        print(
            json.dumps({**figures, "rounds": [{k: asdict(v) for k, v in costs.items()} for costs in rounds]})
        )
        return
    for name, value in figures.items():
        print(f"  {name:26} {value:10.3f}")


if __name__ == "__main__":
    run_bench(main)
