"""Compiles the package's C sources once for each user and machine, for calls through ctypes.

Three ways were weighed. A C++ extension built with the package ties a wheel to a platform and a source tree to a build step. Numba
needs no compiler, but is 60 MB more to install and half a second of processor time in every rank that starts. C compiled at first
use is a third of a second once, a millisecond in every process after that, and no dependency; it needs a C compiler, which machines that train
usually have, since ``torch.compile`` needs one too. Without one, callers report what
they do without: PyTorch's own operations, or nothing.

A library lies in ``phalanx/kernels`` of the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``), under a name that its source and the
compiler's options determine. If that folder cannot be written, it lies in a folder of the user's in the folder of temporary files. A lock lets one process compile while
the others wait, and a rename lets none see a half-written file. It is on the disk by then: of a library that a machine lost half of with its power, the loader would end
each process that loads it.

The environment variable ``PHALANX_KERNELS`` chooses a build of ``BUILDS``, for tests and benches: a machine with AVX-512 computes with it as a
machine without does. It changes speed, and no bit.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from phalanx.run.directory.files import temporary_home, user_cache

OPTIONS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
"""Each operation rounded by itself; a square root may be an instruction, since nothing reads ``errno``."""
BUILDS: dict[str, tuple[str, ...]] = {
    "": (),
    "avx2": ("-DPHALANX_NO_AVX512",),
    "plain": ("-DPHALANX_NO_VECTORS", "-O1", "-Wno-psabi"),
}
"""Further options by the value of ``PHALANX_KERNELS``: vectors as wide as the processor's, of AVX2 at most, or none in the sources."""
_COMPILATION_S = 600
"""Time for a compilation, which takes seconds of a processor that others may use too."""
_ROOM_BYTES = 64 << 20
"""More free bytes than a compilation takes: a compiler that fails beside them lacks something else."""
_INCLUDED = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


class NoHostKernelsError(RuntimeError):
    """The kernels could not be compiled or loaded."""


def library_name(
    source: Path, options: Sequence[str] = OPTIONS, *, beside: Sequence[Path] = (), linked: Sequence[str] = ()
) -> str:
    """Return the file name of the library of ``source`` and the sources ``beside`` it: its stem and a hash of
    sources, included headers, options and machine type.
    """
    key = hashlib.sha256(" ".join((*options, *linked, platform.machine())).encode())
    for part in _with_headers((source, *beside)):
        key.update(part.read_bytes())
    return f"{source.stem}-{key.hexdigest()[:16]}.so"


def _with_headers(sources: Sequence[Path]) -> list[Path]:
    """Return ``sources`` and all of this project's headers that they include, directly or not, each once, in the
    order of their first mention.
    """
    mentioned: dict[Path, None] = {}
    waiting = [source.resolve() for source in reversed(sources)]
    while waiting:
        file = waiting.pop()
        if file not in mentioned:
            mentioned[file] = None
            names = _INCLUDED.findall(file.read_text())
            waiting += [(file.parent / name).resolve() for name in reversed(names)]
    return list(mentioned)


def _options_of_build() -> tuple[str, ...]:
    build = os.environ.get("PHALANX_KERNELS", "")
    if build not in BUILDS:
        raise NoHostKernelsError(
            f"PHALANX_KERNELS is {build!r}: set it to {' or '.join(filter(None, BUILDS))}, or not at all"
        )
    return BUILDS[build]


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def compiled(
    source: Path,
    options: Sequence[str] = OPTIONS,
    *,
    beside: Sequence[Path] = (),
    linked: Sequence[str] = (),
    notice: str = "",
) -> Path:
    """Return the library of ``source``, and of the other sources ``beside`` it, compiled if it is not there yet.
    Libraries are cached by the digest of their sources and options, in the user's cache folder or else a temporary
    one.

    ``linked`` are options that name libraries. ``notice`` is a line for standard error, printed when the compiler
    starts. Raises ``NoHostKernelsError`` if there is no compiler or it fails, which is not tried again in this process,
    or if ``PHALANX_KERNELS`` names no build.
    """
    options = (*options, *_options_of_build())
    name = library_name(source, options, beside=beside, linked=linked)
    cache = user_cache() / "kernels"
    if (cache / name).exists():
        return cache / name
    compiler = _compiler()
    if compiler is None:
        raise NoHostKernelsError("there is no C compiler (cc, gcc or clang)")
    command = (compiler, *options, *map(str, (source, *beside)), *linked, "-lm")
    place = _compiled_in((cache, temporary_home() / "kernels"), name, command, notice)
    if isinstance(place, str):
        raise NoHostKernelsError(place)
    return _compile_into(place, name, command, "")


@functools.cache
def _compiled_in(folders: Sequence[Path], name: str, command: Sequence[str], notice: str) -> Path | str:
    """Compile in the first of ``folders`` where that succeeds; return that folder, or as text the reasons why there
    is none. A failure of the compiler itself, with room on the disk, ends the search. Cached.
    """
    problems: list[str] = []
    for folder in folders:
        try:
            return _compile_into(folder, name, command, notice).parent
        except (OSError, subprocess.SubprocessError) as error:
            problems.append(_reason(error))
            if isinstance(error, subprocess.SubprocessError) and shutil.disk_usage(folder).free > _ROOM_BYTES:
                break  # the compiler fails elsewhere too
    return "; ".join(dict.fromkeys(problems))


def _reason(error: Exception) -> str:
    """Return an error's message; of a compiler, the end of its output."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"{error.cmd[0]} failed: {error.stderr.strip()[-300:]}"
    return str(error)


def _compile_into(folder: Path, name: str, command: Sequence[str], notice: str) -> Path:
    """Run ``command`` for the library ``name`` in ``folder``, under a lock, unless the library exists there.

    Return the library's path. Raises ``OSError`` or the compiler's ``SubprocessError``. ``notice`` is printed before
    the compiler starts, if it is not empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / name
                if notice:
                    print(notice, file=sys.stderr, flush=True)
                subprocess.run(
                    (*command, "-o", str(made)),
                    check=True, capture_output=True, text=True, timeout=_COMPILATION_S,
                )  # fmt: skip
                with made.open("rb") as file:
                    os.fsync(file.fileno())
                made.replace(target)
    return target
