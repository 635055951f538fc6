"""Health checks of a machine: short tests of the hardware that training depends on, before a run and on
suspicion.

Every check that computes or moves data compares the result with the right one, bit by bit. Small integers in
a matrix product have an exact result, checked by a product with a vector as in algorithm-based fault
tolerance (Huang and Abraham, IEEE Trans. Computers, 1984). Memory and disk must return the written bytes, and
a link must deliver the sent ones. Rates are measured as well, and compared with the caller's limits. NVIDIA
GPUs also report on themselves: memory errors, temperature, throttled clocks (NVML), and Xid errors in the
kernel's log.

torch is imported only inside the checks that need it, so that an agent may import this module.
``phalanx.fleet.health.node_health`` assigns the checks to the processes of a fleet. Passing is no proof:
machines that compute wrongly once in a while pass such tests; audits (``phalanx.fleet.health.audit``) find
those.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

CheckStatus = Literal["good", "bad", "slow", "not checked"]

MATRIX = 1024
"""Rows and columns of the products whose every element is checked."""
_EXACT = (("float32", 3, MATRIX), ("bfloat16", 1, 256))
"""Formats with the largest factor and the inner dimension for which results are exact: below 2^24 and up to 2^8."""
MEMORY_PATTERNS = (0x00, 0xFF, 0x55, 0xAA)
LINK_BYTES = 16 << 20


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    check: str
    status: CheckStatus
    text: str
    """The finding, for people."""
    measures: dict[str, float] = field(default_factory=dict)
    """Numbers, with their units in the names."""


@dataclass(frozen=True)
class HealthLimits:
    """The lowest rates that pass; 0 accepts any."""

    matmul_flops: float = 0.0
    """FLOP/s."""
    disk_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    temperature_c: float = 0.0
    """The highest temperature that passes, in degrees Celsius; 0 uses the GPU's own limit."""


ANY_RATE = HealthLimits()


def fit(results: Sequence[CheckResult]) -> bool:
    """Return True if a machine with these results may train: nothing is bad, nothing too slow."""
    return not any(result.status in ("bad", "slow") for result in results)


def rated(check: str, text: str, measures: dict[str, float], rate: float, lowest: float) -> CheckResult:
    """Return the result of a check whose data were right: good, or slow if ``rate`` is below ``lowest``."""
    if rate < lowest:
        return CheckResult(check, "slow", f"{text}, less than the required {lowest:.3g}", measures)
    return CheckResult(check, "good", text, measures)


def guarded(check: str, run: Callable[[], CheckResult]) -> CheckResult:
    """Run a check. An ``OSError``, ``RuntimeError`` or ``MemoryError`` in it becomes a bad result named ``check``."""
    try:
        return run()
    except (OSError, RuntimeError, MemoryError) as error:
        return CheckResult(check, "bad", f"{type(error).__name__}: {error}")


def matrix_product(
    device: str, products: int = 8, limits: HealthLimits = ANY_RATE, seed: int = 0
) -> CheckResult:
    """Check exact products on ``device``, then measure the matmul rate: bf16 on a GPU, else fp32.

    Return the failed check, or a result that is slow if the rate is below ``limits.matmul_flops`` (FLOP/s).
    """
    import torch

    from phalanx.hardware.local.device import measure_matmul_flops, on_gpu

    exact, torch_device = exact_products(device, products, seed), torch.device(device)
    if exact.status != "good":
        return exact
    timed = torch.bfloat16 if on_gpu(torch_device) else torch.float32
    rate = measure_matmul_flops(torch_device, timed)
    text = f"{exact.text}, {rate / 1e12:.3g} TFLOP/s in {str(timed).removeprefix('torch.')}"
    return rated("matrix product", text, {"flops_per_s": rate}, rate, limits.matmul_flops)


def exact_products(device: str, products: int, seed: int = 0) -> CheckResult:
    """Multiply random integer matrices on ``device``, in each dtype in turn, and check every row by an fp64
    product.

    Return bad, with the number of wrong rows, at the first wrong product; else good.
    """
    import torch

    torch_device = torch.device(device)
    for number in range(products):
        dtype, most, inner = _EXACT[number % len(_EXACT)]
        left, right, vector = (t.to(torch_device) for t in _integers(seed + number, most, inner))
        narrow = getattr(torch, dtype)
        product = (left.to(narrow) @ right.to(narrow)).to(torch.float64) @ vector
        expected = left @ (right @ vector)
        wrong = int((product != expected).sum())
        if wrong:
            text = f"{dtype} product {number + 1} of {products}: {wrong} of {MATRIX} rows are wrong"
            return CheckResult("matrix product", "bad", text, {"wrong_rows": wrong})
    return CheckResult("matrix product", "good", f"{products} exact products")


def _integers(seed: int, most: int, inner: int) -> tuple[Any, Any, Any]:
    """Return two matrices and a vector of integers, drawn from ``seed``: fp64, on the CPU.

    The matrices ``(MATRIX, inner)`` and ``(inner, MATRIX)`` have values from ``-most`` to ``most``, the vector
    ``(MATRIX,)`` odd ones from 1 to 65,535. For the factors of ``_EXACT`` every sum of their products is exact in
    fp64. A single wrong element in a row of the matrices' product changes that row's product with the vector.
    """
    import torch

    random = torch.Generator().manual_seed(seed)
    left = torch.randint(-most, most + 1, (MATRIX, inner), generator=random)
    right = torch.randint(-most, most + 1, (inner, MATRIX), generator=random)
    vector = 2 * torch.randint(0, 1 << 15, (MATRIX,), generator=random) + 1
    return left.double(), right.double(), vector.double()


