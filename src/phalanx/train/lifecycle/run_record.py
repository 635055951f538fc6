"""What a start of a run records of itself: code with its changes, packages, machine, command, data; and what its machines differ in.

Rank 0 writes it into the run's first event of each attempt, and lays files beside it that are too long for an event. Machines are left by each
node for itself (``observe.record.machines``), and compared on a thread: a step never waits for it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping

from phalanx.data.origin.show import provenance
from phalanx.data.reading.sources import DataIndex
from phalanx.observe.record.code_patch import CodePatch, code_patch
from phalanx.observe.record.machines import leave_machine, machine_differences, newest_machines
from phalanx.observe.record.records import environment_record
from phalanx.run.data_folders import addresses
from phalanx.run.directory.durable import create_once, write_atomically
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.directory.regular_file import read_small
from phalanx.run.spec import RunSpec
from phalanx.train.lifecycle.reporter import Reporter

_LATE_S = 60.0
"""By then a network file system shows what other machines have written into a folder."""


@functools.cache
def _own_patch() -> CodePatch | None:
    return code_patch()


def start_record(
    spec: RunSpec, directory: RunDirectory, index: DataIndex, numerics: Mapping[str, str]
) -> dict[str, object]:
    """The ``environment`` of ``RunStarted``. Writes the patch of changed code into the run directory, if there is one."""
    record = environment_record()
    patch = _own_patch()
    if patch is not None:
        _keep(directory, patch)
        record["code"] = {**own, **patch.facts()} if isinstance(own := record["code"], dict) else own
    return {
        **record,
        "data_fingerprint": index.fingerprint,
        "data": provenance(index, addresses(spec.data)),
        "numerics": dict(numerics),
    }


def _keep(directory: RunDirectory, patch: CodePatch) -> None:
    if not patch.patch:
        return
    try:
        directory.code.mkdir(exist_ok=True)
        create_once(directory.code / f"{patch.sha256[:12]}.patch", patch.patch)
    except OSError as error:
        _complain(f"the changes of the code are not kept in {directory.code}: {error.strerror}")


def leave_own_machine(directory: RunDirectory, node: str = "") -> None:
    """Records this node, in one of its processes; what keeps that from being written is told and does not matter."""
    try:
        leave_machine(directory, node, directory.newest_attempt())
    except (OSError, RunDirectoryError) as error:
        _complain(f"this machine is not recorded in {directory.machines}: {error}")


def first_of_node() -> bool:
    """True in one of the processes that hold a node's ranks, as far as their launcher numbers them."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def watch_machines(directory: RunDirectory, reporter: Reporter, late_s: float = _LATE_S) -> threading.Thread:
    """Tells, soon and on a thread, in what the machines of this start differ, if that has not been told yet."""

    def look_twice() -> None:
        for wait_s in (0.0, late_s):
            time.sleep(wait_s)
            if not reporter.speaks:
                return  # the epoch is over: what is told here nobody would hear, and the next one would take it for told
            try:
                tell_differences(directory, reporter.warn)
            except OSError as error:
                _complain(f"the machines in {directory.machines} are not compared: {error.strerror}")

    thread = threading.Thread(target=look_twice, name="machines", daemon=True)
    thread.start()
    return thread


def tell_differences(directory: RunDirectory, warn: Callable[[str], None]) -> None:
    """Tells in what the machines of the newest start differ, and writes it down so that it is told once. Raises ``OSError``."""
    told = directory.machines / "differences"
    found = [one.sentence for one in machine_differences(newest_machines(directory))]
    try:
        before = json.loads(read_small(told))
    except (OSError, ValueError):
        before = []
    if found == before:
        return
    write_atomically(told, (json.dumps(found, indent=1) + "\n").encode(), durable=False)
    new = [line for line in found if line not in before]
    if new:
        warn(
            "machines of this run differ, which may change the bits of the weights or the speed: "
            + "; ".join(new)
        )


def _complain(text: str) -> None:
    print(f"phalanx: warning: {text}", file=sys.stderr, flush=True)
