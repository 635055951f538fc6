"""Phalanx's programs, started by a fork of a process that has imported all of them: milliseconds where importing PyTorch takes seconds.

``Popen`` is ``subprocess.Popen``, but ``python -m phalanx...`` and ``python SCRIPT`` are forked from a template, as is what a command or an agent
starts in the same way: ranks, coordinators, agents, their workers. A template has one thread, has run nothing of Phalanx, and has one
requester. What it forks is the requester's child (``CLONE_PARENT`` of clone(2)), with the arguments, descriptors, environment, folder and
session that it asks for: it is waited for, killed, and dies with its parent like a program that was executed. What is not forked is
executed: any other command, and programs whose environment says what libraries do when they are loaded.

Two things differ from an executed program: all that one template forks hash strings alike, and ``/proc/PID/cmdline`` is the template's. So
some tests of whole runs execute them, as do those of what a program imports. With the variable ``TESTS_EXECUTE`` everything is executed.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

_CLONE_PARENT = 0x8000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine(), 0) if sys.platform == "linux" else 0
_SET_NAME, _NAME = 15, "template"
_MOST_BYTES, _MOST_DESCRIPTORS = 1 << 17, 64
_START_OTHERS = ("train", "reproduce", "diff", "agent", "pod", "calibrate")
"""Commands that start ranks or agents."""
_PRELOADED = (
    "phalanx.train.lifecycle.loop",
    "phalanx.fleet.node.rank.worker",
    "phalanx.fleet.node.agent",
    "phalanx.fleet.control.coordinator",
    "torch._dynamo",  # PyTorch imports it in the first step
)
_READ_WHEN_LOADED = (
    *("ATEN_", "DNNL_", "GOMP_", "GRPC_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_"),
    *("PYTHON", "TORCH", "TRITON_"),
)
"""Variables that Python and libraries read when they are loaded: a template cannot change them afterwards."""
_READ_LATER = (
    *("TORCH_DIST_INIT_BARRIER", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
)
"""Those among them that PyTorch reads when the first process group is made, or the first block compiled; importing the compiler sets the last two."""
ENVIRONMENT = dict(os.environ)
"""The environment of the tests, before modules that they import have added to it."""
_EXECUTING = subprocess.Popen
_KNOWN = ("phalanx", "phalanx_plan", "phalanx_serve", "phalanx_watch", "bench")
"""Packages whose programs may be forked."""
_EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


class Template:
    """The process that this one's programs are forked from, as this one sees it."""

    def __init__(self, control: socket.socket, environment: Mapping[str, str]) -> None:
        """``environment``: in which the template has loaded its libraries."""
        self._control, self._loaded_with, self._lock = control, _at_loading(environment), threading.Lock()

    def has(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """True if it can be forked what would be executed."""
        python, *words = [*command, ""]
        program = words[1:2] if words[:1] == ["-m"] else []
        known = any(name.partition(".")[0] in _KNOWN for name in program) or words[0].endswith(".py")
        own_begin = any(os.path.exists(f"{folder}/sitecustomize.py") for folder in _search_path(environment))
        same = _at_loading(environment) == self._loaded_with
        return python == sys.executable and known and same and not own_begin

    def fork(self, request: Mapping[str, object], descriptors: Sequence[int]) -> int:
        """The process id of a new child of this process."""
        with self._lock:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
                pid = int(self._control.recv(64) or 0)
            except (BrokenPipeError, ConnectionResetError):
                pid = 0
        assert pid, "the template has ended; what it said is on standard error"
        if pid < 0:  # never a process id: killing -1 is killing all
            raise OSError(-pid, f"the template cannot fork: {os.strerror(-pid)}")
        return pid


def _starts_others(command: Sequence[str]) -> bool:
    _, *words = command
    return words[:2] == ["-m", "phalanx.fleet.node.agent"] or (
        words[:2] == ["-m", "phalanx"] and words[2:3] != [] and words[2] in _START_OTHERS
    )


def children(pid: int) -> list[int]:
    """Process ids of the direct children of a process, without its template."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [child for child in map(int, found.stdout.split()) if not _is_template(child)]


def _is_template(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == _NAME
    return False


def _at_loading(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_WHEN_LOADED) and not name.startswith(_READ_LATER) and name != "PYTHONPATH"
    }


def _search_path(environment: Mapping[str, str]) -> list[str]:
    """The folders that ``PYTHONPATH`` names."""
    return [os.path.abspath(name) for name in environment.get("PYTHONPATH", "").split(os.pathsep) if name]


@functools.cache
def own_template() -> Template | None:
    """The template of the process that runs the tests; it ends with it. None where there is no ``CLONE_PARENT``, or it is not wanted."""
    if not _SYS_CLONE or "TESTS_EXECUTE" in ENVIRONMENT:
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(theirs.fileno())]
    process = _EXECUTING(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=ENVIRONMENT)
    theirs.close()
    atexit.register(process.kill)
    return Template(ours, ENVIRONMENT)


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` that forks what ``template`` has."""

    template: Template | None = None
    """This process's own template; without one, that of the tests."""

    def __init__(self, *given: Any, starts_others: bool = False, **more: Any) -> None:
        """With ``starts_others``, the program has a template of its own, as agents and the commands that start them always have."""
        self._starts_others = starts_others
        super().__init__(*given, **more)

    def _execute_child(self, *given: Any) -> None:
        call = _EXECUTE.bind(self, *given).arguments
        template = self.template or own_template()
        command = [os.fspath(word) for word in call["args"]] if isinstance(call["args"], list | tuple) else []
        environment = dict(os.environ if call["env"] is None else call["env"])
        none = dict.fromkeys(("preexec_fn", "gid", "gids", "uid"))
        unasked: dict[str, object] = {**none, "shell": False, "umask": -1, "process_group": -1}
        plain = call["close_fds"] and call["executable"] in (None, *command[:1])
        plain = plain and all(call[name] == value for name, value in unasked.items())
        if template is None or not plain or not command or not template.has(command, environment):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        folder = os.path.abspath(call["cwd"] or os.getcwd())
        os.stat(folder)  # raises what an execution would
        theirs = {
            target: own
            for target, own in enumerate((call["p2cread"], call["c2pwrite"], call["errwrite"]))
            if own != -1
        }
        theirs = {stream: theirs.get(stream, stream) for stream in range(3)}
        theirs |= {int(kept): int(kept) for kept in call["pass_fds"]}
        request = {
            "command": command,
            "environment": environment,
            "folder": folder,
            "session": call["start_new_session"],
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "descriptors": list(theirs),
            "starts others": self._starts_others or _starts_others(command),
        }
        self.pid = template.fork(request, list(theirs.values()))
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in names))  # type: ignore[attr-defined]


