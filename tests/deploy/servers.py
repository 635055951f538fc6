"""Debian's Prometheus and Alertmanager, started for a test with short intervals, and a receiver of notifications."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from deploy.prometheus_rules import DEPLOY, RULES, require
from free_ports import free_port

PATIENCE_S = 150.0


def wait_for(purpose: str, condition: Callable[[], bool]) -> None:
    """Waits until a condition holds; the error names the ``purpose``."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"in vain for {purpose}")
        time.sleep(0.1)


class Prometheus:
    """A client of one."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer; None while there is none."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is starting
                return None
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        except OSError:
            return None

    def values(self, expression: str) -> list[float]:
        """The values of an expression's series now."""
        data = self.get("query", query=expression)
        if data is None:
            return []
        if data["resultType"] == "scalar":
            return [float(data["result"][1])]
        return [float(series["value"][1]) for series in data["result"]]


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@contextmanager
def prometheus(
    folder: Path,
    targets: str,
    alertmanager: str = "",
    shorten: Callable[[str], str] = lambda rules: rules,
    ui: str = "",
) -> Iterator[Prometheus]:
    """The shipped configuration for HTTP service discovery and the shipped rules, at short intervals.

    Args:
        folder: For its files.
        targets: The URL that lists the targets.
        alertmanager: "host:port".
        shorten: Changes the text of each file of rules.
        ui: The URL of a ``phalanx ui`` that is scraped too; then the configuration is the one for it.
    """
    program = require("prometheus")
    settings = yaml.safe_load((DEPLOY / "prometheus" / ("ui.yml" if ui else "http-sd.yml")).read_text())
    settings["global"] = {
        "scrape_interval": "500ms",
        "evaluation_interval": "500ms",
        "scrape_timeout": "500ms",
    }
    job, *more = settings["scrape_configs"]
    for scrape_config in more:
        scrape_config["static_configs"] = [{"targets": [urllib.parse.urlsplit(ui).netloc]}]
    job["http_sd_configs"] = [{"url": targets, "refresh_interval": "1s"}]
    managers = [alertmanager] if alertmanager else []
    settings["alerting"]["alertmanagers"] = [{"static_configs": [{"targets": managers}]}]
    (folder / "rules").mkdir(parents=True)
    for path in RULES.glob("*.yml"):
        (folder / "rules" / path.name).write_text(shorten(path.read_text()))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    port = free_port()
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    with _process(command, folder / "prometheus.log"):
        client = Prometheus(port)
        wait_for("Prometheus", lambda: client.get("status/buildinfo") is not None)
        yield client


class Receiver:
    """Takes the notifications that Alertmanager sends to a webhook."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        alerts = self.alerts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                alerts.extend(json.loads(body)["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_arguments: object) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def statuses(self, name: str) -> list[str]:
        """The statuses of an alert that were received, in order."""
        return [alert["status"] for alert in self.alerts if alert["labels"]["alertname"] == name]


@contextmanager
def alertmanager(folder: Path, receiver: Receiver) -> Iterator[str]:
    """The shipped configuration, with short waits; yields its address."""
    program = require("prometheus-alertmanager")
    settings = yaml.safe_load((DEPLOY / "alertmanager" / "alertmanager.yml").read_text())
    for route in (settings["route"], *settings["route"]["routes"]):
        route |= {"group_wait": "0s", "group_interval": "500ms", "repeat_interval": "1h"}
    for receiver_config in settings["receivers"]:
        receiver_config["webhook_configs"][0]["url"] = f"http://127.0.0.1:{receiver.server.server_port}/"
    folder.mkdir(parents=True)
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/data", f"--web.listen-address={address}", "--cluster.listen-address="]  # fmt: skip
    with _process(command, folder / "alertmanager.log"):
        yield address
