"""The name of this machine, which is written to files and sent to peers."""

from __future__ import annotations

import socket

import pytest

from phalanx.process.this_process import host_name


@pytest.mark.parametrize(("name", "written"), [(b"node-7", "node-7"), (b"h\xff\xfes", r"h\udcff\udcfes")])
def test_a_name_that_is_no_text_is_escaped(
    name: bytes, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name.decode(errors="surrogateescape"))
    assert host_name() == written