@contextmanager
def in_place_of_execution() -> Iterator[None]:
    """Inside, whatever this process starts is forked where it can be."""
    subprocess.Popen = Popen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = _EXECUTING  # type: ignore[misc]


# --- in the template -------------------------------------------------------------------------------


def _serve(control: socket.socket) -> NoReturn:
    """Forks children of the process that holds the other end, until it has ended."""
    libc = ctypes.PyDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    libc.prctl(_SET_NAME, _NAME.encode())
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not request:
            os._exit(0)
        ctypes.pythonapi.PyOS_BeforeFork()
        pid = libc.syscall(
            ctypes.c_long(_SYS_CLONE), ctypes.c_long(_CLONE_PARENT | signal.SIGCHLD), *[None] * 4
        )
        if pid == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
            libc.prctl(_SET_NAME, b"python")
            control.close()
            _become(json.loads(request), descriptors)
        pid = pid if pid > 0 else -ctypes.get_errno()
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(str(pid).encode())


def _become(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Runs a program in the place of this process, which was forked for it."""
    code = 1
    try:
        if request["session"]:
            os.setsid()
        os.chdir(request["folder"])
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        _arrange(descriptors, request["descriptors"])
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(request["files"]))
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None  # it was found by what was imported
        threading.current_thread()._set_native_id()  # type: ignore[attr-defined]  # a fork of Python's own leaves it, too
        _, *words = command = request["command"]
        module = words.pop(0) == "-m" and words[0]
        if request["starts others"]:
            _get_template()
        sys.orig_argv, sys.argv = command, words if module else command[1:]
        first = request["folder"] if module else os.path.dirname(os.path.abspath(command[1]))
        rest = [folder for folder in sys.path[1:] if folder not in _search_path(ENVIRONMENT)]
        sys.path[:] = dict.fromkeys([first, *_search_path(request["environment"]), *rest])
        if module:
            sys.modules.pop(module, None)  # it is executed, not imported
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[1], run_name="__main__")
        code = 0
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if isinstance(asked.code, str):
            print(asked.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        _exit(-signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    _exit(code)


def _get_template() -> None:
    """A template of this process's own, forked from it before it has done anything."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        _arrange([nothing, nothing, nothing, theirs.detach()], range(4))
        _serve(socket.socket(fileno=3))
    theirs.close()
    Popen.template = Template(ours, ENVIRONMENT)
    subprocess.Popen = Popen  # type: ignore[misc]


def _arrange(descriptors: Sequence[int], targets: Sequence[int]) -> None:
    """Gives descriptors the numbers that their program expects, and closes all others."""
    above = max(*descriptors, *targets) + 1
    high = [_duplicate(descriptor, above) for descriptor in descriptors]
    os.closerange(3, above)
    for descriptor, target in zip(high, targets, strict=True):
        os.dup2(descriptor, target)
    os.closerange(above, max(high) + 1)


def _duplicate(descriptor: int, least: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)


def _exit(code: int) -> NoReturn:
    """Ends as an interpreter does, but for the taking apart of everything that was imported; a negative code is a signal to end by."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:
        traceback.print_exc()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    gc.disable()
    for name in _PRELOADED:
        importlib.import_module(name)
    from phalanx.cli.main import _COMMANDS, load_command

    for name in _COMMANDS:
        load_command(name)
    gc.enable()
    gc.freeze()  # a collection in a child would copy the pages of all that was imported
    assert len(os.listdir("/proc/self/task")) == 1, "what is imported has started threads"
    _serve(socket.socket(fileno=int(sys.argv[1])))
