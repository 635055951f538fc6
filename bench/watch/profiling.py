"""Profiles: cost of recording without a request and with one, and findings of other tools in the same recordings.

*Off*: the same run by turns with the look-out for requests and without it (``Training.profiles`` is ``None``, as on ranks other than 0, and no
recording is kept ready); the ratio of median steps in processor time of rank 0's thread, and the seconds of the additional work of a step, measured alone.
*On*: the median recorded step over that of the other steps of its run, the pauses before and after, and the bytes written. *Planted*: runs with a rank that computes more, a link that is
slow and a host that sleeps between steps; of each, this project's verdict, PyTorch's ``key_averages`` of the same recording, and traces
in PyTorch's own format:

    python -m bench.watch.profiling --folder /tmp/profiles [--pairs 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.running import record, run_bench
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import ParallelSpec, RunSpec
from phalanx_watch.profile.read import make_summary
from profiled_runs import NAME, PLANTS, ask, profiled_run, train_planted
from ranks import Ranks
from tiny_runs import make_dataset, train_on_this_rank

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "slow_rank": (2, {"sharding": "none"}),
    "slow_link": (4, {"sharding": "zero2", "shard_ranks": 2}),
    "host_gap": (2, {"sharding": "none"}),
}


def larger(spec: RunSpec, steps: int) -> RunSpec:
    """Return the tiny run with a model whose step takes some tens of milliseconds."""
    model = replace(spec.model, layers=4, dim=128, heads=4, kv_heads=4, ffn_dim=256)
    train = replace(spec.train, steps=steps, seq_len=64, micro_batch_size=2)
    return replace(spec, model=model, train=train)


def train_and_export(spec: RunSpec, plant: str, out: str) -> None:
    """Train with a planted problem; write each rank's recording as PyTorch does, and PyTorch's table of it."""
    from phalanx.train.profile import recording

    original = recording.rank_trace  # type: ignore[attr-defined]

    def exporting(ended: Any, rank: int, *rest: Any) -> Any:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{rank}.json"
        ended.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
        trace["distributedInfo"] = {"rank": rank, "backend": "gloo"}
        path.write_text(json.dumps(trace))
        table = ended.key_averages().table(
            sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=40
        )
        (folder / f"key-averages-{rank}.txt").write_text(table)
        return original(ended, rank, *rest)

    with replaced(recording, "rank_trace", exporting):
        train_planted(spec, plant)


def train_watched(spec: RunSpec, watched: bool) -> list[float]:
    """Train with or without the look-out. Return the processor time of this rank's thread in each step, which does not depend on other load."""
    from phalanx.train.lifecycle import loop
    from phalanx.train.step.step import Stepper

    seconds: list[float] = []
    original, train = Stepper.run, loop.train

    def timed(self: Stepper, *args: Any, **kwargs: Any) -> Any:
        begin_s = time.thread_time()
        report = original(self, *args, **kwargs)
        seconds.append(time.thread_time() - begin_s)
        return report

    def blind(training: Any) -> Any:
        training.profiles = None
        return train(training)

    with replaced(Stepper, "run", timed), replaced(loop, "train", train if watched else blind):
        train_on_this_rank(spec)
    return seconds


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def measure_off(ranks: Ranks, dataset: Path, folder: Path, pairs: int) -> dict[str, float]:
    """Measure the cost without a request."""
    ratios, medians = [], {True: list[float](), False: list[float]()}
    for pair in range(pairs):
        median_s = {}
        for watched in (True, False) if pair % 2 else (False, True):
            spec = larger(profiled_run(dataset, folder / f"off-{pair}-{watched}", sharding="none"), 40)
            median_s[watched] = statistics.median(ranks.run(2, train_watched, spec, watched)[0][5:])
            medians[watched].append(median_s[watched])
        ratios.append(median_s[True] / median_s[False])
        record({"pair": len(ratios), "ratio": ratios[-1]}, is_printed=False)
    return {
        "step_off_s": statistics.median(medians[True]),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "more_a_step_s": look_s(folder),
    }


def look_s(folder: Path) -> float:
    """Return the seconds of the additional work of a step on rank 0 without a request, with its look at the disk each second."""
    from phalanx.observe.profile_request import ProfileDesk

    directory = RunDirectory(folder / "nothing")
    desk, turns = ProfileDesk(directory, print), 200_000
    begin_s = time.perf_counter()
    for _ in range(turns):
        desk.pending()
    return (time.perf_counter() - begin_s) / turns


def measure_on(ranks: Ranks, dataset: Path, folder: Path) -> dict[str, Any]:
    """Measure the cost of a profile."""
    run_dir = folder / "on"
    ask(run_dir)
    spec = larger(profiled_run(dataset, run_dir, sharding="none"), 40)
    seconds = ranks.run(2, train_watched, spec, True)[0]
    begin_s = time.perf_counter()
    summary = make_summary(RunDirectory(run_dir), NAME)
    analysis_s = time.perf_counter() - begin_s
    files = {path.name: path.stat().st_size for path in (RunDirectory(run_dir).profiles / NAME).iterdir()}
    return {
        "recorded_over_usual": statistics.median(seconds[1:3]) / statistics.median(seconds[5:]),
        "pause_before_s": max(row["start_s"] for row in summary["recording"]),
        "pause_after_s": max(row["stop_s"] for row in summary["recording"]),
        "events": summary["recording"][0]["events"],
        "clock_error_s": summary["clock_error_s"],
        "analysis_s": analysis_s,
        "files": files,
    }


def measure_planted(ranks: Ranks, dataset: Path, folder: Path) -> dict[str, list[str]]:
    """Return this project's findings on each planted problem, and keep the recordings for other tools."""
    texts = {}
    for plant, (count, layout) in LAYOUTS.items():
        run_dir = folder / plant / "run"
        run_dir.parent.mkdir(parents=True)
        ask(run_dir)
        spec = replace(profiled_run(dataset, run_dir), parallel=ParallelSpec(**layout))
        ranks.run(count, train_and_export, spec, plant, str(folder / plant / "torch"))
        texts[plant] = [finding["text"] for finding in make_summary(RunDirectory(run_dir), NAME)["findings"]]
    return texts


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where profiles are kept; must not exist")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--parts", default="planted,on,off", help="Of planted, on and off.")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    assert LAYOUTS.keys() <= PLANTS.keys()
    dataset, ranks = make_dataset(arguments.folder / "data"), Ranks()
    parts = {
        "planted": lambda: measure_planted(ranks, dataset, arguments.folder),
        "on": lambda: measure_on(ranks, dataset, arguments.folder),
        "off": lambda: measure_off(ranks, dataset, arguments.folder, arguments.pairs),
    }
    try:
        report = {part: parts[part]() for part in arguments.parts.split(",")}
    finally:
        ranks.close()
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    run_bench(main)
