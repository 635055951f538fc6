"""Mutation testing: do the tests fail if the fleet's core, or a reduction, computes something else?

A mutant (``mutants.py``) is a module with one small change. The tests of the module judge it (``TARGETS``): first, to
save time, in a fork of a process that has already imported and collected everything, with few examples of each property;
then, if it lives, in a fresh import with all examples and with wider tests. It prints the mutants that no test distinguishes from the original;
docs/evidence/mutation.md has the follow-up for each.

    python -m bench.mutation                                   # all targets: an hour
    python -m bench.mutation fleet/core/decide.py --sample 50
    python -m bench.mutation parallel/divisions.py --results lived.jsonl   # the next run with this file judges only the survivors
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import hypothesis
import pytest
from _pytest.runner import runtestprotocol

from bench.mutants import mutants

ROOT = Path(__file__).resolve().parents[1]
SLOTS, RESTORE = "tests/parallel/mesh/test_slots.py", "tests/checkpoint/format/test_restore_plan.py"
CORE = ("tests/fleet/core",)
WORLDS = ("tests/plan/simulate/hostile",)
# Module -> its own tests, quickest first, and the wider ones that judge the survivors of these.
TARGETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "parallel/divisions.py": (
        (
            *(SLOTS, "tests/parallel/test_divisions.py"),
            *("tests/parallel/reduction/test_buckets.py", "tests/parallel/reduction/integer/test_spans.py"),
        ),
        (
            *(
                f"tests/parallel/reduction/test_{name}.py"
                for name in ("tree", "reduce_scatter", "summation", "data_parallel")
            ),
            "tests/train/optimizers/test_matrices.py",
        ),
    ),
    "parallel/reduction/tree.py": (
        (SLOTS, "tests/parallel/reduction/test_tree.py", "tests/parallel/reduction/test_level_sums.py"),
        ("tests/train/test_reproducibility.py",),
    ),
    "checkpoint/format/boxes.py": (("tests/checkpoint/format/test_boxes.py", RESTORE), ()),
    "fleet/core/epochs/epoch_plan.py": (CORE, WORLDS),
    "fleet/core/decide.py": (CORE, WORLDS),
    "fleet/core/epochs/life_cycle.py": (CORE, WORLDS),
    "fleet/core/epochs/progress.py": (CORE, WORLDS),
    "fleet/core/epochs/faults.py": (CORE, WORLDS),
}
FEW_EXAMPLES, ALL_EXAMPLES = 12, 100


class Screen:
    """A pytest plugin that, instead of running the tests once, runs them in a fork for each of ``sources``.

    A fork puts the changed code into the functions of the imported module. If that is not enough (for example, for a
    changed constant), the mutant seems to live.
    """

    def __init__(self, target: str, sources: Sequence[str], verdicts: Path) -> None:
        self.name = "phalanx." + target.removesuffix(".py").replace("/", ".")
        self.sources, self.verdicts = sources, verdicts

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Write a line for each source: True if the tests pass with it."""
        began_s = time.process_time()
        if not all_pass(session.items):
            return False
        limit_s = math.ceil(1 + 4 * (time.process_time() - began_s))
        gc.freeze()
        with self.verdicts.open("w") as out:
            for source in self.sources:
                lives = in_fork(lambda source=source: self._judge(session.items, source), limit_s)
                print(lives, file=out, flush=True)
        return True

    def _judge(self, items: list[pytest.Item], source: str) -> bool:
        present = vars(sys.modules[self.name])
        changed = {"__name__": self.name}
        try:
            exec(compile(source, self.name, "exec"), changed)
            put_in(present, changed)
        except Exception:
            return True
        return all_pass(items)


