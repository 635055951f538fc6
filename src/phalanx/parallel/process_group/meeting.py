"""Rendezvous of living processes, which form one process group after another.

Every process keeps a listening socket ready and tells its address to whoever decides who gets which rank. The process that
gets rank 0 turns that socket into the store in which all meet; nobody has to choose a port, and a store is never used twice,
so that a member of an earlier epoch cannot disturb a later one. Whoever does not know the run's token is refused
(``phalanx.parallel.process_group.sealed_store``).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from phalanx.hardware.local.device import make_current, on_gpu
from phalanx.hardware.local.network import family_of, join_address, split_address
from phalanx.parallel.process_group.rendezvous import backends_for
from phalanx.parallel.process_group.sealed_store import SealedStore, prove_members

_RETRY_S, _ATTEMPT_S = 0.02, 1.0


class MeetingPoint:
    """A listening socket, bound early, that becomes the store of one rendezvous."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._socket = socket.create_server((host, 0), family=family_of(host), backlog=4096)

    @property
    def address(self) -> str:
        """As "host:port"."""
        return join_address(self._host, self._socket.getsockname()[1])

    def into_store(self, ranks: int, timeout_s: float) -> TCPStore:
        """Serves a store at this socket, which it takes over."""
        port = self._socket.getsockname()[1]
        return TCPStore(
            self._host,
            port,
            ranks,
            True,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
        )

    def close(self) -> None:
        """Gives up the socket, if it was not used."""
        self._socket.close()


def meet(
    address: str,
    here: MeetingPoint | None,
    epoch: int,
    rank: int,
    ranks: int,
    device: torch.device,
    timeout_s: float,
    check: Callable[[], None],
    token: str,
) -> Store:
    """Makes this process rank ``rank`` of the default process group of ``epoch``.

    Args:
        address: Where all meet, as "host:port".
        here: This process's own meeting point if that is where they meet (on rank 0), else ``None``.
        epoch: Distinguishes this group from any other.
        rank: This process's.
        ranks: Of all.
        device: gloo serves CPUs, NCCL GPUs.
        timeout_s: Of the group's collectives.
        check: Called now and then while waiting; may raise to end the wait.
        token: Of the run; every rank must prove that it knows it.

    Returns:
        The store; keep it until the group has been left.

    Raises:
        RendezvousError: Some rank does not know the token.
    """
    make_current(device)
    host, port = split_address(address)
    if here is not None:
        store = here.into_store(ranks, timeout_s)
    else:
        store = _store_at(host, int(port), ranks, timeout_s, check)
    purpose = f"epoch-{epoch}"
    kept: Store = PrefixStore(purpose, store)
    if not on_gpu(device):  # NCCL's own threads use its store, and would have to call back into Python
        kept = SealedStore(kept, token, purpose)
    dist.init_process_group(
        backend=backends_for(device),
        store=kept,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    prove_members(token, purpose)
    return kept


def _store_at(host: str, port: int, ranks: int, timeout_s: float, check: Callable[[], None]) -> TCPStore:
    """The store that another rank keeps there, as soon as it does.

    PyTorch's own waiting for it cannot be broken off: it tries to connect again until its time is over, whoever ends the
    connection. So it gets little time, again and again.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        check()
        try:
            store = TCPStore(host, port, ranks, False, timedelta(seconds=_ATTEMPT_S))
        except RuntimeError:  # DistNetworkError, DistStoreError
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_RETRY_S)
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store
