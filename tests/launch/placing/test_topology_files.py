"""Topologies as others write them, and host lists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.placing import TopologyError, expanded, folded
from phalanx.launch.topology_files import parse_topology, read_topology

TREE = """
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=n5
SwitchName=spine1 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf[1-2]   # as scontrol prints it
SwitchName=spine2 Switches=leaf3
SwitchName=core Level=2 LinkSpeed=1 Nodes=n[1-5] Switches=spine[1-2]
"""


def test_a_tree_of_switches_is_read_without_the_root_that_all_share() -> None:
    topology = parse_topology(TREE, "topology.conf")
    assert [level.name for level in topology.levels] == ["spine", "leaf"]
    assert topology.nodes["n3"] == ("spine1", "leaf2")
    assert topology.nodes["n5"] == ("spine2", "leaf3")


def test_blocks_are_scale_up_domains() -> None:
    topology = parse_topology("BlockName=b1 Nodes=n[1-18]\nBlockName=b2 Nodes=n[19-36]\nBlockSizes=18\n", "x")
    assert topology.nodes["n19"] == ("b2",)
    assert topology.levels[0].scale_up


def test_topographs_instances_are_read_nearest_switch_first_and_racks_below() -> None:
    text = json.dumps(
        {
            "instances": [
                {"id": "i1", "network_layers": ["leaf-a", "spine-a"], "attributes": {"nvlink": "nvl-1"}},
                {
                    "id": "i2",
                    "network_layers": ["leaf-b", "spine-b"],
                    "labels": {"network.topology.nvidia.com/accelerator": "nvl-2"},
                },
            ]
        }
    )
    topology = parse_topology(text, "x")
    assert topology.nodes == {"i1": ("spine-a", "leaf-a", "nvl-1"), "i2": ("spine-b", "leaf-b", "nvl-2")}
    assert [level.scale_up for level in topology.levels] == [False, False, True]


def test_labels_of_kubernetes_nodes_are_read_and_cordoned_nodes_are_taken() -> None:
    def node(name: str, leaf: str, ready: str = "True", *, cordoned: bool = False) -> dict[str, object]:
        return {
            "metadata": {"name": name, "labels": {"network.topology.nvidia.com/leaf": leaf}},
            "spec": {"unschedulable": cordoned},
            "status": {"conditions": [{"type": "Ready", "status": ready}]},
        }

    nodes = [node("a", "l1"), node("b", "l1", "Unknown"), node("c", "l2", cordoned=True)]
    topology = parse_topology(json.dumps({"items": nodes}), "x")
    assert topology.nodes == {"a": ("l1",), "b": ("l1",), "c": ("l2",)}
    assert topology.free == ("a",)


def test_newer_labels_of_kubernetes_nodes_are_tiers_counted_from_the_node_and_the_accelerators_domain() -> (
    None
):
    def node(name: str, spine: str, leaf: str, rack: str) -> dict[str, object]:
        labels = {
            "fabric.topograph.run/tier-0": leaf,
            "fabric.topograph.run/tier-1": spine,
            "accelerator.topograph.run/domain": rack,
            "network.topology.nvidia.com/leaf": "of an older version",
        }
        status = {"conditions": [{"type": "Ready", "status": "True"}]}
        return {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": status}

    topology = parse_topology(
        json.dumps({"items": [node("a", "s1", "l1", "r1"), node("b", "s1", "l2", "r2")]}), "x"
    )
    assert [(level.name, level.scale_up) for level in topology.levels] == [
        ("tier-1", False),
        ("tier-0", False),
        ("accelerator", True),
    ]
    assert topology.nodes == {"a": ("s1", "l1", "r1"), "b": ("s1", "l2", "r2")}


def test_a_file_by_hand_says_rates_shares_and_what_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "fabric.toml"
    path.write_text(
        'node_gb_per_s = 400\ntaken = "n[2-3]"\n[[levels]]\nname = "pod"\nshare = 0.5\n[[levels]]\nname = "rack"\nscale_up = true\n'
        '[nodes]\n"n[1-2]" = "p1.r1"\n"n[3-4]" = "p1.r2"\n'
    )
    topology = read_topology(path)
    assert topology.node_bytes_per_s == 400e9
    assert topology.free == ("n1", "n4")
    assert [(level.name, level.share, level.scale_up) for level in topology.levels] == [
        ("pod", 0.5, False),
        ("rack", 1.0, True),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodez = 1", "there is no field 'nodez'"),
        ("node_gb_per_s = 1", "there is no [nodes]"),
        *(
            (f'node_gb_per_s = {rate}\n[nodes]\nn1 = ""', "is no rate in GB/s")
            for rate in ('"fast"', "-1", "nan", "inf", "true")
        ),
        (f'node_gb_per_s = 1{"0" * 400}\n[nodes]\nn1 = ""', "is no topology"),
        ('taken = "n9"\n[nodes]\nn1 = ""', "taken: there is no node n9"),
        (
            '[[levels]]\nname = "leaf"\n[nodes]\nn1 = ""',
            "node n1 is in 0 domains (none), and there are 1 levels (leaf)",
        ),
        ('[[levels]]\nname = "leaf"\nshare = 2.0\n[nodes]\nn1 = "a"', "share = 2.0 is no fraction"),
        ('[[levels]]\nname = "leaf"\nshare = true\n[nodes]\nn1 = "a"', "share is a number"),
        (
            '[[levels]]\nname = "leaf"\nshare = true\nwidth = 1\n[nodes]\nn1 = "a"',
            "there is no field 'width'",
        ),
        (
            '[[levels]]\nname = "a"\nscale_up = true\n[[levels]]\nname = "b"\n[nodes]\nn1 = "a.b"',
            "only the narrowest level",
        ),
        ('{"pods": []}', 'neither "instances" (Topograph) nor "items"'),
        ('{"instances": [{"id": "a", "network_layers": "leaf"}]}', "a list of names was expected"),
        ("{", "is no topology"),
        ('{"items": ' + "[" * 100_000, "is no topology"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\nSwitchName=c Nodes=n1", "is below itself"),
        ("SwitchName=a Nodes=n[1-", "is no list of hosts"),
        ("hello", "is no topology"),
    ],
)
def test_what_is_wrong_in_a_topology_is_named(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(message)):
        parse_topology(text, "x")


def test_shares_are_of_levels_that_exist() -> None:
    with pytest.raises(TopologyError, match="there is no level 'rail'; there are spine, leaf"):
        parse_topology(TREE, "x").with_rates(1.0, {"rail": 0.5})


NAMES = st.lists(
    st.one_of(
        st.builds("n{}".format, st.integers(0, 30)),
        st.builds("rack{:02d}n{:03d}".format, st.integers(1, 12), st.integers(0, 20)),
        st.builds("r{}-ib0".format, st.integers(8, 11)),
        st.sampled_from(["login", "head-a"]),
    ),
    max_size=20,
)


@given(NAMES)
def test_a_folded_host_list_names_the_same_hosts_in_the_same_order(names: list[str]) -> None:
    assert expanded(folded(names)) == names


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[1-3,7],login", ["n1", "n2", "n3", "n7", "login"]),
        ("rack[01-02]n[1-2]", ["rack01n1", "rack01n2", "rack02n1", "rack02n2"]),
        ("", []),
    ],
)
def test_a_host_list_is_expanded_as_slurm_does(text: str, hosts: list[str]) -> None:
    assert expanded(text) == hosts


@pytest.mark.parametrize(
    "text", ["n[1-", "n[a-b]", "n[3-1]", "n1,,n2", "n[1-99999999]", "a[1-2000]b[1-2000]"]
)
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no list|no range|more than"):
        expanded(text)
