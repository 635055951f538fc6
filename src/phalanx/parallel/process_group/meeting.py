"""Rendezvous of running processes that form one process group after another, over a store sealed with the run's token.

Every process keeps a listening socket ready and sends its address to the coordinator, which assigns ranks. The process with rank 0
turns its socket into the store where all ranks meet. So no port is configured. A store is never used twice, so a member of an
earlier epoch cannot disturb a later one. A process without the run's token is refused.
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

# A rendezvous store for ranks that share a run's token: values are authenticated, and every rank proves itself to all others.
#
# PyTorch's ``TCPStore`` accepts every client that reaches its port, and gloo and NCCL trust the addresses in it. ``SealedStore``
# prefixes each value with an HMAC keyed by the token, and rejects values without a valid one. An old value could be replayed, and
# gloo's own connections use no token. So after the group is made, ``prove_members`` sends each rank a fresh challenge through it.
#
# Not covered: counters in the store have no HMAC. A stranger can delete keys and so prevent an epoch from forming. Later traffic
# between ranks is neither encrypted nor authenticated.

_SEAL_BYTES = 32
_NONCE_BYTES = 32


class SealedStore(Store):
    """Store that authenticates the values of another store with the run's token.

    PyTorch calls it as long as the process group exists: keep a reference that long.
    """

    def __init__(self, inner: Store, token: str, purpose: str) -> None:
        """Wrap ``inner``. Stores with one token differ in ``purpose``: values of one epoch are invalid in another."""
        super().__init__()
        self._inner, self._token, self._purpose = inner, token, purpose

    def set(self, key: str, value: str | bytes | Sequence[int]) -> None:
        """Store a value with its HMAC."""
        body = value.encode() if isinstance(value, str) else bytes(value)
        # The binding accepts bytes; its annotation is str.
        self._inner.set(key, self._seal(key, body) + body)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for the value of a key and return it. Raise ``RendezvousError`` if its HMAC is not valid for the token."""
        sealed = self._inner.get(key)
        body = sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(sealed[:_SEAL_BYTES], self._seal(key, body)):
            raise RendezvousError(
                f"the value {key} in the ranks' rendezvous was not set by a rank with this run's token: keep the ranks' "
                "ports on a private network"
            )
        return body

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return it. Counters have no HMAC."""
        return self._inner.add(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set, at most ``timeout`` (``None``: the inner store's). Values are not verified."""
        if timeout is None:
            self._inner.wait(list(keys))
        else:
            self._inner.wait(list(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are set."""
        return self._inner.check(list(keys))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return True if it existed."""
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._inner.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of ``get`` and ``wait``."""
        self._inner.set_timeout(timeout)

    def _seal(self, key: str, body: bytes) -> bytes:
        return token_mac(self._token, b"value of the store", self._purpose.encode(), key.encode(), body)


def prove_members(token: str, purpose: str) -> None:
    """Verify through the default group that every rank has the token. A collective.

    Raises:
        RendezvousError: Some ranks do not have it; the message lists them. Or a rank's message cannot be read.
    """
    try:
        challenge = challenge_of(gather_typed(secrets.token_bytes(_NONCE_BYTES), bytes))
        own_proof = proof_of(token, purpose, dist.get_rank(), challenge)
        proofs = gather_typed(own_proof, bytes)
    except RankMessageError as error:
        raise RendezvousError(f"a stranger may be among the ranks: {error}") from error
    strangers = [
        rank
        for rank, proof in enumerate(proofs)
        if not hmac.compare_digest(proof, proof_of(token, purpose, rank, challenge))
    ]
    if strangers:
        raise RendezvousError(f"ranks {strangers} do not have this run's token; give every node the same one")


def challenge_of(nonces: Sequence[bytes]) -> bytes:
    """Combine the challenges of all ranks into one of 32 bytes, so that checking all proofs costs one hash per rank.

    To replay an earlier proof, an attacker would need two lists of challenges with the same SHA-256.
    """
    digest = hashlib.sha256()
    for nonce in nonces:
        digest.update(len(nonce).to_bytes(4, "big") + nonce)
    return digest.digest()


def proof_of(token: str, purpose: str, rank: int, challenge: bytes) -> bytes:
    """Return HMAC-SHA256 under ``token`` of ``rank``, ``purpose`` and all ranks' combined challenge: proof that it knows the token."""
    return token_mac(token, f"member {rank}".encode(), purpose.encode(), challenge)


_RETRY_S, _ATTEMPT_S = 0.02, 1.0


class MeetingPoint:
    """Listening socket, bound early, that becomes the store of one rendezvous."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._socket = socket.create_server((host, 0), family=family_of(host), backlog=4096)

    @property
    def address(self) -> str:
        """Address as "host:port"."""
        return join_address(self._host, self._socket.getsockname()[1])

    def into_store(self, ranks: int, timeout_s: float) -> TCPStore:
        """Serve a store for ``ranks`` ranks at this socket, which the store then owns. Does not wait for the ranks."""
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
        """Close the socket, if no store was made of it."""
        self._socket.close()


def meet(
    address: str,
    own_point: MeetingPoint | None,
    epoch: int,
    rank: int,
    ranks: int,
    device: torch.device,
    timeout_s: float,
    check: Callable[[], None],
    token: str,
) -> Store:
    """Make this process rank ``rank`` of the default process group of ``epoch``.

    Args:
        address: Meeting point of all ranks, as "host:port".
        own_point: This process's meeting point if all meet there (on rank 0), else ``None``.
        epoch: Distinguishes this group from any other.
        rank: Rank of this process.
        ranks: Number of ranks.
        device: gloo serves CPUs, NCCL GPUs.
        timeout_s: Timeout of the meeting and of the group's collectives, seconds.
        check: Called periodically while waiting for the store of another rank; may raise to end the wait.
        token: Token of the run, which every rank must have.

    Returns:
        The store; keep a reference until the group has been left.

    Raises:
        RendezvousError: Some rank does not have the token, or a value of the rendezvous is not sealed with it.
        RuntimeError: An error of PyTorch, such as ranks that did not come within ``timeout_s``.
    """
    make_current(device)
    host, port = split_address(address)
    if own_point is not None:
        store = own_point.into_store(ranks, timeout_s)
    else:
        store = _store_at(host, int(port), ranks, timeout_s, check)
    purpose = f"epoch-{epoch}"
    sealed: Store = PrefixStore(purpose, store)
    if not on_gpu(device):  # NCCL's threads use the store, and would have to call back into Python
        sealed = SealedStore(sealed, token, purpose)
    dist.init_process_group(
        backend=backends_for(device),
        store=sealed,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    prove_members(token, purpose)
    return sealed


def _store_at(host: str, port: int, ranks: int, timeout_s: float, check: Callable[[], None]) -> TCPStore:
    """Connect to the store of another rank, as soon as it is served.

    PyTorch's own wait cannot be interrupted: it retries until its timeout. So it gets short timeouts, repeatedly.
    ``check`` is called before each attempt and may raise. Raises PyTorch's error after ``timeout_s``, which is also
    the store's timeout afterwards.
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
