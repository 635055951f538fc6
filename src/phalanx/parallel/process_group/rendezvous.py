"""Rendezvous of the ranks of a run under any launcher.

Our own launcher, ``torchrun`` and ``srun`` pass a process its rank in different environment variables. ``rank_from_environment`` is
a pure function from that environment to a ``RankEnvironment``; ``join`` acts on it. On one machine the ranks meet in a file, so no
port can be in use; across machines they meet at a TCP address.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
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
from phalanx.parallel.torch_compat import forget_groups
from phalanx.process.this_process import host_name
from phalanx.run.peers import AddressError, read_host, read_port

_DEFAULT_PORT = "29500"  # torchrun's
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID")
_FIRST_PORT, _PORTS = 20_000, 10_000
_SILENT_S = 10.0
"""Time after which a rank prints that it waits for the others."""


class RendezvousError(RuntimeError):
    """The ranks could not meet; the message has the remedy."""


@dataclass(frozen=True)
class RankEnvironment:
    """A process's rank and rendezvous, from its launcher's environment variables."""

    rank: int
    ranks: int
    local_rank: int
    """Index among the processes on this machine; selects the GPU."""
    meeting_point: str
    """An ``init_method`` URL of ``torch.distributed``."""
    launcher: str
    host: str = ""
    """The machine of rank 0, if the ranks meet over TCP."""
    several_machines: bool = False
    """True if the launcher puts the ranks on more than one machine."""


def rank_from_environment(environ: Mapping[str, str]) -> RankEnvironment | None:
    """Return this process's rank and rendezvous, or ``None`` if no launcher started it as a rank. Recognized are this
    project's launcher, torchrun and srun, in this order.

    Raise ``RendezvousError`` if the variables of torchrun or srun are incomplete or malformed.
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
        # torchrun serves the store itself and sets this variable; env:// connects to that store.
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
    """Return the machine of rank 0, without brackets, and the ``tcp://`` URL at which the ranks meet.

    An empty ``port`` means torchrun's default. Raises ``RendezvousError`` for an empty or malformed host, or a malformed port.
    """
    if not host:
        raise RendezvousError(f"{launcher} gave this process a rank but no address: set MASTER_ADDR")
    try:
        bare = read_host(host)
        return bare, f"tcp://{join_address(bare, read_port(port or _DEFAULT_PORT))}"
    except AddressError as error:
        raise RendezvousError(f"{launcher} gave this process MASTER_ADDR and MASTER_PORT: {error}") from error


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable as a number, or ``default`` if it is not set; raises ``RendezvousError`` for anything else."""
    value = environ.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdecimal():
        raise RendezvousError(f"{name} is {value!r}, and must be a number: the launcher of ranks sets it")
    return int(value)


def _port_of_step(environ: Mapping[str, str]) -> str:
    """Return a port derived from the job's and the step's number, so that two steps on one node differ; below the ephemeral port range."""
    job, step = (
        int(value) if value.isdecimal() else 0 for value in (environ.get(name, "") for name in _STEP)
    )
    return str(_FIRST_PORT + (job * 97 + step) % _PORTS)


def first_host(nodes: str) -> str:
    """Return the first of Slurm's compressed host names: ``"gpu[003-007,9],x"`` gives ``"gpu003"``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return "" if match is None else match.group(1) + (match.group(2) or "")


def device_for(kind: str, local_rank: int) -> torch.device:
    """Return the device of the rank ``local_rank`` of this machine: ``kind`` is "cpu", "cuda" or "auto" (a GPU if
    there is one).

    Raises ``RendezvousError`` for "cuda" without a GPU, or if there are fewer GPUs than ranks.
    """
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
    """Return the backend of every process group of ranks that compute on ``device``: NCCL on GPUs, gloo on CPUs.

    Never both. Gloo connects each rank of a group with every other when the group is made. In addition to NCCL it would cost as many
    sockets as all groups have ranks. Host data is exchanged through the GPU (``typed_gather.py``).
    """
    return "nccl" if on_gpu(device) else "gloo"


def join(
    environment: RankEnvironment, device: torch.device, timeout_s: float, *, silent_s: float = _SILENT_S
) -> None:
    """Make this process a rank of the default process group: gloo on CPUs, NCCL on GPUs. Waits for all ranks.

    First chooses gloo's network interface, in the environment: loopback with the launcher of ``phalanx train``, else,
    on CPUs only, the one towards rank 0. On GPUs it makes the device current. After ``silent_s`` seconds a line on standard error names
    the address at which this rank waits for the others.

    Raises ``RendezvousError`` if the address cannot be used, no interface is found, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names one
    that is not there, or some rank did not join within ``timeout_s`` seconds, which is also the timeout of collectives.
    """
    _require_address(environment)
    require_interface(device)
    if environment.launcher == "phalanx":
        # All ranks are on this machine: a laptop's host name may resolve to nowhere, loopback always works.
        choose_interface(["127.0.0.1"], shared=False)
    elif not on_gpu(device):
        choose_interface([address_towards(environment.host)], shared=environment.several_machines)
    make_current(device)
    try:
        # Ranks of one machine meet in a file. PyTorch does not decode a ``file://`` URL, and would open a file with ``%20`` in its name.
        address = urlparse(environment.meeting_point)
        store = FileStore(unquote(address.path), environment.ranks) if address.scheme == "file" else None
        with _waiting_named(environment, silent_s):
            dist.init_process_group(
                backend=backends_for(device),
                init_method=None if store else environment.meeting_point,
                store=store,
                rank=environment.rank,
                world_size=environment.ranks,
                timeout=timedelta(seconds=timeout_s),
            )
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        raise RendezvousError(_explain(error, environment)) from error