def memory(device: str, nbytes: int = 256 << 20) -> CheckResult:
    """Write patterns and addresses into ``nbytes`` of the memory of ``device`` and read them back.

    Bad if any word differs, with only ``wrong_words`` as measure. A good result has the rate ``bytes_per_s``,
    in which allocation and comparison are included.
    """
    import torch

    begin = time.perf_counter()
    words = nbytes // 8
    block = torch.empty(words, dtype=torch.int64, device=device)
    wrong = 0
    for pattern in MEMORY_PATTERNS:
        word = int.from_bytes(bytes([pattern]) * 8, "little", signed=True)
        block.fill_(word)
        wrong += int((block != word).sum())
    # Stuck address lines show only if every word is different.
    torch.arange(words, out=block)
    wrong += int((block[1:] - block[:-1] != 1).sum()) + int(block[0] != 0)
    rate = 2 * (len(MEMORY_PATTERNS) + 1) * nbytes / (time.perf_counter() - begin)
    if wrong:
        return CheckResult(
            "memory", "bad", f"{wrong} words of {nbytes >> 20} MiB read back wrongly", {"wrong_words": wrong}
        )
    text = f"{nbytes >> 20} MiB in {len(MEMORY_PATTERNS) + 1} patterns"
    return CheckResult("memory", "good", text, {"bytes_per_s": rate})


def disk(folder: Path, nbytes: int = 64 << 20, limits: HealthLimits = ANY_RATE) -> CheckResult:
    """Write ``nbytes``, in whole MiB and at least one, into a new file in ``folder``, sync it, read it back past
    the page cache and remove it.

    Bad if a MiB differs, with only ``wrong_mib`` as measure. Too slow below the limit of the write rate, sync
    included. Raises ``OSError``.
    """
    block = os.urandom(1 << 20)
    blocks = max(1, nbytes >> 20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".health-") as file:
        begin = time.perf_counter()
        for number in range(blocks):
            file.write(number.to_bytes(8, "little") + block[8:])
        file.flush()
        os.fsync(file.fileno())
        written_s = time.perf_counter() - begin
        # Data still in the page cache would prove nothing about the disk.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        wrong = sum(file.read(1 << 20) != n.to_bytes(8, "little") + block[8:] for n in range(blocks))
    if wrong:
        return CheckResult(
            "disk", "bad", f"{wrong} of {blocks} MiB in {folder} read back wrongly", {"wrong_mib": wrong}
        )
    rate = (blocks << 20) / written_s
    text = f"{blocks} MiB in {folder}, durable at {rate / 1e6:,.0f} MB/s"
    return rated("disk", text, {"bytes_per_s": rate}, rate, limits.disk_bytes_per_s)


def serve_link(listener: socket.socket) -> None:
    """Answer one ``probe_link``: echo everything until the other side closes its half. Waits for one connection."""
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(1 << 18):
            connection.sendall(data)


def probe_link(
    address: tuple[str, int],
    nbytes: int = LINK_BYTES,
    timeout_s: float = 30.0,
    limits: HealthLimits = ANY_RATE,
) -> CheckResult:
    """Send ``nbytes`` to a ``serve_link`` at ``address`` and check that they return unchanged.

    Bad if the bytes differ, slow below the limit. Measures the shortest of 20 round trips, and ``nbytes`` over
    the time until all have returned. Raises ``OSError`` if the link breaks or ``timeout_s`` passes without
    data.
    """
    with socket.create_connection(address, timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trip_s = min(_round_trip_s(connection) for _ in range(20))
        begin = time.perf_counter()
        is_unchanged = _there_and_back(connection, nbytes)
        rate = nbytes / (time.perf_counter() - begin)
    measures = {"round_trip_s": trip_s, "bytes_per_s": rate}
    name = f"{address[0]}:{address[1]}"
    if not is_unchanged:
        return CheckResult("link", "bad", f"{nbytes >> 20} MiB to {name} came back changed", measures)
    text = (
        f"{nbytes >> 20} MiB to {name} and back at {rate / 1e6:,.0f} MB/s, round trip {trip_s * 1e6:.0f} us"
    )
    return rated("link", text, measures, rate, limits.link_bytes_per_s)


def _round_trip_s(connection: socket.socket) -> float:
    """Return the seconds until one byte comes back; raises ``ConnectionError`` for another answer."""
    begin = time.perf_counter()
    connection.sendall(b"?")
    if connection.recv(1) != b"?":
        raise ConnectionError("the other side of the link does not answer as serve_link does")
    return time.perf_counter() - begin


def _there_and_back(connection: socket.socket, nbytes: int) -> bool:
    """Send random bytes and receive them again. Return True if they came back unchanged.

    Raises ``ConnectionError`` if the link breaks.
    """
    block = os.urandom(1 << 20)
    sent = (block * -(-nbytes // len(block)))[:nbytes]

    def send() -> None:
        for first in range(0, nbytes, len(block)):  # The socket's timeout is that of one call.
            connection.sendall(sent[first : first + len(block)])

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    received = bytearray()
    while len(received) < nbytes:
        data = connection.recv(min(nbytes - len(received), 1 << 18))
        if not data:
            missing = nbytes - len(received)
            raise ConnectionError(f"the link broke with {missing} of {nbytes} bytes outstanding")
        received += data
    sender.join()
    return received == sent


def loopback(nbytes: int = LINK_BYTES, limits: HealthLimits = ANY_RATE) -> CheckResult:
    """Check the network stack of this machine by ``probe_link`` over 127.0.0.1; a thread of this process answers.
    Raises ``OSError``.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve_link, args=(listener,), daemon=True)
        server.start()
        return probe_link(listener.getsockname(), nbytes, limits=limits)
