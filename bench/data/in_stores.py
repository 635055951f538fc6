"""Training on a dataset in an object store: how long steps wait, what an outage costs, and when the first batch is there.

All requests to a real S3 server (ministack) pass a proxy whose answers are late by an exponential latency. ``waiting`` trains one small model
from a folder and from the store in turns, with a latency that lets the client's 32 requests bring twice the samples that the folder's run
needs, 5% of the requests refused (503) and 1% reset; with that latency one answer in a thousand takes seven times the mean, about two seconds. ``outage`` ends every
connection for a time in the middle of such a run. ``first`` opens a dataset of many shards in a new process, with nothing cached, and reads
the first batch; beside it a range of one block by the store's client, and MosaicML Streaming where its Python is given. With an exponential latency the slowest of sixteen
answers takes 3.4 times the mean for any client; ``--steady`` delays all equally, which shows the time of the reader itself. ``cold`` reads every sample
of a dataset once, with nothing cached and no proxy, against plain reads of the same ranges by the store's library, in turns.

    python -m bench.data.in_stores waiting [--turns 3]
    python -m bench.data.in_stores outage [--outage-s 30]
    python -m bench.data.in_stores first [--shards 1024] [--mosaic PYTHON]
    python -m bench.data.in_stores first --shards 65536 --shard-kib 16 --index-alone [--steady]
    python -m bench.data.in_stores cold [--mib 64] [--turns 5]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import obstore
from obstore.store import S3Store

from bench.common.small_run import SmallRun, steps_and_weights
from bench.running import record, run_bench
from phalanx.data.order.permutation import SampleOrder
from phalanx.data.reading.dataset import RunData
from phalanx.data.stored.copies import copy_dataset
from phalanx.data.stored.index import HELD_OUT, TRAIN, DatasetIndex, Recipe, Split, read_index
from phalanx.data.stored.shard_writer import ShardFolder, ShardWriter, commit, sums_file
from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx.run.spec import DataSpec, RunSpec, TrainSpec
from phalanx.store.open_store import open_store
from phalanx.store.store import Store
from store.faulty_proxy import Faults, FaultyProxy, faulty_proxy
from store.servers import Server, ministack

SEQ_LEN, BATCH, AT_ONCE = 256, 8, 32
COLD_SEQ_LEN = 16_384


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    waiting = commands.add_parser("waiting")
    waiting.add_argument("--turns", type=int, default=3)
    waiting.add_argument("--steps", type=int, default=200)
    outage = commands.add_parser("outage")
    outage.add_argument("--outage-s", type=float, default=30.0)
    first = commands.add_parser("first")
    first.add_argument("--shards", type=int, default=1024)
    first.add_argument("--shard-kib", type=int, default=1024)
    first.add_argument("--index-alone", action="store_true", help="only the shards that are read are there")
    first.add_argument("--latency-s", type=float, default=0.05)
    first.add_argument(
        "--steady", action="store_true", help="every answer is late by as much; else exponentially"
    )
    first.add_argument("--mib-s", type=float, default=0.0, help="MiB/s of each connection; 0 is no limit")
    first.add_argument("--turns", type=int, default=5)
    first.add_argument("--mosaic", default="", help="a Python that has mosaicml-streaming")
    cold = commands.add_parser("cold")
    cold.add_argument("--mib", type=int, default=64)
    cold.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ministack(Path(folder)) as server:
        os.environ |= server.environment
        commanded = {"waiting": waiting_of, "outage": outage_of, "first": first_of, "cold": cold_of}
        report = commanded[args.command](args, Path(folder), server)
    print(json.dumps(report, indent=1))


def waiting_of(args: argparse.Namespace, folder: Path, server: Server) -> dict[str, object]:
    """Return shares of steps spent waiting, and tokens/s against the folder's run."""
    data = write_dataset(folder / "data", tokens=(args.steps + 1) * BATCH * (SEQ_LEN + 1) * 2, shards=4)
    url = server.url(secrets.token_hex(4))
    copy_dataset(str(data), url)
    train(folder, str(data), 20)  # warms the machine
    rounds = []
    for _ in range(args.turns):
        local = train(folder, str(data), args.steps)
        mean_s = AT_ONCE * local["step_s"] / (2 * BATCH)
        faults = Faults(slow_down=0.05, reset=0.01, latency_s=mean_s)
        with through(server, faults):
            remote = train(folder, url, args.steps)
        assert remote["weights"] == local["weights"], "the bits are those of the folder's run"
        rounds.append(
            {
                "latency_mean_s": mean_s,
                "latency_p999_s": mean_s * 6.9,
                "waiting": remote["wait_s"] / remote["steps_s"],
                "waiting_after_first_batch": remote["later_wait_s"] / remote["steps_s"],
                "tokens_per_s_over_folder": local["step_s"] / remote["step_s"],
                "first_batch_s": remote["wait_s"] - remote["later_wait_s"],
            }
        )
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]} | {"rounds": rounds}


