"""Runs a bench: checks memory first, keeps results as they come, and leaves no process behind.

``run_bench(main)`` forks twice. The first child is the supervisor, in a process group of its own; its child, the bench, runs ``main``:

- A child of the bench that dies by a signal and is not waited for ends the bench with an error (``CHILD_DIED``). A bench that waits
  for the answer of a killed process would otherwise wait for ever.
- However the bench ends (finished, failed, Ctrl-C, SIGTERM, killed), the supervisor kills every process that descends from it.
- The first process passes SIGINT, SIGTERM and SIGHUP on to the supervisor. If one of both is killed, the other ends all that is left: the
  supervisor gets SIGTERM from the kernel, and the first process becomes the parent of the supervisor's descendants. Both are subreapers
  (prctl(2)), so that no process escapes by the death of its parent.

The temporary files of the bench are in one folder, which the supervisor and the first process remove.

Options of every bench are ``--small`` (tiny sizes, the same code) and ``--out FILE`` (results as JSON lines). Each printed line is flushed
and appended to that file at once, so that a killed bench loses only the row in progress.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

NO_MEMORY = 3
"""Exit code of a bench that needs more memory than is available."""
NO_PEER = 4
"""Exit code of a bench whose peer is not installed."""
CHILD_DIED = 5
"""Exit code of a bench one of whose processes was killed by a signal."""
_INSIDE = "PHALANX_BENCH"
"""Environment variable that processes of a running bench inherit: its name."""
_OUT = "PHALANX_BENCH_OUT"
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GIB = 1 << 30
_POLL_S = 0.2
_UNREAPED_S = 1.0
"""A child that was killed on purpose is waited for sooner than this."""
_GRACE_S = 10.0
"""Time for a bench that gets a stop signal to remove its temporary files."""


@dataclass(frozen=True)
class Needs:
    """Resources of one bench.

    Attributes:
        summary: What it measures, in one line.
        memory_gib: Peak memory of all its processes at the default sizes, in GiB.
        minutes: Wall time at the default sizes on two cores.
        small: The arguments that ``--small`` stands for.
        smaller: Options that lower the memory; a run that gives one of them is not held to ``memory_gib``.
        slow: The small run takes more than three seconds, so only ``make test-all`` does it.
        peers: Distributions or programs that are not among the development requirements, with the command that installs each.
    """

    summary: str
    memory_gib: float
    minutes: float
    small: tuple[str, ...] = ()
    smaller: tuple[str, ...] = ()
    slow: bool = False
    peers: tuple[tuple[str, str], ...] = ()
    small_gib: float = 1.0


class MissingPeerError(Exception):
    """A program or package that a bench compares with is not installed."""


class MemoryTooSmallError(Exception):
    """Less memory is available than a bench needs."""


def usage_line(needs: Needs) -> str:
    """Return the memory and time of a bench in words."""
    peers = "".join(f"; needs {name}: {command}" for name, command in needs.peers)
    return f"{needs.memory_gib:g} GiB, {needs.minutes:g} min{peers}"


def available_gib() -> float:
    """Return the memory that new processes can take, in GiB: the kernel's estimate, or what a control group leaves."""
    from phalanx.checkpoint.snapshot.segments import free_memory_bytes

    return free_memory_bytes() / _GIB


def require_memory(gib: float, smaller: str) -> None:
    """Raise ``MemoryTooSmallError`` if less than ``gib`` is available; ``smaller`` is the remedy in the message."""
    available = available_gib()
    if available < gib:
        raise MemoryTooSmallError(
            f"needs {gib:.1f} GiB of memory, {available:.1f} GiB are available: {smaller}"
        )


def require_catalog_peer(program: str | None, bench: str) -> None:
    """Raise ``MissingPeerError`` with the command that installs the peer of ``bench`` unless its ``program`` exists."""
    if not program:
        from bench.catalog import BENCHES

        peer, command = BENCHES[bench].peers[0]
        raise MissingPeerError(f"{peer} is not installed: {command}")


def record(fields: Mapping[str, Any], *, is_printed: bool = True) -> None:
    """Append one row of results to the file of ``--out``, and print it."""
    words = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in fields.items()
    )
    _append(fields)
    if not is_printed:
        return
    stream = sys.stdout
    if isinstance(stream, _RowStream):
        stream = stream.terminal
    print("  ".join(words), file=stream, flush=True)