@contextmanager
def _waiting_named(environment: RankEnvironment, silent_s: float) -> Iterator[None]:
    """Context that prints after ``silent_s`` seconds that this rank waits for the others, rank 0 among them, if they meet at an address."""
    address = urlparse(environment.meeting_point)
    if address.scheme != "tcp" or environment.rank == 0:
        yield
        return
    line = (
        f"rank {environment.rank} of {environment.ranks} on {host_name()} is waiting for the others, which meet at rank 0's address "
        f"{address.netloc} (MASTER_ADDR, MASTER_PORT): are all ranks started, and does no firewall lie between?"
    )
    timer = threading.Timer(silent_s, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _require_address(environment: RankEnvironment) -> None:
    """Raise ``RendezvousError`` if rank 0's host name does not resolve here. PyTorch would retry for the full timeout."""
    address = urlparse(environment.meeting_point)
    if address.scheme != "tcp" or address.hostname is None:
        return
    try:
        socket.getaddrinfo(address.hostname, address.port)
    except OSError as error:
        raise RendezvousError(
            f"rank {environment.rank} of {environment.ranks} finds no address for {address.hostname}, the machine of rank 0 ({error.strerror}): set "
            "MASTER_ADDR to a name or an address that this machine can resolve"
        ) from error


def require_interface(device: torch.device) -> None:
    """Raise ``RendezvousError`` if the variable of the back end of ``device`` names an interface that this machine does not have, as far
    as they can be listed. It is GLOO_SOCKET_IFNAME on CPUs, NCCL_SOCKET_IFNAME on GPUs.
    """
    is_nccl = on_gpu(device)
    variable = "NCCL_SOCKET_IFNAME" if is_nccl else "GLOO_SOCKET_IFNAME"
    chosen = os.environ.get(variable, "")
    interfaces = {interface.name for interface in local_interfaces()}
    missing = missing_for_nccl(chosen, interfaces) if is_nccl else set(chosen.split(",")) - interfaces
    if chosen and interfaces and missing:
        raise RendezvousError(
            f"{variable} is {chosen}, and {host_name()} has no interface {' and no '.join(sorted(missing))} with an address: unset the variable, "
            f"or set it to one of {', '.join(sorted(interfaces))}"
        )


def missing_for_nccl(chosen: str, interfaces: Set[str]) -> Set[str]:
    """Return the names in a value of NCCL_SOCKET_IFNAME if NCCL finds none of them among ``interfaces``, else nothing.

    Names are beginnings of interfaces' names; after "=" they are whole names, and after "^" the interfaces to leave out
    (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
    """
    if chosen.startswith("^"):
        return set()
    names = set(filter(None, chosen.removeprefix("=").split(",")))
    if chosen.startswith("="):
        return set() if names & interfaces else names
    return set() if any(name.startswith(tuple(names)) for name in interfaces) else names


def choose_interface(addresses: Sequence[str], *, shared: bool) -> None:
    """Make gloo listen at the interface with the first of ``addresses``, unless GLOO_SOCKET_IFNAME is set. The choice
    is set in the environment of this process.

    By default gloo listens at the address of the host name. On many machines that is a loopback address (127.0.1.1 in
    /etc/hosts), to which ranks of other machines cannot connect. ``shared`` is True if there may be such ranks. Without
    them, nothing is set if no interface has any of the addresses.

    Raises:
        RendezvousError: ``shared``, and no reachable interface has any of the addresses, or one of the default route or host name.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    others = (*default_addresses(), *resolved(host_name())) if shared else ()
    name = interface_for((*filter(None, addresses), *others), local_interfaces(), shared=shared)
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    elif shared:
        own = host_name()
        raise RendezvousError(
            f"the ranks of other machines could not reach those of this one: no interface here has {' or '.join(addresses) or 'an address'}, and "
            f"the host name {own} is {' or '.join(resolved(own)) or 'unknown'}: set GLOO_SOCKET_IFNAME to the interface that they reach"
        )


def _explain(error: Exception, environment: RankEnvironment) -> str:
    """Return the message for a failed rendezvous, with the first line of ``error`` and what to check; an occupied port has its own."""
    text = str(error)
    meeting_point = environment.meeting_point
    if "EADDRINUSE" in text or os.strerror(errno.EADDRINUSE) in text:
        return f"the port of {meeting_point} is in use by another program: set MASTER_PORT to a free one and start again"
    first_line = text.splitlines()[0] if text else type(error).__name__
    is_file = meeting_point.startswith("file:")
    place = (
        "its folder can be written and has room"
        if is_file
        else "MASTER_ADDR and MASTER_PORT name the machine of rank 0"
    )
    return (
        f"rank {environment.rank} of {environment.ranks} could not meet the others at {meeting_point}: {first_line}; "
        f"check that every rank was started, and that {place}"
    )


def leave() -> None:
    """Leave the process group, if this process is in one or has begun to make one.

    An error of PyTorch in leaving a broken group is raised, but the group is left anyway.
    """
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    finally:
        forget_groups()
