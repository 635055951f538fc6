"""Servers of object stores, started for tests on 127.0.0.1: ministack (S3, from PyPI), azurite and s3rver (Azure and S3, from npm), and fake-gcs-server.

The last one is in no registry with what is needed of it, Google's XML interface: the branch ``support-xml-api`` of github.com/tustvold/fake-gcs-server has it, which the
client library is tested with itself. Who has built it puts it on the path, or names it in ``FAKE_GCS_SERVER``.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from free_ports import free_port

NPM_FOLDER = Path(__file__).parents[2] / ".cache" / "npm"
AZURITE, S3RVER = "azurite@3.35.0", "s3rver@3.7.1"
_START_S = 120.0
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
}
AZURITE_ACCOUNT = "devstoreaccount1"
# The emulator's published account: https://learn.microsoft.com/azure/storage/common/storage-use-azurite
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Server:
    """A server that runs: its port, and what a client's environment must say."""

    scheme: str
    port: int
    bucket: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def url(self, prefix: str) -> str:
        return f"{self.scheme}://{self.bucket}/{prefix}"

    def behind(self, port: int) -> dict[str, str]:
        """The environment of a client that reaches the server through another port."""
        return {name: value.replace(f":{self.port}", f":{port}") for name, value in self.environment.items()}


@contextmanager
def ministack(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "hypercorn", "ministack.app:app", "--bind", f"127.0.0.1:{port}"]
    with _running(command, port, folder):
        _make_bucket(port, "bucket")
        yield _s3(port)


@contextmanager
def s3rver(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [npm_program(S3RVER, "s3rver"), "-d", str(folder), "-a", "127.0.0.1", "-p", str(port)]
    with _running([*command, "--configure-bucket", "bucket"], port, folder):
        yield _s3(port, AWS_ACCESS_KEY_ID="S3RVER", AWS_SECRET_ACCESS_KEY="S3RVER")


@contextmanager
def azurite(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [npm_program(AZURITE, "azurite-blob"), "--location", str(folder), "--blobHost", "127.0.0.1"]
    environment = {
        "AZURE_STORAGE_ACCOUNT_NAME": AZURITE_ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{AZURITE_ACCOUNT}",
    }
    with _running([*command, "--blobPort", str(port), "--skipApiVersionCheck", "--silent"], port, folder):
        _make_container(port, "bucket")
        yield Server("az", port, "bucket", environment)


def google_environment(port: int) -> dict[str, str]:
    """What a client needs to reach a server of Google's interface on this machine, without credentials."""
    url = f"http://127.0.0.1:{port}"
    names = ("client_email", "private_key", "private_key_id")
    account = {"gcs_base_url": url, "disable_oauth": True, **dict.fromkeys(names, "")}
    return {"GOOGLE_BASE_URL": url, "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}


@contextmanager
def fake_gcs(folder: Path) -> Iterator[Server]:
    program = os.environ.get("FAKE_GCS_SERVER") or shutil.which("fake-gcs-server")
    if program is None:
        pytest.skip(
            "gs:// is not tested: fake-gcs-server with Google's XML interface is neither on the path nor in FAKE_GCS_SERVER"
        )
    port = free_port()
    command = [program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    environment = google_environment(port)
    with _running([*command, "-public-host", f"127.0.0.1:{port}"], port, folder):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_S)
        connection.request("POST", "/storage/v1/b?project=test", body='{"name": "bucket"}')
        assert connection.getresponse().status == 200
        connection.close()
        yield Server("gs", port, "bucket", environment)


def _s3(port: int, **more: str) -> Server:
    endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    return Server("s3", port, "bucket", {**CREDENTIALS, **endpoint, **more})


def npm_program(package: str, name: str) -> str:
    """The path of a program from npm, installed on first use; skips the test where there is no npm or no registry."""
    program = NPM_FOLDER / "node_modules" / ".bin" / name
    if not program.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"{package} needs npm, which is not installed")
        NPM_FOLDER.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [npm, "install", "--no-audit", "--no-fund", "--prefix", str(NPM_FOLDER), package],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"npm could not install {package}: {done.stderr[-200:]}")
    return str(program)


@contextmanager
def _running(command: Sequence[str], port: int, folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{folder.name}.log"
    with log.open("w") as output:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AWS_", "AZURE_", "GOOGLE_"))
        }
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment
        )
        try:
            _await_port(process, port, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_port(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server has ended: {log.read_text()[-2000:]}"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"no server on port {port} after {_START_S} s: {log.read_text()[-2000:]}")


def _make_bucket(port: int, name: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_S)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()


def _make_container(port: int, name: str) -> None:
    """Creates a container with a request signed by hand: the client library makes objects only."""
    import base64
    import hashlib
    import hmac
    from email.utils import formatdate

    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06", "Content-Length": "0"}
    canonical = f"x-ms-date:{headers['x-ms-date']}\nx-ms-version:{headers['x-ms-version']}\n"
    resource = f"/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/{name}\nrestype:container"
    text = "PUT" + "\n" * 12 + canonical + resource
    signature = hmac.new(base64.b64decode(AZURITE_KEY), text.encode(), hashlib.sha256).digest()
    signed = base64.b64encode(signature).decode()
    headers["Authorization"] = f"SharedKey {AZURITE_ACCOUNT}:{signed}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_S)
    connection.request("PUT", f"/{AZURITE_ACCOUNT}/{name}?restype=container", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 201, answer.read()
    connection.close()
