"""The problems that ``bench.watch.why`` plants in real runs: each a scene, made for each run, and an action on it when a step is reached.

Conditions that this machine lacks are simulated at its edge: ``sitecustomize`` sets the clock of the run's processes forward, the record of an
installed package names another version of a library, and a module ``pynvml`` stands for a GPU's driver that reports throttled clocks. All else is real.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from free_ports import free_port
from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.data.stored.copies import copy_dataset
from phalanx_process import RUN_FILE
from spiking_runs import SPIKE, make_noise
from store.faulty_proxy import Faults, faulty_proxy
from store.servers import ministack
from tiny_runs import make_dataset

DISK = "24m"
LATE_S = 1.5


@dataclass(frozen=True)
class Scene:
    """A run that is about to be started."""

    text: str
    """Its run file."""
    words: tuple[str, ...] = ()
    """Arguments after the command, the run file and the run directory."""
    environment: dict[str, str] = field(default_factory=dict)
    plant: Callable[[int], None] | None = None
    """Plants the problem when the step is reached, given the run's process; ``None`` if it comes by itself."""
    agent: bool = False
    """True if the command is ``phalanx agent`` of the leading node, else ``phalanx train``."""


@dataclass(frozen=True)
class Problem:
    """A problem, and how it is planted."""

    name: str
    code: str
    """The reason that must be given."""
    from_step: int
    """The step before which nothing is wrong yet."""
    scene: Callable[[Path, ExitStack], Scene]
    """Makes its scene in a folder, and pushes cleanup onto the stack."""
    alerts: tuple[str, ...] = ()
    """The rules of ``deploy/prometheus`` for it, beside those for any reason of ``phalanx why``."""
    where: str = ""
    """Part of the place that the reason must name, such as the node."""


FLEET = ("--nodes", "3", "--set", "fleet.lease_s=4", "--set", "fleet.heartbeat_s=1")
LONG = ("--set", "train.steps=100000", "--set", "evaluation.every_steps=0")
RANKS = (*LONG, "--ranks", "2")


def _faulty(*words: str) -> Callable[[Path, ExitStack], Scene]:
    """Return a scene with words of its own, in which the problem comes by itself."""
    return lambda folder, _stack: Scene(_file(folder), (*LONG, *words))


def _file(folder: Path) -> str:
    return RUN_FILE.format(data=make_dataset(folder / "words"))


# --- scenes ------------------------------------------------------------------------------------------


def killed(folder: Path, _stack: ExitStack) -> Scene:
    """The run is killed as by a machine that loses its power."""
    return Scene(_file(folder), RANKS, plant=lambda process: signal_all(process, signal.SIGKILL))


def stopped(folder: Path, stack: ExitStack) -> Scene:
    """All of the run's processes are stopped."""

    def plant(process: int) -> None:
        stack.callback(signal_all, process, signal.SIGCONT)
        signal_all(process, signal.SIGSTOP)

    return Scene(_file(folder), RANKS, plant=plant)


def other_data(folder: Path, _stack: ExitStack) -> Scene:
    """Another version of the dataset is put in the place of the first."""

    def plant(_process: int) -> None:
        make_dataset(folder / "other", "another")
        os.rename(folder / "words", folder / "old")
        os.rename(folder / "other", folder / "words")

    return Scene(_file(folder), RANKS, plant=plant)


def full_disk(folder: Path, stack: ExitStack) -> Scene:
    """The run directory's own small file system (tmpfs, as root) is filled."""
    runs = folder / "runs"
    runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(runs)], check=True)
    stack.callback(subprocess.run, ["umount", "-l", str(runs)], check=True)

    def plant(_process: int) -> None:
        with suppress(OSError), (runs / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass

    return Scene(_file(folder), RANKS, plant=plant)


def no_inodes(folder: Path, stack: ExitStack) -> Scene:
    """The run directory's own small file system (tmpfs, as root) can hold no more files, though it has bytes."""
    runs = folder / "runs"
    runs.mkdir()
    options = f"size={DISK},nr_inodes=200"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(runs)], check=True)
    stack.callback(subprocess.run, ["umount", "-l", str(runs)], check=True)

    def plant(_process: int) -> None:
        with suppress(OSError):
            for number in range(1000):
                (runs / f"file-{number}").touch()

    return Scene(_file(folder), RANKS, plant=plant)


def cut_shard(folder: Path, _stack: ExitStack) -> Scene:
    """A shard of the dataset is cut short while the run reads it."""
    return Scene(
        _file(folder), RANKS, plant=lambda _process: os.truncate(folder / "words" / "train-00000.bin", 4096)
    )