def put_in(present: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Put changed code into the present functions, methods and properties."""
    for name, new in changed.items():
        old = present.get(name)
        if hasattr(old, "cache_clear"):
            old.cache_clear()
        if isinstance(new, type) and isinstance(old, type) and new.__module__ == old.__module__:
            put_in(vars(old), vars(new))
        old, new = (getattr(it, "fget", getattr(it, "__wrapped__", it)) for it in (old, new))
        if isinstance(old, FunctionType) and isinstance(new, FunctionType):
            old.__code__, old.__defaults__, old.__kwdefaults__ = (
                new.__code__,
                new.__defaults__,
                new.__kwdefaults__,
            )


def all_pass(items: list[pytest.Item]) -> bool:
    """Run tests up to the first that fails."""
    return not any(
        report.failed
        for item, following in zip(items, [*items[1:], None], strict=True)
        for report in runtestprotocol(item, nextitem=following, log=False)
    )


def in_fork(judge: Callable[[], bool], limit_s: int) -> bool:
    """Run ``judge`` in a fork and return its verdict; False if it needs more than ``limit_s`` of CPU time, or hangs."""
    child, began_s = os.fork(), time.monotonic()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        passed = False
        with contextlib.suppress(BaseException):
            passed = judge()
        os._exit(not passed)
    done, status = 0, 1
    while not done and time.monotonic() - began_s < 20 * limit_s:
        time.sleep(0.002)
        done, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # the ranks that a test has started, too
    if not done:
        os.waitpid(child, 0)
    return bool(done) and status == 0


def run_tests(sources: Path, tests: Sequence[str], examples: int, *plugins: object) -> bool:
    """Return True if ``tests`` pass with Phalanx imported from ``sources``, with so many examples of each property."""
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = str(sources)
    sys.path[0] = str(sources)  # in the place of this folder: its ``checkpoint`` is not the tests'
    # Python would take the bytecode of one mutant for that of another of the same size and second.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    hypothesis.settings.register_profile(
        "mutants", None, max_examples=examples, derandomize=True, database=None, deadline=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    unused = ("cacheprovider", "logging", "unraisableexception", "threadexception")
    options = ["-x", "--tb=line", "--hypothesis-profile=mutants", *(f"-pno:{name}" for name in unused)]
    return pytest.main([*options, *tests], plugins) == 0


def judge(target: str, sample: int | None, results: Path) -> str:
    """Judge the mutants of a module, write each verdict to ``results``, and print those that live."""
    own, wider = TARGETS[target]
    killed = {json.dumps(line["mutant"]) for line in map(json.loads, results.open()) if line["killed"]}
    original = (ROOT / "src" / "phalanx" / target).read_text()
    candidates = list(mutants(original))
    chosen = random.Random(0).sample(candidates, min(sample or len(candidates), len(candidates)))
    keys = [[target, mutant.place, mutant.before, mutant.after, mutant.nth] for mutant in chosen]
    to_do = [(mutant, key) for mutant, key in zip(chosen, keys, strict=True) if json.dumps(key) not in killed]
    with tempfile.TemporaryDirectory() as folder, results.open("a") as out:
        copy = Path(shutil.copytree(ROOT / "src", Path(folder) / "src"))
        module, verdicts = copy / "phalanx" / target, Path(folder) / "verdicts"

        def fresh(source: str, tests: Sequence[str]) -> bool:
            module.write_text(source)
            return in_fork(lambda: run_tests(copy, tests, ALL_EXAMPLES), 600)

        if not fresh(original, (*own, *wider)) or fresh("raise ImportError", own):
            raise SystemExit(f"the tests of {target} fail without a mutant, or do not notice that it is gone")
        module.write_text(original)
        screen = Screen(target, [mutant.source for mutant, _ in to_do], verdicts)
        in_fork(lambda: run_tests(copy, own, FEW_EXAMPLES, screen), 10**6)
        seem_to_live = [line == "True" for line in verdicts.read_text().split()]
        lived = 0
        for (mutant, key), seems in zip(to_do, seem_to_live, strict=True):
            lives = seems and fresh(mutant.source, (*own, *wider))
            print(json.dumps({"mutant": key, "killed": not lives}), file=out, flush=True)
            if lives:
                lived += 1
                print(
                    f"{target}:{mutant.line} in {mutant.place}: {mutant.before}  ->  {mutant.after}",
                    flush=True,
                )
    return f"{target}: {len(candidates)} mutants, {len(chosen)} judged, {lived} live"


def main() -> None:
    """Read the command line, judge, and print how many mutants of each module live."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help="modules, as paths that end in one of TARGETS")
    parser.add_argument("--sample", type=int, help="judge so many of each module, chosen at random")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "mutants.jsonl")
    args = parser.parse_args()
    args.results.touch()
    for target in TARGETS:
        if not args.targets or any(target.endswith(name) for name in args.targets):
            print(judge(target, args.sample, args.results), flush=True)


if __name__ == "__main__":
    main()
