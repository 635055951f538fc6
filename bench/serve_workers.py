"""Pages between two workers against a plain blocking socket that moves the same bytes: ``python -m bench.serve_workers``.

Paired rounds in one run over the loopback: raw ``sendall``/``recv_into`` of the bytes, then a pull with its proof, identity, offer and a digest
of each page. The ratio is the median of the pairs' ratios; the goal is 0.9.
"""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time

from phalanx.serve.workers.page_client import pull
from phalanx.serve.workers.page_server import OfferedPages, PageServer
from phalanx.traffic.events import Identity

PAGE_BYTES, PAGES, ROUNDS = 1 << 20, 256, 9


def plain_s(body: list[bytes]) -> float:
    """Seconds for the bytes over a plain socket, from connecting to the last byte, into new memory."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send() -> None:
            connection, _ = listener.accept()
            with connection:
                for page in body:
                    connection.sendall(page)

        sender = threading.Thread(target=send)
        sender.start()
        began_s = time.perf_counter()
        received = []
        with socket.create_connection(listener.getsockname()) as connection:
            for page in body:
                view = memoryview(bytearray(len(page)))
                done = 0
                while done < len(view):
                    done += connection.recv_into(view[done:])
                received.append(view)
        seconds = time.perf_counter() - began_s
        sender.join()
    return seconds


def main() -> None:
    """Prints both rates and their ratio."""
    identity = Identity("weights", "numerics")
    pages = {number.to_bytes(16, "big"): os.urandom(PAGE_BYTES) for number in range(PAGES)}
    offered = OfferedPages(600.0)
    server = PageServer(offered, identity, "token")
    plain, pulled = [], []
    for job in range(ROUNDS):
        offered.offer(job, pages)
        plain.append(plain_s(list(pages.values())))
        began_s = time.perf_counter()
        got = pull("127.0.0.1", server.port, "token", identity, job, tuple(pages), within_s=60.0)
        pulled.append(time.perf_counter() - began_s)
        if got.failure or len(got.pages) != PAGES:
            raise SystemExit(f"the pull failed: {got.failure}")
        del got
    server.close()
    size = PAGES * PAGE_BYTES / 2**30
    ratio = statistics.median(one / other for one, other in zip(plain, pulled, strict=True))
    print(
        f"plain socket {size / statistics.median(plain):.2f} GiB/s, pages {size / statistics.median(pulled):.2f} GiB/s, "
        f"ratio {ratio:.2f} (goal 0.9)"
    )


if __name__ == "__main__":
    main()