def outage_of(args: argparse.Namespace, folder: Path, server: Server) -> dict[str, object]:
    """Return the seconds that a run waits for a store that is away for a time, with read-ahead and without."""
    steps = 600
    data = write_dataset(folder / "data", tokens=(steps + 1) * BATCH * (SEQ_LEN + 1) * 2, shards=4)
    url = server.url(secrets.token_hex(4))
    copy_dataset(str(data), url)
    local = train(folder, str(data), steps)
    report: dict[str, object] = {"outage_s": args.outage_s, "local_steps_s": local["steps_s"]}
    for ahead_mib in (64.0, 0.0):
        with through(server, Faults(latency_s=0.05)) as proxy:
            away = (proxy, server.port, max(5.0, local["steps_s"] / 4), args.outage_s)
            remote = train(folder, url, steps, ahead_mib=ahead_mib, away=away)
        assert remote["weights"] == local["weights"], "the bits are those of the folder's run"
        report[f"waited_s_with_{ahead_mib:g}_mib_ahead"] = remote["later_wait_s"]
    return report


def cold_of(args: argparse.Namespace, folder: Path, server: Server) -> dict[str, object]:
    """Return the rate at which samples of 32 KiB come into an empty cache and out of it, over that of plain reads of their bytes."""
    samples = (args.mib << 20) // (2 * COLD_SEQ_LEN)
    data = write_dataset(folder / "data", tokens=samples * COLD_SEQ_LEN + 1, shards=1)
    url = server.url(secrets.token_hex(4))
    copy_dataset(str(data), url)
    parts = urlsplit(url)
    raw = S3Store(parts.netloc, prefix=parts.path.strip("/"), client_options={"allow_http": True})

    def plain() -> None:
        def read(sample: int) -> int:
            start = sample * 2 * COLD_SEQ_LEN
            stop = start + 2 * COLD_SEQ_LEN
            return len(obstore.get_range(raw, "train-00000.bin", start=start, end=stop))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            assert sum(pool.map(read, range(samples))) == samples * 2 * COLD_SEQ_LEN

    turns = []
    for turn in range(args.turns + 1):
        spec = RunSpec(
            data=DataSpec(path=url, cache=str(folder / f"cache-{turn}")),
            train=TrainSpec(batch_size=BATCH, seq_len=COLD_SEQ_LEN),
        )
        dataset = RunData.of_run(spec)

        def ours(dataset: RunData = dataset) -> None:
            dataset.read_ahead(0, samples)
            for first in range(0, samples, BATCH):
                dataset.train_samples(first, min(BATCH, samples - first))

        seconds = [seconds_of(call) for call in (ours, plain)[:: (-1) ** turn]][:: (-1) ** turn]
        (cached,) = dataset.cached
        ranges = cached.traffic.requests
        turns.append({"ours_s": seconds[0], "plain_s": seconds[1], "requests_per_sample": ranges / samples})
        record(turns[-1], is_printed=False)
    del turns[0]  # warms connections
    return {
        "over_plain": statistics.median(turn["plain_s"] / turn["ours_s"] for turn in turns),
        "mb_per_s": args.mib * 1.048576 / statistics.median(turn["ours_s"] for turn in turns),
        "load": os.getloadavg()[0],
        "turns": turns,
    }