def run_bench(main: Callable[[], object], needs: Needs | None = None) -> NoReturn:
    """Run the bench whose module is ``__main__``, with the needs that the catalog states, and exit with its code.

    Exits with ``NO_MEMORY``, ``NO_PEER`` or ``CHILD_DIED`` after one line on stderr with the reason. Inside a running bench, where the
    module is started again for a process of its own, ``main`` alone is called.
    """
    if _INSIDE in os.environ:
        sys.exit(main())  # type: ignore[arg-type]
    spec = sys.modules["__main__"].__spec__
    name = spec.name.removeprefix("bench.") if spec else Path(sys.argv[0]).stem
    if needs is None:
        from bench.catalog import BENCHES

        needs = BENCHES[name]
    resources = needs
    if {"-h", "--help"} & set(sys.argv[1:]):
        _show_help(main, needs)
    folder = tempfile.mkdtemp(
        prefix="phalanx-bench-"
    )  # holds all temporary files, and is removed even after SIGKILL
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sys.argv, is_small, out = _own_options(sys.argv, needs, folder + "/small")
    _exit_with(name, lambda: _check_memory(resources, is_small, sys.argv[1:]))
    os.environ[_INSIDE] = name
    _prctl(_SET_CHILD_SUBREAPER, 1)
    first = os.getpid()
    supervisor = _fork()
    if supervisor:
        sys.exit(_wait_for_supervisor(supervisor, name))
    atexit.unregister(shutil.rmtree)
    os.setpgid(0, 0)  # Ctrl-C reaches the first process alone
    _prctl(_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    bench = _fork()
    if bench:
        code = _supervise(bench, name, first)
        shutil.rmtree(folder, ignore_errors=True)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    os.environ["TMPDIR"], tempfile.tempdir = folder, folder
    with _rows_kept(out):
        _exit_with(name, main)
    sys.exit(0)


def _fork() -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads, which survive a fork
        return os.fork()


def _own_options(argv: list[str], needs: Needs, folder: str) -> tuple[list[str], bool, Path | None]:
    """Return the bench's own arguments, whether the run is small, and the file of ``--out``."""
    words, own, is_small, out = iter(argv[1:]), [argv[0]], False, None
    for word in words:
        if word == "--small":
            is_small = True
        elif word == "--out":
            out = Path(next(words, "bench.jsonl"))
        elif word.startswith("--out="):
            out = Path(word.removeprefix("--out="))
        else:
            own.append(word)
    if is_small:
        # Options that are given besides come later, and win.
        own[1:1] = [word.format(folder=folder) for word in needs.small]
    return own, is_small, out


def _show_help(main: Callable[[], object], needs: Needs) -> NoReturn:
    try:
        main()
    finally:
        print("\noptions of every bench:\n  --small     tiny sizes, in seconds")
        print("  --out FILE  append results to FILE as JSON lines, as they come")
        print(f"\nneeds {usage_line(needs)} at the default sizes")
    sys.exit(0)


def _check_memory(needs: Needs, is_small: bool, words: list[str]) -> None:
    is_smaller = any(word.partition("=")[0] in needs.smaller for word in words)
    gib = needs.small_gib if is_small or is_smaller else needs.memory_gib
    options = " or ".join(("--small", *needs.smaller))
    require_memory(gib, f"give less with {options}, or free memory")


def _exit_with(name: str, work: Callable[[], object]) -> None:
    """Call ``work``; exit if it returns a code other than 0, or raises."""
    code: object = None
    try:
        code = work()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except MemoryTooSmallError as error:
        code = _complain(name, error, NO_MEMORY)
    except MissingPeerError as error:
        code = _complain(name, error, NO_PEER)
    except ModuleNotFoundError as error:
        traceback.print_exc()
        code = _complain(name, f"{error.name} is not installed: pip install {error.name}", NO_PEER)
    if code:
        sys.exit(code)  # type: ignore[arg-type]


def _complain(name: str, error: object, code: int) -> int:
    print(f"bench.{name}: {error}", file=sys.stderr, flush=True)
    return code


# --- rows ------------------------------------------------------------------------------------------


def _append(fields: Mapping[str, Any]) -> None:
    """Append a row to the file of ``--out``, in one write: every process of the bench may."""
    if path := os.environ.get(_OUT):
        with open(path, "a") as file:
            file.write(json.dumps(fields, default=str) + "\n")


class _RowStream:
    """Standard output whose lines are flushed at once and appended as rows."""

    def __init__(self, terminal: IO[str]) -> None:
        self.terminal, self._line = terminal, ""

    def write(self, text: str) -> int:
        self.terminal.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.strip():
                _append(_row_of(line))
        if lines:
            self.terminal.flush()
        return len(text)

    def end(self) -> None:
        """Append a last line without its end."""
        if self._line.strip():
            _append(_row_of(self._line))
        self._line = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def _row_of(line: str) -> Mapping[str, Any]:
    """Return the object that a line of JSON holds, or the line as a field."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            row: dict[str, Any] = json.loads(line)
            return row
    return {"line": line}


@contextlib.contextmanager
def _rows_kept(out: Path | None) -> Iterator[None]:
    plain = sys.stdout
    if out:
        os.environ[_OUT] = str(out.absolute())
    rows = _RowStream(plain)
    sys.stdout = rows  # type: ignore[assignment]
    try:
        yield
    finally:
        rows.end()
        plain.flush()
        sys.stdout = plain


# --- supervisor ------------------------------------------------------------------------------------


def _wait_for_supervisor(supervisor: int, name: str) -> int:
    """Pass signals on to the supervisor until it has ended; end what it has left, and return the exit code."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        _send(supervisor, number)

    for number in _STOPPING:
        signal.signal(number, pass_on)
    _, status = os.waitpid(supervisor, 0)
    _end_all()
    return _exit_code(os.waitstatus_to_exitcode(status), name)


def _exit_code(code: int, name: str) -> int:
    """Return the exit code of a shell for a process that ended with ``code``, which is negative for a signal."""
    if code >= 0:
        return code
    print(f"bench.{name}: was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
    return 128 - code


def _supervise(bench: int, name: str, first: int) -> int:
    """Wait until the bench has ended, end what is left of it, and return the exit code; stop the bench if the ``first`` process dies."""
    stopped: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)

    for number in _STOPPING:
        signal.signal(number, stop)
    _prctl(_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != first:
        stopped.append(signal.SIGTERM)
    unreaped: dict[int, float] = {}
    commands: dict[int, str] = {}
    deadline_s, died, is_interrupted = float("inf"), "", False
    while (code := _reap(bench)) is None:
        time.sleep(_POLL_S)
        if not died and not stopped and (died := _killed_child(bench, unreaped, commands)):
            print(f"bench.{name}: {died}", file=sys.stderr, flush=True)
        if (died or stopped) and deadline_s == float("inf"):
            deadline_s = time.monotonic() + _GRACE_S
        if (died or stopped) and not is_interrupted:
            is_interrupted = True
            _send(bench, signal.SIGINT)
            time.sleep(_POLL_S)
            if died:
                _kill(pid for pid in _descendants(bench))
        if time.monotonic() > deadline_s:
            _send(bench, signal.SIGKILL)
    _end_all()
    if died:
        return CHILD_DIED
    if stopped:
        return 128 + stopped[0]
    return _exit_code(code, name)


def _reap(bench: int) -> int | None:
    """Reap all that has ended; return the bench's exit code once it is among them, negative for a signal."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == bench:
                return os.waitstatus_to_exitcode(status)
            if not pid:
                return None
    return -signal.SIGKILL


def _killed_child(bench: int, unreaped: dict[int, float], commands: dict[int, str]) -> str:
    """Return what happened to a child of ``bench`` that a signal has killed and that has stayed a zombie, or nothing."""
    now_s = time.monotonic()
    for pid, fields in _children(bench).items():
        if fields[0] != "Z":
            if pid not in commands:
                commands[pid] = _command(pid)
            continue
        number = int(fields[49]) & 0x7F  # exit_code of proc_pid_stat(5), as waitpid(2) has it
        if number and now_s - unreaped.setdefault(pid, now_s) > _UNREAPED_S:
            advice = (
                ": memory may have run out, give --small or smaller sizes" if number == signal.SIGKILL else ""
            )
            return f"child {pid} ({commands.get(pid, 'python')}) was killed by {signal.Signals(number).name}{advice}"
    return ""


def _children(parent: int) -> dict[int, list[str]]:
    """Return the same as ``_processes`` of the children alone, by the lists that the kernel keeps of them (proc_pid_task(5))."""
    children = {}
    for task in Path(f"/proc/{parent}/task").glob("*"):
        with contextlib.suppress(OSError):
            for pid in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    children[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return children


def _processes() -> dict[int, list[str]]:
    """Return the fields of /proc/PID/stat after the name, from the state on, of every process."""
    processes = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                processes[int(entry)] = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
    return processes


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:120]
    return ""


def _descendants(root: int) -> list[int]:
    """Return the processes below ``root``."""
    children: dict[int, list[int]] = {}
    for pid, fields in _processes().items():
        children.setdefault(int(fields[1]), []).append(pid)
    pids = list(children.get(root, []))
    for pid in pids:
        pids += children.get(pid, [])
    return pids


def _kill(pids: Iterator[int]) -> None:
    for pid in pids:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _end_all() -> None:
    """End what descends from this process: after a moment for trackers that end by themselves, by SIGKILL."""
    began_s = time.monotonic()
    while pids := _descendants(os.getpid()):
        if time.monotonic() > began_s + 0.5:
            _kill(iter(pids))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
