"""Interfaces and addresses: by which one other machines reach this one, and how an address is written."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.hardware.local.network import (
    Interface,
    ListenError,
    interface_for,
    is_private,
    join_address,
    listen,
    listening_address,
    local_interfaces,
    split_address,
)
from phalanx.run.peers import is_loopback

INTERFACES = [
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "10.0.0.5"),
    Interface("ib0", "192.168.7.5"),
    Interface("lo", "::1"),
    Interface("eth0", "fd00::5"),
]


@pytest.mark.parametrize(
    ("addresses", "shared", "name"),
    [
        (["192.168.7.5"], True, "ib0"),
        (["fd00::5"], True, "eth0"),
        (["127.0.1.1"], True, ""),
        (["127.0.1.1"], False, "lo"),
        (["127.0.1.1", "10.0.0.5"], True, "eth0"),
        (["203.0.113.9", "10.0.0.5"], True, "eth0"),
        (["203.0.113.9"], True, ""),
        ([], False, ""),
    ],
)
def test_the_interface_has_the_address_and_no_loopback_is_given_to_other_machines(
    addresses: list[str], shared: bool, name: str
) -> None:
    assert interface_for(addresses, INTERFACES, shared=shared) == name


def test_the_loopback_interface_of_this_machine_is_listed() -> None:
    assert any(is_loopback(interface.address) for interface in local_interfaces())


def test_only_this_machine_reaches_a_server_whose_name_has_loopback_addresses_alone() -> None:
    assert all(map(is_private, ("127.0.0.1", "::1", "localhost")))
    assert not any(map(is_private, ("0.0.0.0", "::", "10.0.0.1", "no-such-host.invalid", "")))


def test_a_server_cannot_listen_at_an_address_of_another_machine() -> None:
    with pytest.raises(ListenError, match=r"--host 203\.0\.113\.9: .*give an address of this machine"):
        listen("203.0.113.9", 0)


@given(st.ip_addresses(), st.integers(0, 65535))
def test_what_is_joined_is_split_again(address: object, port: int) -> None:
    assert split_address(join_address(str(address), port)) == (str(address), str(port))


def test_an_agent_listens_everywhere_in_the_family_of_its_address_and_loopback_stays_private() -> None:
    assert listening_address("10.0.0.5") == "0.0.0.0"
    assert listening_address("fd00::5") == "::"
    assert listening_address("127.0.1.1") == "127.0.1.1"
    assert listening_address("::1") == "::1"


def test_an_ipv6_meeting_point_can_be_connected_to_by_its_address() -> None:
    if Interface("lo", "::1") not in local_interfaces():
        pytest.skip("this machine has no IPv6")
    from phalanx.parallel.process_group.meeting import MeetingPoint

    meeting = MeetingPoint("::1")
    host, port = split_address(meeting.address)
    socket.create_connection((host, int(port))).close()
    meeting.close()