def purged_checkpoints(folder: Path, _stack: ExitStack) -> Scene:
    """The run ends, and old files are removed from its checkpoints, as by the purge of a scratch file system."""

    def plant(process: int) -> None:
        signal_all(process, signal.SIGKILL)
        for path in (folder / "runs" / "run" / "checkpoints").glob("step-*/rank-00001.safetensors"):
            path.unlink()

    return Scene(_file(folder), RANKS, plant=plant)


def repeated_data(folder: Path, _stack: ExitStack) -> Scene:
    """The dataset is one document without end."""
    documents = [Document(f"document-{number}", "abcdef 0123456789 " * 40) for number in range(24)]
    prepare(documents, folder / "one", tokenizer="bytes", held_out_fraction=0.1)
    return Scene(RUN_FILE.format(data=folder / "one"), RANKS)


def taken_port(folder: Path, stack: ExitStack) -> Scene:
    """Another process listens at the port of the run's metrics."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = f"observe.metrics_port={server.getsockname()[1]}"
    return Scene(_file(folder), (*LONG, *FLEET, "--set", port))


def spike(folder: Path, _stack: ExitStack) -> Scene:
    """The data of one step are noise."""
    words = make_dataset(folder / "words")
    sources = "".join(
        f'[[data.sources]]\nname = "{name}"\npath = "{path}"\nweights = {weights}\nepochs = 0\n'
        for name, path, weights in (
            ("words", words, [1, 0, 1]),
            ("noise", make_noise(folder / "noise"), [0, 1, 0]),
        )
    )
    text = RUN_FILE.format(data=words).replace(
        f'path = "{words}"', f"stages = [0, {SPIKE - 1}, {SPIKE}]\n{sources}"
    )
    text = text.replace("slots = 8", "slots = 8\nspike_window = 8")
    return Scene(text, (*RANKS, "--set", "train.batch_size=512"))


def slow_data(folder: Path, stack: ExitStack) -> Scene:
    """An object store (a real S3 server) answers late, and the run reads hardly ahead."""
    server = stack.enter_context(ministack(folder))
    proxy = stack.enter_context(faulty_proxy(server.port, Faults(), 0))
    os.environ |= server.environment  # for the copy, which is made here
    url = server.url("words")
    copy_dataset(str(make_dataset(folder / "words")), url)

    def plant(_process: int) -> None:
        proxy.faults = Faults(latency_s=LATE_S)

    text = RUN_FILE.format(data=url).replace(
        "[train]", f'cache = "{folder / "cache"}"\ncache_gib = 0.00001\nread_ahead_mib = 0.01\n[train]'
    )
    return Scene(text, RANKS, server.behind(proxy.port), plant)


def clock(folder: Path, _stack: ExitStack) -> Scene:
    """The clock of the run's machine is set a minute forward."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(
        "import os, time\n_right = time.time\n"
        f"time.time = lambda: _right() + 60.0 * os.path.exists({str(folder / 'forward')!r})\n"
    )
    environment = {"PYTHONPATH": f"{folder / 'site'}:{os.environ.get('PYTHONPATH', '')}"}
    return Scene(_file(folder), (*LONG, *FLEET), environment, lambda _process: (folder / "forward").touch())


def mixed_libraries(folder: Path, stack: ExitStack) -> Scene:
    """One of two nodes has another NumPy, by the record of its installed packages."""
    record = folder / "site" / "numpy-1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0\n")
    return _two_nodes(folder, stack)


_DRIVER = """
import os
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
NVML_TEMPERATURE_GPU = NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = NVML_CLOCK_SM = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
class _Pci: busId = "00000000:01:00.0"
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(number): return number
def nvmlDeviceGetName(gpu): return "a stand-in"
def nvmlDeviceGetPciInfo(gpu): return _Pci
def nvmlDeviceGetTemperature(gpu, what): return 92
def nvmlDeviceGetTemperatureThreshold(gpu, what): return 95
def nvmlDeviceGetClockInfo(gpu, what): return 600
def nvmlDeviceGetCurrentClocksThrottleReasons(gpu): return 0x40 if os.path.exists({hot!r}) else 0
def nvmlDeviceGetTotalEccErrors(gpu, kind, since): return 0
def nvmlDeviceGetRemappedRows(gpu): return (0, 0, 0, 0)
def nvmlSystemGetDriverVersion(): return "570"
"""


def throttled(folder: Path, stack: ExitStack) -> Scene:
    """The driver of one of two nodes (a stand-in) reports that heat has lowered its GPU's clocks."""
    (folder / "hot").touch()
    return _hot_later(folder, stack)


