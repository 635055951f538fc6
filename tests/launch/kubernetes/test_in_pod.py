"""What a pod does beside its agent: its exit code, the domains of its node, and that it lives."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from phalanx.launch.engines.order import EngineError
from phalanx.launch.engines.submission import mark_stopped
from phalanx.launch.kubernetes.engine import begin_submission, exit_code, is_over, node_domains, show_life
from phalanx.run.directory.paths import RunDirectory, RunResult

LABELS = {"fabric.topograph.run/tier-1": "spine-1", "fabric.topograph.run/tier-0": "leaf-7"}


@pytest.mark.parametrize(
    ("code", "leads", "stopped", "expected"),
    [
        (75, True, False, 75),  # saved before an eviction: it goes on
        (75, True, True, 76),  # stopped for good
        (1, True, False, 76),  # the run has failed
        (0, False, False, 75),  # a node that leaves, or whose run was saved, is not done
        (0, False, True, 75),  # whether it goes on is the leader's word
        (1, False, False, 1),
    ],
)
def test_a_pod_of_an_unfinished_run_never_counts_as_done(
    tmp_path: Path, code: int, leads: bool, stopped: bool, expected: int
) -> None:
    begin_submission(tmp_path, "word")
    if stopped:
        mark_stopped(tmp_path)
    assert exit_code(tmp_path, code, leads=leads) == expected


@pytest.mark.parametrize("leads", [True, False])
def test_a_pod_of_a_finished_run_is_done_however_its_agent_ended(tmp_path: Path, leads: bool) -> None:
    RunDirectory(tmp_path).write_result(RunResult(step=3, weights_sha256="ab" * 32))
    assert exit_code(tmp_path, 1, leads=leads) == 0


def test_a_stop_for_good_holds_for_all_pods_of_a_submission_and_for_none_of_the_next(tmp_path: Path) -> None:
    begin_submission(tmp_path, "first")
    mark_stopped(tmp_path)
    begin_submission(tmp_path, "first")  # the leading pod was replaced meanwhile
    assert exit_code(tmp_path, 75, leads=True) == 76
    begin_submission(tmp_path, "second")
    assert exit_code(tmp_path, 75, leads=True) == 75


def test_the_file_of_a_living_process_is_touched(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    show_life(file)
    deadline_s = time.monotonic() + 100
    while not file.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_file_that_cannot_be_touched_is_named_and_touched_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, deadline_s = tmp_path / "gone" / "alive", time.monotonic() + 100
    show_life(file, pause_s=0.5)
    while f"cannot touch {file}" not in capsys.readouterr().err:
        assert time.monotonic() < deadline_s
    file.parent.mkdir()
    while not file.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class _ApiServer(BaseHTTPRequestHandler):
    """Tells labels of node n1 to whoever has the token, as an API server does."""

    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == "Bearer a-token"
        body = json.dumps({"metadata": {"name": "n1", "labels": LABELS}} if allowed else {}).encode()
        self.send_response(200 if allowed and self.path == "/api/v1/nodes/n1" else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A pod's service account, and the environment that names its API server."""
    folder = tmp_path_factory.mktemp("account")
    made = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out ca.crt -days 2 -subj /CN=api -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(made.split(), cwd=folder, check=True, capture_output=True)
    (folder / "token").write_text("a-token\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _ApiServer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.crt", folder / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    where = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server_port)}
    yield folder, where
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_pod_asks_the_api_server_for_the_domains_of_its_node(account: tuple[Path, dict[str, str]]) -> None:
    folder, where = account
    labels = (*LABELS, "accelerator.topograph.run/domain")
    assert node_domains(labels, {**where, "NODE_NAME": "n1"}, folder) == ("spine-1", "leaf-7", "n1 alone")
    assert node_domains((), {}, folder) == ()


def test_a_pod_that_may_not_read_nodes_says_what_an_administrator_does(
    account: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    folder, where = account
    (tmp_path / "ca.crt").write_text((folder / "ca.crt").read_text())
    (tmp_path / "token").write_text("another")
    with pytest.raises(EngineError, match=re.escape("may not read node n1 (403): an administrator creates")):
        node_domains(("rack",), {**where, "NODE_NAME": "n1"}, tmp_path)
    with pytest.raises(EngineError, match="this pod has no service account"):
        node_domains(("rack",), {**where, "NODE_NAME": "n1"}, tmp_path / "none")


@pytest.mark.parametrize(("phase", "over"), [("running", False), ("finished", True), ("failed", True)])
def test_a_first_pod_that_another_led_ends_the_job_only_if_the_run_is_over(
    tmp_path: Path, phase: str, over: bool
) -> None:
    (tmp_path / "fleet.json").write_text(json.dumps({"phase": phase}))
    assert is_over(tmp_path) == over
    assert exit_code(tmp_path, 0, leads=is_over(tmp_path)) == (76 if over else 75)
