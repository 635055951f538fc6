"""Chooses the arithmetic of a run whose file leaves it open (``runtime.numerics = "auto"``).

A run that has saved keeps its arithmetic, and a run that goes on from another one as training takes over that one's. Else it is portable wherever
it can be: the bits then belong to the run and not to a kind of processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from phalanx.hardware.kernels.compiler import NoHostKernelsError
from phalanx.hardware.portable.build import library_file, unfit_processor
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.rules import not_portable
from phalanx.run.spec import RunSpec
from phalanx.train.start.open_run import choose, holds_steps


def with_numerics(spec: RunSpec, fingerprint: str) -> RunSpec:
    """Return ``spec``, which is resolved otherwise, with its arithmetic; ``fingerprint`` is that of its data."""
    if spec.runtime.numerics != "auto":
        return spec
    portable, native = (
        replace(spec, runtime=replace(spec.runtime, numerics=name)) for name in ("portable", "native")
    )
    for candidate in _earlier(portable, native, fingerprint):
        return candidate
    return native if spec.runtime.device == "cuda" or reason_for_native(spec) else portable


def _earlier(portable: RunSpec, native: RunSpec, fingerprint: str) -> Iterator[RunSpec]:
    """The run as it has begun already, or as the run that it goes on from."""
    if native.run_dir or native.checkpoint.init_with == "training":
        places = [Path(native.run_dir)] if native.run_dir else []
        if native.checkpoint.init_with == "training":
            places.append(Path(native.checkpoint.init_from).parent.parent)
        for place in places:
            if not holds_steps(RunDirectory(place)):
                continue
            try:
                recorded = read_resolved(RunDirectory(place)).runtime.numerics
            except RunDirectoryError:
                continue  # it has not begun, or whoever opens it says what is wrong
            yield portable if recorded == "portable" else native
        return
    for candidate in (portable, native):
        if holds_steps(choose(candidate, fingerprint)):
            yield candidate


def reason_for_native(spec: RunSpec) -> str:
    """Return why a run on CPUs cannot be portable here, as a clause; empty if it can. Compiles the kernels if they are not there yet, in seconds."""
    for path, reason in not_portable(spec):
        return f"{path}: {reason}"
    if reason := unfit_processor():
        return f"portable ones need an x86-64 processor with AVX2 and FMA, or a 64-bit Arm one, and {reason}"
    try:
        library_file()
    except NoHostKernelsError as error:
        return f"the kernels of portable ones cannot be compiled (with gcc and g++): {error}"
    return ""


def note_of_fallback(written: RunSpec, resolved: RunSpec) -> str:
    """A sentence for a run that has fallen back to native numerics on CPUs, and what that costs; empty for any other."""
    if written.runtime.numerics != "auto" or (resolved.runtime.numerics, resolved.runtime.device) != (
        "native",
        "cpu",
    ):
        return ""
    reason = reason_for_native(resolved)
    return reason and f"numerics are native, so the weights' bits belong to this kind of processor; {reason}"
