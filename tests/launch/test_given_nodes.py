"""The network as hosts describe it, and the rates of a run file."""

from __future__ import annotations

import pytest

from phalanx.launch.engines.hosts import Host
from phalanx.launch.given_nodes import fractions, network_of
from phalanx.launch.placing.topology import TopologyError


def host(name: str, *domain: str) -> Host:
    return Host(name, name, 0, name, domain)


def test_the_network_of_hosts_has_a_level_for_each_part_of_their_domains() -> None:
    network = network_of([host("a", "pod-1", "rack-1"), host("b", "pod-1", "rack-2"), host("c", "pod-2")])
    assert [level.name for level in network.levels] == ["level 1", "level 2"]
    assert network.nodes["a"] == ("pod-1", "rack-1")
    assert network.nodes["c"][0] == "pod-2"


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([host("a"), host("b")], "no host says where it is"),
        ([host("a", "pod-1"), host("b")], "b: no domain=, and other hosts have one"),
    ],
)
def test_hosts_of_which_it_is_not_known_where_they_are_have_no_network(
    hosts: list[Host], message: str
) -> None:
    with pytest.raises(TopologyError, match=message):
        network_of(hosts)


@pytest.mark.parametrize("text", ["leaf", "leaf=", "leaf=none", "leaf=0", "leaf=1.5"])
def test_what_is_no_share_of_a_level_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match=r"launch\.shares"):
        fractions([text])
