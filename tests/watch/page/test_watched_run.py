"""A run with many viewers has the bits of one without, also if viewers stall and the page is killed."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from phalanx.observe.event_log import read_events
from phalanx.observe.events import Step
from phalanx_process import ENVIRONMENT, RUN_FILE, ended, last_json, start, steps_done, wait_until
from tiny_runs import make_dataset

COMMAND = ("train", "run.toml", "--ranks", "2", "--json", "--set", "train.steps=120")


def view(port: int) -> None:
    """Act as an open page: receive events, and request all numbers after each line, until the server is gone."""
    with suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/api/events")
        events = connection.getresponse()
        while events.readline():
            other = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            other.request("GET", "/api/runs")
            other.getresponse().read()


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Step and loss of each logged step."""
    bodies = [event.body for event in read_events(run_dir / "events.jsonl")]
    return [(body.step, body.loss) for body in bodies if isinstance(body, Step)]


@pytest.mark.slow
def test_viewers_that_stall_a_killed_page_and_a_full_disk_for_logs_change_no_bit_of_a_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE.format(data=make_dataset(tmp_path / "data")))
    alone = last_json(ended(start((*COMMAND, "--run-dir", "alone"), tmp_path)))

    watched = tmp_path / "runs" / "watched"
    (watched / "logs").mkdir(parents=True)
    for rank in (0, 1):
        for name in (f"attempt-000-rank-0000{rank}.jsonl", f"attempt-000-rank-0000{rank}.out.jsonl"):
            (watched / "logs" / name).symlink_to("/dev/full")
    command = [sys.executable, "-m", "phalanx", "ui", "runs", "--port", "0", "--no-open"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    ) as server:
        assert server.stdout is not None
        match = re.match(r"http://127\.0\.0\.1:(\d+)/ ", server.stdout.readline())
        assert match
        port = int(match[1])
        training = start((*COMMAND, "--run-dir", str(watched)), tmp_path, ENVIRONMENT)
        stalled = socket.create_connection(("127.0.0.1", port))
        stalled.sendall(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        viewers = [threading.Thread(target=view, args=(port,)) for _ in range(20)]
        for viewer in viewers:
            viewer.start()
        wait_until(lambda: steps_done(watched) > 60, training)
        server.send_signal(signal.SIGKILL)
        done = last_json(ended(training))
        for viewer in viewers:
            viewer.join()
        stalled.close()
    assert done["weights_sha256"] == alone["weights_sha256"]
    assert losses(watched) == losses(tmp_path / "alone")