def seconds_of(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def train(
    folder: Path,
    data: str,
    steps: int,
    *,
    ahead_mib: float = 64.0,
    away: tuple[FaultyProxy, int, float, float] | None = None,
) -> dict[str, Any]:
    """Train in a process of its own with an empty cache. ``away``: a proxy, its server's port, seconds until it loses the server, and seconds of the outage."""
    place = folder / secrets.token_hex(4)
    place.mkdir()
    cache = f'cache = "{place / "cache"}"\nread_ahead_mib = {ahead_mib}' if data.startswith("s3:") else ""
    run = SmallRun(
        "stores",
        data,
        steps,
        SEQ_LEN,
        layers=2,
        dim=192,
        ffn_dim=512,
        data_fields=cache,
        checkpoint_fields="every_steps = 100000",
    )
    process = subprocess.Popen(
        run.command(place), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if away is not None:
        proxy, port, after_s, away_s = away
        events = place / "run" / "events.jsonl"
        while not events.exists() or '"kind":"Step"' not in events.read_text():
            time.sleep(0.2)
        time.sleep(after_s)
        proxy.upstream_port = 1  # nothing answers there
        time.sleep(away_s)
        proxy.upstream_port = port
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(output)
    return measured(place / "run")


def measured(run: Path) -> dict[str, Any]:
    steps, weights = steps_and_weights(run)
    return {
        "step_s": statistics.median(step["step_s"] for step in steps[3:]),
        "steps_s": sum(step["logged_s"] for step in steps),
        "wait_s": sum(step["data_wait_s"] for step in steps),
        "later_wait_s": sum(step["data_wait_s"] for step in steps[1:]),
        "weights": weights,
    }


FIRST = """
import json, sys, time
from pathlib import Path
from phalanx.data.reading.dataset import RunData
from phalanx.run.spec import DataSpec, RunSpec, TrainSpec
url, cache, batch, seq_len = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
spec = RunSpec(data=DataSpec(path=url, cache=cache), train=TrainSpec(batch_size=batch, seq_len=seq_len))
begun, begun_cpu = time.perf_counter(), time.process_time()
samples = RunData.of_run(spec).train_samples(0, batch)
print(json.dumps([time.perf_counter() - begun, int(samples.size), time.process_time() - begun_cpu]))
"""
MOSAIC = """
import json, sys, time
import numpy as np
from streaming import StreamingDataset
url, cache, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
begun = time.perf_counter()
dataset = StreamingDataset(remote=url, local=cache, shuffle=True, batch_size=batch, download_timeout=300)
samples = iter(dataset)
size = sum(next(samples)["tokens"].size for _ in range(batch))
print(json.dumps([time.perf_counter() - begun, size]))
"""
MOSAIC_WRITE = """
import sys
import numpy as np
from streaming import MDSWriter
folder, samples, seq_len, limit_bytes = sys.argv[1], *map(int, sys.argv[2:])
rng = np.random.default_rng(0)
with MDSWriter(out=folder, columns={"tokens": "ndarray:uint16"}, size_limit=limit_bytes) as writer:
    for _ in range(samples):
        writer.write({"tokens": rng.integers(0, 257, seq_len, dtype=np.uint16)})
"""


def first_of(args: argparse.Namespace, folder: Path, server: Server) -> dict[str, object]:
    """Return the seconds from a process that has imported its libraries to its first batch, and of one range of one block."""
    per_shard = (args.shard_kib << 10) // (2 * SEQ_LEN)
    url = server.url(secrets.token_hex(4))
    if args.index_alone:
        dataset = write_dataset(folder / "data", tokens=per_shard * SEQ_LEN, shards=1)
        put_touched_shards(dataset, open_store(url), args.shards)
    else:
        copy_dataset(
            str(write_dataset(folder / "data", args.shards * per_shard * SEQ_LEN, shards=args.shards)), url
        )
    mosaic_url = server.url(secrets.token_hex(4))
    if args.mosaic:
        copied = folder / "mds"
        sizes = [str(size) for size in (args.shards * per_shard, SEQ_LEN, args.shard_kib << 10)]
        subprocess.run([args.mosaic, "-c", MOSAIC_WRITE, str(copied), *sizes], check=True)
        store = open_store(mosaic_url)
        for file in copied.iterdir():
            store.put(file.name, file.read_bytes())
    turns = []
    late_s = {"steady_s" if args.steady else "latency_s": args.latency_s}
    with through(server, Faults(**late_s, bytes_per_s=args.mib_s * (1 << 20))):
        store = open_store(url)
        for _ in range(args.turns):
            turn = {"one_range": one_range(store, args.shard_kib // 8)}
            turn["ours"], turn["ours_processor"] = in_new_process(
                sys.executable, FIRST, url, folder, str(BATCH), str(SEQ_LEN)
            )
            if args.mosaic:
                turn["mosaic"], _ = in_new_process(args.mosaic, MOSAIC, mosaic_url, folder, str(BATCH))
            turns.append(turn)
            record(turn, is_printed=False)
    report: dict[str, object] = {name: statistics.median(t[name] for t in turns) for name in turns[0]}
    if args.mosaic:
        report["mosaic_over_ours"] = statistics.median(t["mosaic"] / t["ours"] for t in turns)
    return report | {"turns": turns}


def in_new_process(python: str, code: str, url: str, folder: Path, *more: str) -> tuple[float, float]:
    """Return the seconds to the first batch, and of the processor, if the code prints them."""
    cache = folder / secrets.token_hex(4)
    environment = os.environ | {"S3_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]}
    done = subprocess.run(
        [python, "-c", code, url, str(cache), *more], env=environment, check=True, capture_output=True
    )
    seconds, size, *processor = json.loads(done.stdout.splitlines()[-1])
    assert size >= BATCH * SEQ_LEN
    return float(seconds), float(sum(processor))


def one_range(store: Store, blocks: int) -> float:
    """Return the median seconds of a range of one of a shard's ``blocks``, over a connection that is there."""
    times = []
    for number in (count % blocks for count in range(20)):
        begin = time.perf_counter()
        store.ranges("train-00000.bin", [(number << 13, (number + 1) << 13)])
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def put_touched_shards(dataset: Path, store: Store, shards: int) -> None:
    """Store a dataset of ``shards`` copies of the shard in ``dataset``, without the shards that a first batch does not read."""
    index = read_index(dataset)
    (shard,) = index.train.shards
    names = [f"train-{number:05d}.bin" for number in range(shards)]
    copies = tuple(msgspec.structs.replace(shard, file=name) for name in names)
    full_index = replace(index, train=replace(index.train, shards=copies))
    seed = RunSpec().runtime.seed
    first = SampleOrder(full_index.samples(TRAIN, SEQ_LEN), seed).dataset_indices(0, BATCH) * SEQ_LEN
    for number in {0, *(first // shard.tokens).tolist(), *((first + SEQ_LEN) // shard.tokens).tolist()}:
        store.put(names[number], (dataset / shard.file).read_bytes())
        store.put(sums_file(Path(names[number])).name, sums_file(dataset / shard.file).read_bytes())
    for file in dataset.glob("tokenizer*"):
        store.put(file.name, file.read_bytes())
    store.put("index.json", full_index.to_json().encode())


@contextmanager
def through(server: Server, faults: Faults) -> Iterator[FaultyProxy]:
    """Set the environment so that requests pass a proxy; reset it after the block."""
    before = dict(os.environ)
    with faulty_proxy(server.port, faults, seed=5) as proxy:
        os.environ |= server.behind(proxy.port)
        try:
            yield proxy
        finally:
            os.environ |= {name: before[name] for name in server.environment}


def write_dataset(directory: Path, tokens: int, shards: int) -> Path:
    """Write a dataset of random bytes in so many shards, with a short held-out split."""
    partial = directory.with_name("partial")
    partial.mkdir()
    tokenizer = BytesTokenizer()
    tokenizer.save(partial)
    generator = np.random.default_rng(0)
    splits = {}
    for name, size, shard_tokens in ((TRAIN, tokens, tokens // shards), (HELD_OUT, 4 * SEQ_LEN, tokens)):
        with ShardWriter(ShardFolder(partial, name), dtype="uint16", shard_tokens=shard_tokens) as writer:
            for start in range(0, size, 1 << 24):
                writer.append(generator.integers(0, 257, min(1 << 24, size - start), dtype=np.uint16))
            written = writer.close()
        splits[name] = Split(written.shards, documents=1, text_bytes=size, sha256=written.sha256)
    index = DatasetIndex(
        dtype="uint16",
        vocab_size=tokenizer.vocab_size,
        tokenizer_kind=tokenizer.kind,
        tokenizer_fingerprint=tokenizer.fingerprint,
        train=splits[TRAIN],
        held_out=splits[HELD_OUT],
        held_out_xz_bits_per_byte=None,
        recipe=Recipe("", "bytes", None, 0.0, tokens),
    )
    commit(partial, directory, index)
    return directory


if __name__ == "__main__":
    run_bench(main)