def throttled_in_a_run(folder: Path, stack: ExitStack) -> Scene:
    """The same, but the clocks are lowered while the run trains, after the check of the nodes' health."""
    scene = _hot_later(folder, stack)
    return replace(scene, plant=lambda _process: (folder / "hot").touch())


def _hot_later(folder: Path, stack: ExitStack) -> Scene:
    (folder / "site").mkdir()
    (folder / "site" / "pynvml.py").write_text(_DRIVER.format(hot=str(folder / "hot")))
    return _two_nodes(folder, stack, "--set", "fleet.min_nodes=1")


def _two_nodes(folder: Path, stack: ExitStack, *words: str) -> Scene:
    """Start a fleet of two agents; the second has the modules in ``folder/site`` before the installed ones."""
    where, file = f"127.0.0.1:{free_port()}", folder / "run.toml"
    text = _file(folder)
    file.write_text(text)
    arguments = ("--coordinator", where, *LONG, "--set", "fleet.nodes=2", *words)
    settings = ("--set", f'run_dir="{folder / "runs" / "run"}"')
    command = [sys.executable, "-m", "phalanx", "agent", "--run", str(file), *arguments, *settings]
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'site'}:{os.environ.get('PYTHONPATH', '')}"}
    with (folder / "second").open("w") as output:
        second = subprocess.Popen(
            [*command, "--node", "odd", "--no-lead"],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    stack.callback(signal_all, second.pid, signal.SIGKILL)
    return Scene(text, (*arguments, "--node", "first"), agent=True)


def signal_all(process: int, number: int) -> None:
    """Send a signal to a process and all its descendants, in any session or group."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    due = [process]
    while due:
        pid = due.pop()
        due += children.get(pid, [])
        with suppress(ProcessLookupError):
            os.kill(pid, number)


PROBLEMS = (
    Problem(
        "NaN on one node",
        "not-finite",
        99,
        _faulty(*FLEET, "--fault", "nan rank 1 at step 100"),
        ("PhalanxNotFinite", "PhalanxNodeUnfit"),
    ),
    Problem("loss spike", "loss-spike", SPIKE - 1, spike, ("PhalanxLossSpike",)),
    Problem(
        "lost node, no spare",
        "lost-node",
        99,
        _faulty(*FLEET, "--fault", "kill node 1 at step 100"),
        ("PhalanxSparesExhausted", "PhalanxAgentGone"),
    ),
    Problem(
        "straggler",
        "straggler",
        29,
        _faulty(
            *FLEET,
            "--spares",
            "1",
            "--set",
            "fleet.straggler_window_steps=5",
            "--fault",
            "slow rank 1 by 4x from step 30",
        ),
        ("PhalanxStraggler",),
        where="node-1",
    ),
    Problem("full disk", "disk-full", 12, full_disk, ("PhalanxCheckpointFailing", "PhalanxDiskFilling")),
    Problem("no inodes", "disk-full", 12, no_inodes, ("PhalanxCheckpointFailing",)),
    Problem("a shard is cut short", "failed", 12, cut_shard, ("PhalanxFailed",)),
    Problem("purged checkpoints", "checkpoint-damaged", 12, purged_checkpoints),
    Problem("warmup to the end", "endless-warmup", 20, _faulty("--set", "schedule.warmup_steps=100000")),
    Problem("repeated data", "loss-too-low", 60, repeated_data),
    Problem("port of metrics is taken", "metrics-elsewhere", 1, taken_port),
    Problem(
        "nothing can be written",
        "events-unwritten",
        11,
        _faulty(*FLEET, "--fault", "fill disk at step 12"),
        ("PhalanxCheckpointFailing", "PhalanxNoStep"),
    ),
    Problem("slow data", "slow-data", 30, slow_data, ("PhalanxSlowData",)),
    Problem("another data version", "other-data", 12, other_data, ("PhalanxOtherData",)),
    Problem("another library on one node", "mixed-machines", 1, mixed_libraries, ("PhalanxMixedSoftware",)),
    Problem("clock skew", "clock-skew", 12, clock, ("PhalanxClockSkew",)),
    Problem("throttled GPU", "hardware", 1, throttled, ("PhalanxThrottled", "PhalanxNodeUnfit")),
    Problem("a GPU is throttled while it trains", "throttled", 20, throttled_in_a_run, ("PhalanxThrottled",)),
    Problem("killed without a word", "gone", 12, killed, ("PhalanxGone", "PhalanxCoordinatorGone")),
    Problem("all processes stand still", "stalled", 30, stopped, ("PhalanxNoStep",)),
)
