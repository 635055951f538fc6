"""Rendezvous: the ranks of a run find each other, whoever started them.

Our own launcher, ``torchrun`` and ``srun`` each tell a process its rank through different environment variables.
``rank_from_environment`` is a pure function from that environment to a ``RankEnvironment``; ``join`` acts on it. On one machine the meeting
point is a file, so no port can be in use; across machines it is a TCP address.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import unquote, urlparse

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from phalanx.hardware.local.device import device_of_rank, gpus, make_current, on_gpu
from phalanx.hardware.local.network import (
    address_towards,
    default_addresses,
    interface_for,
    join_address,
    local_interfaces,
    resolved,
)
from phalanx.parallel.mesh.torch_compat import forget_groups
from phalanx.run.peers import AddressError, read_host, read_port

_DEFAULT_PORT = "29500"  # torchrun's
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID")
_FIRST_PORT, _PORTS = 20_000, 10_000


class RendezvousError(RuntimeError):
    """The ranks cannot find each other; the message says what to change."""


@dataclass(frozen=True)
class RankEnvironment:
    """A process's rank and rendezvous, as its launcher's environment variables say."""

    rank: int
    ranks: int
    local_rank: int
    """Number among the processes on this machine; chooses the GPU."""
    meeting_point: str
    """An ``init_method`` URL of ``torch.distributed``."""
    launcher: str
    host: str = ""
    """The machine of rank 0, of ranks that meet over TCP."""
    several_machines: bool = False
    """True if the launcher puts the ranks on more than one machine."""


def rank_from_environment(environ: Mapping[str, str]) -> RankEnvironment | None:
    """This process's rank and rendezvous, or ``None`` if no launcher started it as a rank.

    Raises ``RendezvousError`` when an environment is there but incomplete.
    """
    if "PHALANX_RANK" in environ:
        return RankEnvironment(
            int(environ["PHALANX_RANK"]),
            int(environ["PHALANX_RANKS"]),
            int(environ["PHALANX_RANK"]),
            environ["PHALANX_MEETING_POINT"],
            "phalanx",
        )
    if "RANK" in environ and "WORLD_SIZE" in environ:
        host, address = _tcp(environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", ""), "torchrun")
        # torchrun serves the store itself and says so; connecting by env:// respects that.
        point = "env://" if "TORCHELASTIC_RUN_ID" in environ else address
        rank, ranks = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        several = _number(environ, "LOCAL_WORLD_SIZE", ranks) < ranks
        local_rank = _number(environ, "LOCAL_RANK", rank)
        return RankEnvironment(rank, ranks, local_rank, point, "torchrun", host, several)
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        ranks = _number(environ, "SLURM_NTASKS", 1)
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
        port = environ.get("MASTER_PORT", "") or _port_of_step(environ)
        host, point = _tcp(environ.get("MASTER_ADDR") or first_host(nodes), port, "srun")
        rank, local_rank = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID", 0)
        return RankEnvironment(rank, ranks, local_rank, point, "srun", host, first_host(nodes) != nodes)
    return None


def _tcp(host: str, port: str, launcher: str) -> tuple[str, str]:
    """Return the machine of rank 0 and the URL at which the ranks meet."""
    if not host:
        raise RendezvousError(f"{launcher} gave this process a rank but no address: set MASTER_ADDR")
    try:
        bare = read_host(host)
        return bare, f"tcp://{join_address(bare, read_port(port or _DEFAULT_PORT))}"
    except AddressError as error:
        raise RendezvousError(f"{launcher} gave this process MASTER_ADDR and MASTER_PORT: {error}") from error


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environ.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdecimal():
        raise RendezvousError(f"{name} is {value!r}, and must be a number: the launcher of ranks sets it")
    return int(value)


def _port_of_step(environ: Mapping[str, str]) -> str:
    """A port that follows from the job and the step, so that two on one node do not meet; below the ports of outgoing connections."""
    job, step = (
        int(value) if value.isdecimal() else 0 for value in (environ.get(name, "") for name in _STEP)
    )
    return str(_FIRST_PORT + (job * 97 + step) % _PORTS)


def first_host(nodes: str) -> str:
    """The first of Slurm's compressed host names: ``"gpu[003-007,9],x"`` gives ``"gpu003"``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return "" if match is None else match.group(1) + (match.group(2) or "")


