"""How a process learns its rank, and its errors when the ranks cannot meet."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.parallel.process_group.rendezvous import (
    RankEnvironment,
    RendezvousError,
    backends_for,
    device_for,
    first_host,
    join,
    leave,
    missing_for_nccl,
    rank_from_environment,
    require_interface,
)
from small_disks import fill, small_disk


def test_a_process_started_by_nobody_has_no_place() -> None:
    assert rank_from_environment({"HOME": "/root"}) is None


def test_torchrun_gives_rank_and_address() -> None:
    environ = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "1234",
    }
    assert rank_from_environment(environ) == RankEnvironment(3, 8, 1, "tcp://node1:1234", "torchrun", "node1")


def test_srun_gives_rank_and_the_first_node_is_the_meeting_point() -> None:
    environ = {
        "SLURM_PROCID": "9",
        "SLURM_NTASKS": "16",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "46",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "gpu[003-004]",
    }
    expected = RankEnvironment(9, 16, 1, "tcp://gpu003:24462", "srun", "gpu003", several_machines=True)
    assert rank_from_environment(environ) == expected
    with_port = environ | {"MASTER_PORT": "29500"}
    assert rank_from_environment(with_port) == replace(expected, meeting_point="tcp://gpu003:29500")


def test_two_steps_of_srun_on_one_node_meet_at_two_ports() -> None:
    ports = set()
    for job in ("46", "47"):
        for step in ("0", "1"):
            place = rank_from_environment(
                {"SLURM_PROCID": "0", "SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_STEP_NODELIST": "n1"}
            )
            assert place is not None
            ports.add(place.meeting_point)
    assert len(ports) == 4


def test_a_machine_of_rank_0_without_an_address_is_named_at_once() -> None:
    place = RankEnvironment(1, 2, 0, "tcp://no-such-host.invalid:29500", "srun")
    with pytest.raises(RendezvousError, match=r"finds no address for no-such-host\.invalid.*MASTER_ADDR"):
        join(place, torch.device("cpu"), 60.0)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[003-007,9],x", "gpu003"), ("a,b", "a"), ("host7", "host7"), ("n[1,3]", "n1"), ("", "")],
)
def test_the_first_host_of_a_compressed_list_is_found(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_an_ipv6_address_is_bracketed_and_fewer_ranks_here_than_in_all_mean_several_machines() -> None:
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "fd00::7",
        "MASTER_PORT": "1234",
    }
    expected = RankEnvironment(0, 4, 0, "tcp://[fd00::7]:1234", "torchrun", "fd00::7", several_machines=True)
    assert rank_from_environment(environ) == expected


def test_the_error_of_a_rank_without_an_address_names_what_to_set() -> None:
    with pytest.raises(RendezvousError, match="set MASTER_ADDR"):
        rank_from_environment({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"MASTER_ADDR": "127.0.0.1:1"}, "'127.0.0.1:1' is no host"),
        ({"MASTER_PORT": "abc"}, "'abc' is no port"),
        ({"MASTER_PORT": "99999"}, "'99999' is no port"),
        ({"RANK": "x"}, "RANK is 'x', and must be a number"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is '', and must be a number"),
    ],
)
def test_a_launchers_variable_of_another_form_is_named(variables: dict[str, str], named: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1234"}
    with pytest.raises(RendezvousError, match=re.escape(named)):
        rank_from_environment(environ | variables)


def test_our_own_launcher_comes_before_an_environment_inherited_from_another() -> None:
    environ = {
        "PHALANX_RANK": "1",
        "PHALANX_RANKS": "2",
        "PHALANX_MEETING_POINT": "file:///x",
        "SLURM_PROCID": "0",
        "SLURM_STEP_ID": "0",
    }
    place = rank_from_environment(environ)
    assert place is not None
    assert (place.rank, place.launcher) == (1, "phalanx")


def test_a_port_in_use_is_named_with_what_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RendezvousError, match=r"port .* in use .*set MASTER_PORT"):
            join(RankEnvironment(0, 2, 0, address, "torchrun"), torch.device("cpu"), timeout_s=60.0)


def test_ranks_meet_in_a_folder_whose_name_an_address_must_write_otherwise(tmp_path: Path) -> None:
    folder = tmp_path / "a b,c%20d"
    folder.mkdir()
    join(
        RankEnvironment(0, 1, 0, (folder / "store").as_uri(), "phalanx"), torch.device("cpu"), timeout_s=60.0
    )
    there = (folder / "store").exists()
    leave()
    assert there


def test_a_chosen_interface_that_is_not_there_is_named_with_its_variable_and_those_that_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    environment = RankEnvironment(0, 1, 0, (tmp_path / "store").as_uri(), "phalanx")
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    with pytest.raises(
        RendezvousError, match=rf"GLOO_SOCKET_IFNAME is nowhere0, .* set it to one of .*{loopback}"
    ):
        join(environment, torch.device("cpu"), timeout_s=60.0)


@pytest.mark.parametrize(
    ("chosen", "missing"),
    [
        ("eth", set()),
        ("=eth", {"eth"}),
        ("=eth0,ib0", set()),
        ("ib", {"ib"}),
        ("ib0,ib1", {"ib0", "ib1"}),
        ("^ib", set()),
    ],
)
def test_the_interfaces_of_nccl_are_looked_for_by_its_own_rules(chosen: str, missing: set[str]) -> None:
    assert missing_for_nccl(chosen, {"lo", "eth0"}) == missing


def test_an_interface_of_nccl_that_is_not_there_is_named_before_ranks_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nowhere")
    require_interface(torch.device("cpu"))
    with pytest.raises(RendezvousError, match=r"NCCL_SOCKET_IFNAME is nowhere, .* set it to one of"):
        require_interface(torch.device("cuda"))


def test_a_rank_that_waits_for_rank_0_prints_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RendezvousError):
        join(
            *(RankEnvironment(1, 2, 1, "tcp://127.0.0.1:1", "torchrun"), torch.device("cpu"), 1.0),
            silent_s=0.0,
        )
    assert "rank 1 of 2 on " in (line := capsys.readouterr().err)
    assert "is waiting for the others, which meet at rank 0's address 127.0.0.1:1" in line


def test_ranks_that_never_come_are_reported() -> None:
    with pytest.raises(RendezvousError, match=r"rank 1 of 2 could not meet the others"):
        join(RankEnvironment(1, 2, 1, "tcp://127.0.0.1:1", "torchrun"), torch.device("cpu"), timeout_s=1.0)


def test_a_meeting_file_that_cannot_be_written_is_reported_with_its_folder(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "4m") as mount:
        fill(mount)
        environment = RankEnvironment(0, 1, 0, (mount / "store").as_uri(), "phalanx")
        with pytest.raises(
            RendezvousError, match=r"No space left.* that its folder can be written and has room"
        ):
            join(environment, torch.device("cpu"), timeout_s=60.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_refused_where_there_is_none() -> None:
    with pytest.raises(RendezvousError, match="sees no GPU"):
        device_for("cuda", 0)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_ranks_have_one_backend_so_that_gpus_do_not_connect_every_rank_with_every_other(
    device: str, backend: str
) -> None:
    assert backends_for(torch.device(device)) == backend
