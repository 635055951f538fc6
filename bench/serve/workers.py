"""Pages between two workers against a plain blocking socket that moves the same bytes: ``python -m bench.serve.workers``.

Rounds in one run on one machine: raw ``sendall``/``recv_into`` of the bytes over the loopback, then pulls with their proof, identity, offer and a digest of
each page, through a socket, in memory that both workers share, and, where NIXL is installed, over its agents, each in a process of its own. What is in memory is
checked where it lies; in another pull it is then copied into memory of the receiver's own too, as the socket's bytes and NIXL's are. Ratios are medians of the
rounds' ratios; the goal is 0.9. ``--short`` moves a tenth, to see that it works.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import threading
import time

from bench.running import record, run_bench
from phalanx_serve.traffic.events import WorkerIdentity
from phalanx_serve.workers.nixl_client import AgentProcess, NixlError, require_installed
from phalanx_serve.workers.page_transfer import OfferedPages, PageServer, Way, pull

PAGE_BYTES, PAGES, ROUNDS = 1 << 20, 256, 9
IDENTITY = WorkerIdentity("weights", "numerics")


def plain_s(body: list[bytes]) -> float:
    """Return the seconds for the bytes over a plain socket, from connecting to the last byte, into new memory."""
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


def agents() -> list[AgentProcess]:
    """Return the agents of a source and of a reader; none without NIXL."""
    try:
        require_installed()
        return [AgentProcess(), AgentProcess()]
    except NixlError as error:
        print(f"without NIXL: {error}")
        return []


def pulled_s(
    pages: dict[bytes, bytes],
    job: int,
    server: PageServer,
    way: Way,
    *,
    copies: bool = False,
    nixl: AgentProcess | None = None,
) -> float:
    """Return the seconds of a pull, from connecting to the last checked page; with ``copies`` the pages are also copied."""
    began_s = time.perf_counter()
    got = pull(
        "127.0.0.1", server.port, "token", IDENTITY, job, tuple(pages), within_s=60.0, only=way, nixl=nixl
    )
    own = [bytearray(page) for page in got.pages.values()] if copies else []
    seconds = time.perf_counter() - began_s
    if got.failure or len(got.pages) != len(pages) or got.way != way:
        raise SystemExit(f"the pull failed: {got.failure}")
    del got, own
    return seconds


def main() -> None:
    """Print the rates, and their ratios to that of a plain socket."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=PAGES, help="of 1 MiB")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    count, rounds = arguments.pages, arguments.rounds
    pages = {number.to_bytes(16, "big"): os.urandom(PAGE_BYTES) for number in range(count)}
    # The socket's pages are hashed when they are offered, as without shared memory.
    in_memory, by_socket = OfferedPages(600.0), OfferedPages(600.0, share=False)
    source, reader = agents() or (None, None)
    servers = {
        "memory": PageServer(in_memory, IDENTITY, "token"),
        "socket": PageServer(by_socket, IDENTITY, "token", nixl=source),
    }
    offers: list[float] = []
    took: dict[str, list[float]] = {}
    for number in range(rounds):
        for job in (2 * number, 2 * number + 1):
            by_socket.offer(job, pages)
        for job in (2 * number, 2 * number + 1):
            began_s = time.perf_counter()
            in_memory.offer(job, pages)
            offers.append(time.perf_counter() - began_s)
        took.setdefault("plain socket", []).append(plain_s(list(pages.values())))
        first, second = 2 * number, 2 * number + 1
        pulls = {
            "pages through a socket": pulled_s(pages, first, servers["socket"], "socket"),
            "pages in shared memory": pulled_s(pages, first, servers["memory"], "memory"),
            "the same, copied": pulled_s(pages, second, servers["memory"], "memory", copies=True),
        }
        if reader is not None:
            pulls["pages over NIXL"] = pulled_s(pages, second, servers["socket"], "nixl", nixl=reader)
        for name, seconds in pulls.items():
            took.setdefault(name, []).append(seconds)
            record({"way": name, "seconds": seconds}, is_printed=False)
        by_socket.forget()
    for server in servers.values():
        server.close()
    for agent in filter(None, (source, reader)):
        agent.close()
    size = count * PAGE_BYTES / 2**30
    plain = took["plain socket"]
    for name, each in took.items():
        ratio = statistics.median(socket_s / own_s for socket_s, own_s in zip(plain, each, strict=True))
        print(f"{name:24} {size / statistics.median(each):6.2f} GiB/s  {ratio:5.2f} of a plain socket")
    print(
        f"offering in memory (copy, xxh3-128) {size / statistics.median(offers):.2f} GiB/s; goal 0.9 of a plain socket"
    )


if __name__ == "__main__":
    run_bench(main)
