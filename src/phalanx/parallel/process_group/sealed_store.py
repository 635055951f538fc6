"""A rendezvous whose ranks know a run's token: values in the store are sealed, and every rank proves itself to all others.

PyTorch's ``TCPStore`` lets in whoever reaches its port, and gloo and NCCL believe what they find in it: the addresses of the other
ranks. ``SealedStore`` puts an HMAC under the token before every value, and refuses one without. An old value could be played back,
and gloo's own connections know no token; so once the group is made, ``prove_members`` lets each rank answer a fresh challenge through it.

What this does not do: counters in the store carry no seal, a stranger can delete keys and so keep an epoch from forming, and what travels
between ranks afterwards is neither encrypted nor sealed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from phalanx.parallel.process_group.rendezvous import RendezvousError
from phalanx.parallel.process_group.typed_gather import RankMessageError, gather_typed
from phalanx.wire.messages import token_mac

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