def device_for(kind: str, local_rank: int) -> torch.device:
    """The device of a rank: ``kind`` is "cpu", "cuda" or "auto" (a GPU if there is one)."""
    if kind == "cpu" or (kind == "auto" and not gpus()):
        return torch.device("cpu")
    if not gpus():
        raise RendezvousError(
            'runtime.device = "cuda", but PyTorch sees no GPU here: set it to "cpu" or "auto"'
        )
    if local_rank >= gpus():
        raise RendezvousError(
            f"rank {local_rank} of this machine has no GPU of its own: there are {gpus()}; "
            "start fewer ranks, or set runtime.device to cpu"
        )
    return device_of_rank(local_rank)


def backends_for(device: torch.device) -> str:
    """The backend of every process group of ranks that compute on ``device``: NCCL on GPUs, gloo on CPUs.

    Never both: gloo connects each rank of a group with every other when the group is made, so that beside NCCL a rank would have as many
    sockets as all its groups have ranks. What is no tensor of the training goes by way of the GPU (``typed_gather.py``).
    """
    return "nccl" if on_gpu(device) else "gloo"


def join(place: RankEnvironment, device: torch.device, timeout_s: float) -> None:
    """Makes this process a rank of the default process group: gloo on CPUs, NCCL on GPUs.

    Raises ``RendezvousError`` when the address cannot be used or not everybody came within ``timeout_s``.
    """
    _require_address(place)
    if place.launcher == "phalanx":
        # All ranks are on this machine: a laptop's host name may resolve to nowhere, loopback always works.
        choose_interface(["127.0.0.1"], shared=False)
    elif not on_gpu(device):
        choose_interface([address_towards(place.host)], shared=place.several_machines)
    make_current(device)
    try:
        store = _file_store(place)
        dist.init_process_group(
            backend=backends_for(device),
            init_method=None if store else place.meeting_point,
            store=store,
            rank=place.rank,
            world_size=place.ranks,
            timeout=timedelta(seconds=timeout_s),
        )
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        raise RendezvousError(_explain(error, place)) from error


def _require_address(place: RankEnvironment) -> None:
    """Raises ``RendezvousError`` if the name of rank 0's machine has no address here: PyTorch would try for the whole timeout."""
    address = urlparse(place.meeting_point)
    if address.scheme != "tcp" or address.hostname is None:
        return
    try:
        socket.getaddrinfo(address.hostname, address.port)
    except OSError as error:
        raise RendezvousError(
            f"rank {place.rank} of {place.ranks} finds no address for {address.hostname}, the machine of rank 0 ({error.strerror}): set "
            "MASTER_ADDR to a name or an address that this machine knows"
        ) from error


def choose_interface(addresses: Sequence[str], *, shared: bool) -> None:
    """Have gloo listen at the interface that has the first of ``addresses``, unless GLOO_SOCKET_IFNAME names one.

    By itself gloo listens at the address of the host name, which on many machines is a loopback address (127.0.1.1 in /etc/hosts). The ranks
    of other machines cannot connect to that. ``shared``: there may be such ranks.

    Raises:
        RendezvousError: No interface that others reach has any of the addresses, and neither the default route nor the host name leads to one.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    others = (*default_addresses(), *resolved(socket.gethostname())) if shared else ()
    name = interface_for((*filter(None, addresses), *others), local_interfaces(), shared=shared)
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    elif shared:
        own = socket.gethostname()
        raise RendezvousError(
            f"the ranks of other machines could not reach those of this one: no interface here has {' or '.join(addresses) or 'an address'}, and "
            f"the host name {own} is {' or '.join(resolved(own)) or 'unknown'}: set GLOO_SOCKET_IFNAME to the interface that they reach"
        )


def _file_store(place: RankEnvironment) -> FileStore | None:
    """The file in which the ranks of one machine meet, or ``None`` if they meet elsewhere.

    PyTorch takes the path of a ``file://`` address as it is written, and would look for one with ``%20`` in its name.
    """
    address = urlparse(place.meeting_point)
    return FileStore(unquote(address.path), place.ranks) if address.scheme == "file" else None


def _explain(error: Exception, place: RankEnvironment) -> str:
    text = str(error)
    where = place.meeting_point
    if "EADDRINUSE" in text or os.strerror(errno.EADDRINUSE) in text:
        return (
            f"the port of {where} is in use by another program: set MASTER_PORT to a free one and start again"
        )
    first_line = text.splitlines()[0] if text else type(error).__name__
    return (
        f"rank {place.rank} of {place.ranks} could not meet the others at {where}: {first_line}; "
        "check that every rank was started, and that MASTER_ADDR and MASTER_PORT name the machine of rank 0"
    )


def leave() -> None:
    """Leaves the process group, if this process is in one or has begun to make one.

    Raises what a group that is broken raises on the way; it is left all the same.
    """
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    finally:
        forget_groups()
