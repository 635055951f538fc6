"""Rendezvous of living processes, which form one process group after another, over a store that is sealed by the run's token.

Every process keeps a listening socket ready and tells its address to whoever decides who gets which rank. The process that
gets rank 0 turns that socket into the store in which all meet; nobody has to choose a port, and a store is never used twice,
so that a member of an earlier epoch cannot disturb a later one. A process that does not know the run's token is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from phalanx.hardware.local.device import make_current, on_gpu
from phalanx.hardware.local.network import family_of, join_address, split_address
from phalanx.parallel.process_group.rendezvous import RendezvousError, backends_for
from phalanx.parallel.process_group.typed_gather import RankMessageError, gather_typed
from phalanx.wire.messages import token_mac

# A rendezvous store whose ranks know a run's token: values are sealed, and every rank proves itself to all others.
#
# PyTorch's ``TCPStore`` lets in whoever reaches its port, and gloo and NCCL believe what they find in it: the addresses of the other
# ranks. ``SealedStore`` puts an HMAC under the token before every value, and refuses one without. An old value could be played back,
# and gloo's own connections know no token; so once the group is made, ``prove_members`` lets each rank answer a fresh challenge through it.
#
# What this does not do: counters in the store carry no seal, a stranger can delete keys and so keep an epoch from forming, and what travels
# between ranks afterwards is neither encrypted nor sealed.

_SEAL_BYTES = 32
_NONCE_BYTES = 32


class SealedStore(Store):
    """A store in front of another one. PyTorch calls it back for as long as the process group lives: keep a reference so long."""

    def __init__(self, inner: Store, token: str, purpose: str) -> None:
        """``purpose`` tells apart stores that are used with one token: an epoch's values are none of another's."""
        super().__init__()
        self._inner, self._token, self._purpose = inner, token, purpose

    def set(self, key: str, value: str | bytes | Sequence[int]) -> None:
        """Stores a value, sealed."""
        body = value.encode() if isinstance(value, str) else bytes(value)
        # The binding takes bytes, though its annotation says text.
        self._inner.set(key, self._seal(key, body) + body)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value of a key, as soon as there is one. Raises ``RendezvousError`` if nobody who knows the token has set it."""
        sealed = self._inner.get(key)
        body = sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(sealed[:_SEAL_BYTES], self._seal(key, body)):
            raise RendezvousError(
                f"the value {key} in the ranks' rendezvous was not set by a rank that knows this run's token: keep the ranks' "
                "ports on a network of their own"
            )
        return body

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Stores several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        """Adds to a counter, which the store keeps and nobody can seal."""
        return self._inner.add(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys have been set."""
        if timeout is None:
            self._inner.wait(list(keys))
        else:
            self._inner.wait(list(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys have been set."""
        return self._inner.check(list(keys))

    def delete_key(self, key: str) -> bool:
        """Removes a key."""
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        """Number of keys."""
        return self._inner.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        """The time for which ``get`` and ``wait`` wait."""
        self._inner.set_timeout(timeout)

    def _seal(self, key: str, body: bytes) -> bytes:
        return token_mac(self._token, b"value of the store", self._purpose.encode(), key.encode(), body)


def prove_members(token: str, purpose: str) -> None:
    """Lets every rank of the default group prove to all others, through the group itself, that it knows the token. A collective call.

    Raises:
        RendezvousError: A rank does not know it; the message says which.
    """
    try:
        challenge = challenge_of(gather_typed(secrets.token_bytes(_NONCE_BYTES), bytes))
        mine = proof_of(token, purpose, dist.get_rank(), challenge)
        proofs = gather_typed(mine, bytes)
    except RankMessageError as error:
        raise RendezvousError(f"a stranger may be among the ranks: {error}") from error
    strangers = [
        rank
        for rank, proof in enumerate(proofs)
        if not hmac.compare_digest(proof, proof_of(token, purpose, rank, challenge))
    ]
    if strangers:
        raise RendezvousError(f"ranks {strangers} do not know this run's token; give every node the same one")


def challenge_of(nonces: Sequence[bytes]) -> bytes:
    """The challenges of all ranks as one of 32 bytes, so that checking every rank's answer costs as many hashes as there are ranks.

    The digest stands for all of them: whoever wants an earlier answer to fit would have to find two lists with one SHA-256.
    """
    digest = hashlib.sha256()
    for nonce in nonces:
        digest.update(len(nonce).to_bytes(4, "big") + nonce)
    return digest.digest()


def proof_of(token: str, purpose: str, rank: int, challenge: bytes) -> bytes:
    """The answer of ``rank`` to the challenges of all ranks."""
    return token_mac(token, f"member {rank}".encode(), purpose.encode(), challenge)


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
