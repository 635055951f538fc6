"""Damaged files and odd words against every command that reads them: none may end in a traceback, hang, or overlook damage.

Each case is a command in a fork of this process, which has imported everything, so that a case costs its own work alone. It must end with exit code 0,
or with a message and another exit code; all else is a finding, printed with the case's number. A case is drawn from the seed, its
subject and its number, so ``--case`` repeats it; cases are in ``bench.reproduce.fuzz_cases``.

    python -m bench.reproduce.fuzz --cases 250                          # of each of eight subjects; a few minutes
    python -m bench.reproduce.fuzz --seed 7 --subject events --case 41  # one again, with all that it prints
    python -m bench.reproduce.fuzz --cases 50 --json
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import click

from bench.reproduce.fuzz_cases import ROOT, SUBJECTS, Case, Good, make_good
from bench.running import run_bench
from phalanx.cli.main import _COMMANDS, exit_code, phalanx_command

CPU_LIMIT_S = 30
WALL_LIMIT_S = 300
"""Ten times the limit of CPU time: the machine may have other things to do."""
_TRACEBACK = 70
OUTCOMES = ("done", "refused", "traceback", "hang", "unnoticed")


@dataclass(frozen=True)
class Finding:
    """A case that did not end as it should, or whose number was requested."""

    subject: str
    number: int
    outcome: str
    case: Case
    output: str


def main() -> None:
    """Run the cases and print the table of their outcomes; exit code 1 if there is a finding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=250, help="of each subject")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--subject", choices=tuple(SUBJECTS), action="append", help="only this one; can be repeated"
    )
    parser.add_argument("--case", type=int, help="only the case with this number, with its output")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args()
    _import_all()
    with tempfile.TemporaryDirectory(prefix="phalanx-fuzz-") as folder:
        good = make_good(Path(folder))
        numbers = range(options.cases) if options.case is None else range(options.case, options.case + 1)
        counts: dict[str, Counter[str]] = {}
        findings = []
        for subject in options.subject or SUBJECTS:
            counts[subject] = Counter()
            for number in numbers:
                result = _judge(subject, number, options.seed, good, Path(folder) / "work")
                counts[subject][result.outcome] += 1
                if result.outcome not in ("done", "refused") or options.case is not None:
                    findings.append(result)
            print(f"{subject}: {dict(counts[subject])}", file=sys.stderr, flush=True)
    print(_as_json(counts, findings) if options.json else _as_table(counts, findings))
    sys.exit(any(finding.outcome not in ("done", "refused") for finding in findings))


def _judge(subject: str, number: int, seed: int, good: Good, work: Path) -> Finding:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    case = SUBJECTS[subject](random.Random(f"{seed}/{subject}/{number}"), good, work)
    log = work.with_suffix(".log")
    status = _in_fork(case, log)
    output = log.read_text(errors="replace")[-4000:]
    if status is None:
        outcome = "hang"
    elif status == _TRACEBACK or "Traceback (most recent call last)" in output:
        outcome = "traceback"
    elif status == 0:
        outcome = "unnoticed" if case.must_notice else "done"
    else:
        outcome = "refused"
    return Finding(subject, number, outcome, case, output)


def _in_fork(case: Case, log: Path) -> int | None:
    """Run a case's command as the command line does. Return its exit code, or None if it took too long."""
    child, began_s = os.fork(), time.monotonic()
    if not child:
        os.setsid()
        os.chdir(ROOT)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os._exit(_run(case))
    done, status = 0, 0
    while not done and time.monotonic() - began_s < WALL_LIMIT_S:
        time.sleep(0.002)
        done, status = os.waitpid(child, os.WNOHANG)
    if not done:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    code = os.waitstatus_to_exitcode(status)
    return None if code in (-signal.SIGXCPU, -signal.SIGKILL) else code


def _run(case: Case) -> int:
    """Return the exit code of ``phalanx`` with these words, ``_TRACEBACK`` if Python would print an exception."""
    code = _TRACEBACK
    try:
        code = exit_code(case.command)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(bool(ending.code))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _import_all() -> None:
    context = click.Context(phalanx_command)
    for name in _COMMANDS:
        phalanx_command.get_command(context, name)
    # Commands import these, and PyTorch with them, when they are used.
    for name in (
        "phalanx.checkpoint.interop.huggingface",
        "phalanx.checkpoint.interop.dcp",
        "phalanx_serve.generate",
        "phalanx.train.lifecycle.loop",
    ):
        importlib.import_module(name)


def _as_table(counts: dict[str, Counter[str]], findings: list[Finding]) -> str:
    rows = [
        f"| {subject} | {total.total()} | " + " | ".join(str(total[kind]) for kind in OUTCOMES) + " |"
        for subject, total in counts.items()
    ]
    together = sum(counts.values(), Counter[str]())
    rows.append(
        f"| together | {together.total()} | " + " | ".join(str(together[kind]) for kind in OUTCOMES) + " |"
    )
    head = ["| what is damaged | cases | " + " | ".join(OUTCOMES) + " |", "|---" * (len(OUTCOMES) + 2) + "|"]
    details = [
        f"\n{finding.subject}, case {finding.number}: {finding.outcome}\n  phalanx {' '.join(finding.case.command)[:300]}\n"
        f"  {finding.case.damage}\n  {finding.output.strip()[-1500:]}"
        for finding in findings
    ]  # fmt: skip
    return "\n".join([*head, *rows, *details])


def _as_json(counts: dict[str, Counter[str]], findings: list[Finding]) -> str:
    rows = [
        {"subject": it.subject, "case": it.number, "outcome": it.outcome, "command": it.case.command, "damage": it.case.damage}
        for it in findings
    ]  # fmt: skip
    return json.dumps({"counts": counts, "findings": rows}, indent=2)


if __name__ == "__main__":
    run_bench(main)
