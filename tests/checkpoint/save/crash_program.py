"""Save checkpoints in forked children, kill each at a random moment, and check what is left.

Run as a program of its own, ``crash_program.py FOLDER KILLS SEED [STORE]``: it forks before any thread exists. Exits non-zero
where a kill lost a committed step, left a damaged one, or made one visible that does not verify; with the URL of a ``STORE``,
to which the checkpoints are copied, there too.
"""

import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch

from checkpoint.shards import shards_of
from phalanx.checkpoint.committed.copying import verify, verify_tier
from phalanx.checkpoint.committed.restore import candidates, restore
from phalanx.checkpoint.save.save_schedule import Retention
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.save.store_uploader import CopyRules, CopyShare, RankCopies
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.observe.events import CheckpointCopied
from phalanx.store.open_store import open_store
from phalanx.store.store import Store

RANKS = 2
COMMIT, SAVE, UPLOAD, DELETION = ((1 << 30) + n for n in range(4))
DOING = {SAVE: "save", UPLOAD: "upload", DELETION: "deletion"}
"""Reports of a child on the work that it begins: numbers that no step has."""


def state(step: int) -> dict[str, torch.Tensor]:
    return {f"model/w{i}": torch.full((1 << 16,), float(step)) for i in range(4)}


class ReportingStore:
    """A store that reports what it is about to do; see ``killed_child``."""

    def __init__(self, store: Store, report_to: int) -> None:
        self._store, self._report_to = store, report_to

    def __getattr__(self, name: str) -> Any:
        if name in ("put", "put_blocks", "create"):
            os.write(self._report_to, UPLOAD.to_bytes(4, "little"))
        return getattr(self._store, name)

    def delete(self, keys: Iterable[str]) -> None:
        batch = list(keys)
        if batch:
            os.write(self._report_to, DELETION.to_bytes(4, "little"))
        self._store.delete(batch)


def save_forever(root: Path, attempt: int, first: int, report_to: int, store: str) -> None:
    tier = DiskTier(root, block_bytes=64 << 10)
    keep = Retention(keep_last=3)
    savers = [AsyncSaver(tier, r, RANKS, r, RANKS, attempt, retention=keep) for r in range(RANKS)]
    rules = CopyRules(0, 0, Retention(2), 0.0)
    copies = [
        RankCopies(
            tier,
            cast(Store, ReportingStore(open_store(store), report_to)),
            rules,
            str(attempt),
            CopyShare((r,), RANKS),
            600.0,
        )
        for r in range(RANKS if store else 0)
    ]
    for step in range(first, first + 10_000):
        os.write(report_to, SAVE.to_bytes(4, "little"))
        for saver in savers:
            saver.save(step, shards_of(state(step)), {"step": step})
        for saver in savers:
            saver.wait()
        for outcome in savers[0].poll():
            assert outcome.status == "committed", outcome
            for rank in copies:
                rank.expect(step)
            for rank in copies:
                rank.settle()
                assert all(isinstance(event, CheckpointCopied) for event in rank.collect())
            os.write(report_to, outcome.step.to_bytes(4, "little"))


def killed_child(
    root: Path, attempt: int, first: int, delay_s: float, after: int, store: str
) -> tuple[int, str]:
    """Return the last step that a child reported as committed before it was killed, or 0; and the work that it was at.

    The child reports what it begins to do, and what it has committed. It is killed a moment after the report ``after``, if that is given: on a
    busy machine too, kills then come at all of these.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        save_forever(root, attempt, first, writer, store)
    os.close(writer)
    reports = list[int]()
    while after and (data := os.read(reader, 4)):
        reports.append(int.from_bytes(data, "little"))
        if (reports[-1] if reports[-1] in DOING else COMMIT) == after:
            break
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        rest = pipe.read()
    reports += [int.from_bytes(rest[place : place + 4], "little") for place in range(0, len(rest), 4)]
    steps = [report for report in reports if report not in DOING]
    at = [DOING[report] for report in reports if report in DOING]
    return max([0, *steps]), at[-1] if at else "start"


def check(root: Path, last: int, before: list[int]) -> None:
    steps = candidates(DiskTier(root))
    assert not last or steps, "a committed step is lost"
    assert verify(root) == [] if steps else True
    newest = steps[0] if steps else 0
    assert newest >= max(last, *before, 0), f"committed up to {max(last, *before)}, found {steps}"
    assert newest <= max(last, *before) + 1, "a step is visible that no save had time to make"
    for step in steps:
        loaded = state(-1)
        assert restore(DiskTier(root), step, shards_of(loaded)) == {"step": step}
        assert all(tensor.eq(step).all() for tensor in loaded.values()), "a mixture of two steps"


def check_store(url: str, last: int, on_disk: int) -> None:
    """Check the store in a child process: its client has threads, and a process with threads must not fork."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, "the store is not whole"
        return
    try:
        tier = ObjectTier(open_store(url))
        steps = candidates(tier)
        assert verify_tier(tier, url) == [] if steps else not last
        assert last <= max([0, *steps]) <= on_disk, f"copied up to {last}, found {steps}"
        for step in steps:
            loaded = state(-1)
            assert restore(tier, step, shards_of(loaded)) == {"step": step}
            assert all(tensor.eq(step).all() for tensor in loaded.values()), "a mixture of two steps"
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    root, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = "".join(sys.argv[4:5])
    rng = random.Random(seed)
    torch.set_num_threads(1)
    committed, at = 0, Counter[str]()
    moments = (COMMIT, 0, UPLOAD, SAVE, DELETION) if store else (COMMIT, 0, COMMIT, SAVE)
    for attempt in range(kills):
        before = candidates(DiskTier(root))
        # Some kills come long after the moment, during any other work.
        delay_s = rng.uniform(0.0, rng.choice((0.002, 0.02, 0.1)))
        last, doing = killed_child(
            root, attempt, committed + 1, delay_s, moments[attempt % len(moments)], store
        )
        at[doing] += 1
        check(root, last, before or [0])
        committed = max([0, *candidates(DiskTier(root))])
        if store:
            check_store(store, last, committed)
    where = ", ".join(f"{times} in {doing}" for doing, times in sorted(at.items()))
    print(f"{kills} kills, {committed} steps committed; {where}")


if __name__ == "__main__":
    main()
