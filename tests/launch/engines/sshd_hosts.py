"""A real sshd on loopback that stands for several hosts: each is another port of it, with keys of its own folder."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from free_ports import free_port

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def missing() -> str:
    """What keeps an sshd from being started here; empty if nothing does."""
    lacking = [name for name in (SSHD, "ssh", "ssh-keygen") if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)} (Debian: openssh-server openssh-client)" if lacking else ""


@dataclass(frozen=True)
class SshHosts:
    """The hosts, and how a client finds them."""

    ports: tuple[int, ...]
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """With these variables ``ssh`` uses the keys of this folder."""
        return {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def file(self, *more: str) -> str:
        """The hosts as a file: a line for each, the rest of it as in ``more``."""
        lines = (
            f"{getpass.getuser()}@127.0.0.1:{port} name=host-{number} {rest}"
            for number, (port, rest) in enumerate(
                zip(self.ports, [*more, *[""] * len(self.ports)], strict=False)
            )
        )
        return "\n".join(lines) + "\n"


def _key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


@contextmanager
def ssh_hosts(folder: Path, count: int) -> Iterator[SshHosts]:
    """Starts one sshd for each of ``count`` hosts."""
    folder.chmod(0o700)
    _key(folder / "client")
    keys = folder / "authorized_keys"
    keys.write_text((folder / "client.pub").read_text())
    keys.chmod(0o600)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own, which a service would have made
    ports = tuple(free_port() for _ in range(count))
    known_host_lines = []
    with ExitStack() as stack:
        for number, port in enumerate(ports):
            host_key = folder / f"host-{number}"
            _key(host_key)
            config = folder / f"sshd-{number}"
            config.write_text(
                f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {host_key}\nAuthorizedKeysFile {keys}\nPidFile none\nUsePAM no\n"
                "StrictModes no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
            )
            server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], stderr=subprocess.DEVNULL)
            stack.callback(server.wait)
            stack.callback(server.terminate)
            known_host_lines.append(
                f"[127.0.0.1]:{port} {' '.join(host_key.with_suffix('.pub').read_text().split()[:2])}"
            )
        (folder / "known_hosts").write_text("\n".join(known_host_lines) + "\n")
        (folder / "client-config").write_text(
            f"Host *\n  IdentityFile {folder / 'client'}\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder / 'known_hosts'}\n"
            "  StrictHostKeyChecking yes\n"
        )
        (folder / "bin").mkdir()
        wrapper = folder / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder / "client-config"} "$@"\n')
        wrapper.chmod(0o755)
        for port in ports:
            _until_it_listens(port)
        yield SshHosts(ports, folder)


def _until_it_listens(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"no sshd on port {port}")
