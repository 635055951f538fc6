"""What probes have found on this machine, kept in the user's cache folder, since trying every shape of a large model takes minutes.

How a kernel rounds depends on the processor, the libraries, the environment that steers them and the number of threads, all of which name the file; so
another machine or version finds none and tries anew. What is read is tried once more with few rows, and dropped if it does not hold.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from phalanx.hardware.kernels.rows.product import row_kernel
from phalanx.hardware.local.device import device_name, on_gpu
from phalanx.hardware.portable.operations import begun
from phalanx.run.directory.durable import write_atomically
from phalanx.serve.numerics.trials import tell_search

_VERSION = 5
"""The version of the probes: others have tried other things."""
_STEERING = ("OMP_", "MKL_", "KMP_", "GOMP_", "DNNL_", "ONEDNN_", "ATEN_", "TORCH_")
"""Beginnings of environment variables by which kernels and threads are chosen."""
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Those that only say how threads wait for each other."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Facts:
    """In which numbers rows keep the bits that they have among many."""

    fewest: int
    multiple: int
    block: int = 0
    """The block of the inner dimension with which the kernel of few rows has the same bits; 0 if none is known."""

    def padding(self, rows: int) -> int:
        """Rows to add to ``rows``, more than none."""
        return max(self.fewest - rows, -rows % self.multiple)


def numbers_of_rows(fewest: int, multiple: int, most: int) -> list[int]:
    """The numbers of rows in which a rule is tried: all small ones, and some beside the sizes of kernels' tiles."""
    tried = (*range(1, 34), 36, 48, 52, 63, 64, 65, 100, 128, 256, 516)
    return [number for number in tried if fewest <= number < most and number % multiple == 0]


def machine(threads: int = 0) -> dict[str, str]:
    """What decides how this process rounds, besides shapes: kernels, processor, libraries, their environment and the number of threads (0:
    PyTorch's present one)."""
    return {
        "kernels": "portable" if begun() else "native",
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "build": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16],
        "environment": " ".join(
            f"{name}={value}"
            for name, value in sorted(os.environ.items())
            if name.startswith(_STEERING) and name not in _WAITING
        ),
        "threads": str(threads or torch.get_num_threads()),
    }


def accelerator(device: torch.device) -> dict[str, str]:
    """What decides how a GPU rounds, besides what ``machine`` has: its kind and its libraries."""
    return {
        "type": device.type,
        "name": device_name(device) or "",
        "cuda": torch.version.cuda or torch.version.hip or "",
        "cudnn": str(torch.backends.cudnn.version() if on_gpu(device) else ""),  # type: ignore[no-untyped-call]
    }


@functools.cache
def _processor() -> str:
    """The processor's name and the hash of what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    found = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in lines[:40])
        if key.strip()
    }
    flags = hashlib.sha256((found.get("flags") or found.get("Features") or "").encode()).hexdigest()[:8]
    parts = (
        found.get("model name", platform.machine()),
        *(found.get(k, "") for k in ("cpu family", "model", "stepping")),
    )
    return " ".join((*parts, flags))


def facts_folder() -> Path:
    """The folder of facts. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx" / "numerics"


def facts_path() -> Path:
    """The file of this machine's facts. Raises RuntimeError for a user without a home."""
    kernel = row_kernel()
    named = [_VERSION, machine(), kernel.name if kernel is not None else ""]
    key = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]
    return facts_folder() / f"{key}.json"


def recalled(name: str, search: Callable[[], Facts | None], holds: Callable[[Facts], bool]) -> Facts | None:
    """The facts under ``name`` that this machine has found before and that still hold, else what ``search`` finds."""
    try:
        path = facts_path()
    except RuntimeError as error:
        _log.debug("what is found of this machine's kernels is not kept: %s", error)
        tell_search(None)
        return search()
    kept = _read(path)
    if name in kept and holds(kept[name]):
        return kept[name]
    tell_search(path.parent)
    found = search()
    if found is not None:
        # Read again: other processes find facts meanwhile. One that is lost is found again.
        _write(path, {**_read(path), name: found})
    return found


def _read(path: Path) -> dict[str, Facts]:
    try:
        table = json.loads(path.read_text())
        facts = {name: Facts(**found) for name, found in table.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {name: one for name, one in facts.items() if _sound(one)}


def _sound(facts: Facts) -> bool:
    numbers = (facts.fewest, facts.multiple, facts.block)
    return (
        all(type(number) is int for number in numbers)
        and facts.fewest > 0 < facts.multiple
        and facts.block >= 0
    )


def _write(path: Path, facts: dict[str, Facts]) -> None:
    content = json.dumps({name: asdict(one) for name, one in sorted(facts.items())}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.encode(), durable=False)
    except OSError as error:
        _not_kept(str(path), error.strerror or str(error))


@functools.cache
def _not_kept(path: str, why: str) -> None:
    """Says it once: there is a fact for each shape."""
    _log.warning(
        "what was tried of this machine's kernels cannot be kept in %s, and each start tries it anew: %s",
        path,
        why,
    )
