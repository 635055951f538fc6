"""The endpoint under sources that fail and clients that mean harm: neither costs more than itself."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from free_ports import free_port
from phalanx.observe.metrics.endpoint import (
    Endpoint,
    HttpResponse,
    MetricsServer,
    Target,
    announce,
    json_page,
    metrics_page,
    targets,
    withdraw,
    withdraw_earlier,
)
from phalanx.observe.metrics.exporter import Exporter
from phalanx.observe.metrics.samples import Derived, Labels, Metric, Sample, collect
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import ObserveSpec

GOOD = Metric("phalanx_good", "gauge", "Good.", "test")
LABELS = Labels(run="r")


def good() -> list[Sample]:
    return [Sample(GOOD, LABELS, 1.0)]


def failing() -> list[Sample]:
    raise ValueError("no number")


def read(text: bytes) -> dict[str, float]:
    return {
        ",".join([s.name, *s.labels.values()]): s.value for f in parse_text(text.decode()) for s in f.samples
    }


def test_a_source_that_raises_costs_only_itself_and_is_counted() -> None:
    messages: list[str] = []
    exporter = Exporter({"bad": failing, "good": good}, LABELS, messages.append, patience_s=100.0)
    with closing(exporter):
        values = read(exporter.text())
    assert values["phalanx_good,r"] == 1
    assert values["phalanx_exporter_failures_total,r,bad"] == 1
    assert messages == ["metrics of bad are left out: ValueError: no number"]


def test_a_source_that_hangs_costs_a_moment_once_and_then_nothing() -> None:
    hanging = threading.Event()

    def hung() -> list[Sample]:
        hanging.wait()
        return []

    exporter = Exporter({"good": good, "hung": hung}, LABELS, patience_s=0.2, share=1e9)
    with closing(exporter):
        scrapes, answered = 0, 0
        while answered < 2:  # on a busy machine a good source may need more than the patience, too
            values, scrapes = read(exporter.text()), scrapes + 1
            answered += values.get("phalanx_good,r") == 1
            assert values["phalanx_exporter_failures_total,r,hung"] == scrapes
        hanging.set()
        failures, deadline_s = scrapes, time.monotonic() + 100
        while failures != (failures := read(exporter.text())["phalanx_exporter_failures_total,r,hung"]):
            assert time.monotonic() < deadline_s


def test_a_metric_that_cannot_be_computed_leaves_the_others_of_its_source() -> None:
    broken = Derived(Metric("phalanx_broken", "gauge", "Broken.", "test"), lambda _: 1 / 0)
    failed: list[str] = []
    derived = [broken, Derived(GOOD, lambda facts: facts)]
    samples = collect(derived, 3.0, LABELS, lambda metric, _error: failed.append(metric.name))
    assert [(sample.metric.name, sample.value) for sample in samples] == [("phalanx_good", 3.0)]
    assert failed == ["phalanx_broken"]


def test_a_text_that_is_costly_to_make_is_made_once_for_many_scrapes_in_a_row() -> None:
    made: list[int] = []

    def dear() -> list[Sample]:
        made.append(1)
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            pass
        return good()

    exporter = Exporter({"dear": dear}, LABELS, patience_s=100.0, share=1e-6)
    with closing(exporter):
        clocks = {read(exporter.text())["phalanx_clock_timestamp_seconds,r"] for _ in range(50)}
    assert len(made) == 1
    assert len(clocks) == 50, "but the clock is that of the moment"


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    exporter = Exporter({"good": good}, LABELS, patience_s=100.0)
    pages = {"/metrics": metrics_page(exporter), "/targets": json_page(lambda: [1]), "/bad": lambda _: HttpResponse(b"%d" % (1 // 0)), "/large": lambda _: HttpResponse(b"x" * 20_000_000, "text/plain")}  # fmt: skip
    with closing(MetricsServer(pages, "127.0.0.1", 0)) as serving, closing(exporter):
        yield serving


def get(server: MetricsServer, path: str, **headers: str) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=100)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    if answer.headers["Content-Encoding"] == "gzip":
        body = gzip.decompress(body)
    return answer.status, answer.headers["Content-Type"], body


def test_the_format_is_that_of_the_accept_header(server: MetricsServer) -> None:
    status, kind, text = get(server, "/metrics")
    assert (status, kind.split(";")[0], read(text)["phalanx_good,r"]) == (200, "text/plain", 1)
    headers = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    status, kind, text = get(server, "/metrics", **headers)
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
    assert text.count(b"# EOF") == 1


def test_a_text_is_compressed_for_clients_that_can_read_it(server: MetricsServer) -> None:
    zipped = get(server, "/metrics", **{"Accept-Encoding": "gzip"})[2]
    assert read(zipped).keys() == read(get(server, "/metrics")[2]).keys()
    assert json.loads(get(server, "/targets", **{"Accept-Encoding": "gzip"})[2]) == [1]


def test_a_target_that_is_a_url_is_answered_by_its_path(server: MetricsServer) -> None:
    assert get(server, "http://localhost/targets?x=1")[0] == 200
    assert get(server, "http://localhost/secret")[0] == 404


def test_a_page_that_is_missing_or_fails_has_the_status_of_its_error(server: MetricsServer) -> None:
    assert get(server, "/secret")[0] == 404
    assert get(server, "/bad")[0] == 500
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=100)) as connection:
        connection.request("POST", "/metrics", body=b"x")
        assert connection.getresponse().status == 405


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"GET", b"\x00" * 40_000, b"GET /metrics\r\n\r\n", b"GET / / HTTP/1.1\r\n\r\n", b"\r\n\r\n"],
)
def test_a_client_that_talks_nonsense_is_hung_up_on(server: MetricsServer, nonsense: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=100) as client, suppress(OSError):
        client.sendall(nonsense)
        client.shutdown(socket.SHUT_WR)
        while client.recv(1 << 16):
            pass
    assert get(server, "/metrics")[0] == 200


def test_many_clients_that_send_nothing_and_never_read_delay_a_scrape_and_do_not_prevent_it(
    server: MetricsServer,
) -> None:
    before = threading.active_count()  # other tests of this process may have left some
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(12)]
    clients[0].sendall(b"GET /large HTTP/1.1\r\n\r\n")
    clients[1].sendall(b"GET /met")
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics")
        assert urllib.request.urlopen(request, timeout=100).status == 200
        assert threading.active_count() - before < 30
    finally:
        for client in clients:
            client.close()


def test_each_process_of_a_machine_finds_a_port_and_announces_it(tmp_path: Path) -> None:
    port = free_port(3)
    directory, observe = RunDirectory(tmp_path), ObserveSpec(metrics_port=port)
    messages: list[str] = []
    ends = [Endpoint(directory, observe, 0, node, "10.0.0.1", messages.append) for node in ("", "n/1", "n2")]
    for end in ends:
        end.start({"good": good})
    deadline_s = time.monotonic() + 100
    while len(targets([tmp_path])) < 3:
        assert time.monotonic() < deadline_s, messages
        time.sleep(0.01)
    entries = targets([tmp_path])
    assert len({address for entry in entries for address in entry["targets"]}) == 3  # type: ignore[attr-defined]
    for entry in entries:
        (address,) = entry["targets"]  # type: ignore[attr-defined]
        # On a busy machine the source may be late for one text; the next one has it.
        while b"phalanx_good" not in urllib.request.urlopen(f"http://{address}/metrics", timeout=100).read():
            assert time.monotonic() < deadline_s
    # Another process may have taken the port of the run file.
    (coordinator,) = (entry for entry in entries if "node" not in entry["labels"])  # type: ignore[operator]
    page = f"http://{coordinator['targets'][0]}/targets"  # type: ignore[index]
    assert json.loads(urllib.request.urlopen(page, timeout=100).read()) == entries
    for end in ends:
        end.close()
    assert targets([tmp_path]) == []


def test_without_a_port_nothing_is_opened(tmp_path: Path) -> None:
    Endpoint(RunDirectory(tmp_path), ObserveSpec(), 0, "", "h", pytest.fail).start({"good": good})
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_cannot_be_had_is_a_line_in_the_log_and_no_more(tmp_path: Path) -> None:
    messages: list[str] = []
    end = Endpoint(RunDirectory(tmp_path), ObserveSpec(metrics_port=1, metrics_host="203.0.113.7"), 0, "", "h", messages.append)  # fmt: skip
    end.start({"good": good})
    deadline_s = time.monotonic() + 100
    while not messages and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert "observe.metrics_host" in messages[0]
    end.close()


def test_the_target_of_a_process_that_was_killed_stays_until_the_run_is_started_again(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    old, new = (Target("h:1", "r", "n", attempt) for attempt in (0, 1))
    announce(directory, old)
    withdraw(directory, new)
    assert len(targets([tmp_path])) == 1, "another process's file is left alone"
    withdraw_earlier(directory, 1)
    assert targets([tmp_path]) == []
    announce(directory, new)
    withdraw_earlier(directory, 1)
    assert [entry["targets"] for entry in targets([tmp_path])] == [["h:1"]]


def test_files_among_the_targets_that_are_not_ours_are_passed_over(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    announce(directory, Target("h:1", "r", "n", 0))
    for name, text in (
        ("a", "["),
        ("b", '{"targets": 3}'),
        ("c", '[{"targets": [1], "labels": {}}, 7]'),
        ("d", "[" * 100_000),
    ):
        (directory.targets / f"{name}.json").write_text(text)
    assert [entry["targets"] for entry in targets([tmp_path, tmp_path / "missing"])] == [["h:1"]]
