"""A host, or host and port, as a user may write it."""

from __future__ import annotations

import pytest

from phalanx.run.peers import AddressError, read_address, read_host, read_port


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("[::1]", "::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("gpu_01.cluster", "gpu_01.cluster"),
        ("Büro", "Büro"),
    ],
)
def test_a_host_is_a_name_or_an_ip_address_with_or_without_brackets(text: str, host: str) -> None:
    assert read_host(text) == host


@pytest.mark.parametrize("text", ["", "127.0.0.1:80", "[::1]:80", "[head]", "http://head", "a b", "head\n"])
def test_another_form_of_a_host_is_refused(text: str) -> None:
    with pytest.raises(AddressError, match="write a name or an IP address, without a port"):
        read_host(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [("head:29400", ("head", 29400)), ("[fd00::5]:1", ("fd00::5", 1)), ("fd00::5:1", ("fd00::5", 1))],
)
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert read_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "head", ":29400", "head:", "head:x", "head:0", "head:65536", "a:b:1", "head:²"]
)
def test_an_address_without_a_host_or_a_port_is_refused(text: str) -> None:
    with pytest.raises(AddressError, match=r"is not HOST:PORT"):
        read_address(text)


def test_a_port_is_a_number_of_sixteen_bits() -> None:
    assert read_port("0") == 0
    with pytest.raises(AddressError, match="up to 65535"):
        read_port("65536")
