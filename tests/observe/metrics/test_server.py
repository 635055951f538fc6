"""The server of metrics, under clients that mean no good."""

from __future__ import annotations

import select
import socket
import threading
import urllib.request
from contextlib import ExitStack, closing

from phalanx.observe.metrics.endpoint import HttpResponse, MetricsServer


def test_any_number_of_clients_that_send_nothing_delays_nobody() -> None:
    pages = {"/metrics": lambda _: HttpResponse(b"1")}
    with ExitStack() as stack:
        server = stack.enter_context(closing(MetricsServer(pages, "127.0.0.1", 0, request_timeout_s=600.0)))
        for _ in range(600):
            idle = stack.enter_context(socket.socket())
            idle.setblocking(False)
            idle.connect_ex(("127.0.0.1", server.port))
        # Were they waited for, four of them would be enough.
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=100) as answer:
            assert answer.read() == b"1"


def test_clients_that_wait_for_a_slow_page_are_bounded_and_the_others_are_hung_up_on() -> None:
    done = threading.Event()

    def page(_: object) -> HttpResponse:
        done.wait()
        return HttpResponse(b"1")

    with ExitStack() as stack:
        server = stack.enter_context(
            closing(MetricsServer({"/": page}, "127.0.0.1", 0, request_timeout_s=600.0))
        )
        stack.callback(done.set)
        hung_up = select.poll()  # takes descriptors of any number, of which a process of many tests has some
        for _ in range(300):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=100))
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            hung_up.register(client, select.POLLIN)
        assert hung_up.poll(60_000)
