"""The machines of a run: the record of each, and their differences, by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from phalanx.observe.record.notes import (
    Machine,
    installed_packages,
    leave_machine,
    machine_differences,
    newest_machines,
    nvidia_accelerators,
    nvidia_driver,
    read_machines,
    this_machine,
)
from phalanx.run.directory.paths import RunDirectory

LIKE = Machine(
    node="n",
    host="h",
    attempt=0,
    seen_s=0.0,
    cpu_model="Abacus",
    cores=8,
    accelerators=("H100",) * 8,
    driver="570.1",
    packages={"torch": "2.13.0", "numpy": "2.4"},
    packages_sha256="ab" * 32,
)


def node(name: str, **changes: object) -> Machine:
    return dataclasses.replace(LIKE, node=name, host=name, **changes)  # type: ignore[arg-type]


def test_a_node_leaves_what_it_is_and_the_list_of_its_packages(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    leave_machine(directory, "node/7", 3)
    (machine,) = read_machines(directory)
    assert dataclasses.replace(machine, seen_s=0.0) == dataclasses.replace(
        this_machine("node/7", 3)[0], seen_s=0.0
    )
    (listed,) = directory.code.iterdir()
    assert listed.read_text() == installed_packages()
    assert f"torch=={machine.packages['torch']}\n" in listed.read_text()


def test_machines_of_an_earlier_start_are_not_those_of_the_newest(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for name, attempt in (("a", 0), ("b", 0), ("a", 1)):
        leave_machine(directory, name, attempt)
    assert [(machine.node, machine.attempt) for machine in newest_machines(directory)] == [("a", 1)]
    assert [machine.node for machine in read_machines(directory, 0)] == ["b"]


def test_equal_machines_with_other_names_differ_in_nothing() -> None:
    assert machine_differences([node("a"), node("b"), node("c")]) == []
    assert machine_differences([]) == []


def test_the_odd_node_is_named_with_what_it_has() -> None:
    odd = node("b", packages={**LIKE.packages, "torch": "2.13.1"}, packages_sha256="cd" * 32)
    (difference,) = machine_differences([node("a"), odd, node("c")])
    assert difference.sentence == "torch: b with 2.13.1; the others with 2.13.0"


def test_a_difference_of_any_package_is_reported_and_so_is_a_missing_accelerator() -> None:
    differences = machine_differences(
        [node("a"), node("b", packages_sha256="cd" * 32), node("c"), node("d", accelerators=("H100",) * 7)]
    )
    assert {difference.fact: list(difference.odd.values()) for difference in differences} == {
        "installed packages": [("b",)],
        "accelerators": [("d",)],
    }


def test_many_odd_nodes_are_counted() -> None:
    machines = [node(f"a{i}") for i in range(30)] + [node(f"b{i}", driver="560.0") for i in range(20)]
    (difference,) = machine_differences(machines)
    assert difference.sentence.startswith("driver: b0, b1, b2, b3, b4, b5 and 14 more with 560.0;")


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    leave_machine(directory, "good", 0)
    (directory.machines / "torn.json").write_bytes(b'{"node": "to')
    (directory.machines / "other.json").write_bytes(b'{"node": 3}')
    assert [machine.node for machine in read_machines(directory)] == ["good"]
    assert read_machines(RunDirectory(tmp_path / "nowhere")) == []


def test_accelerators_and_their_driver_are_read_from_the_kernel(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / "gpus" / f"0000:{number}").mkdir(parents=True)
        (tmp_path / "gpus" / f"0000:{number}" / "information").write_text(
            "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n"
        )
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\nGCC version: 13.2.0\n"
    )
    assert nvidia_accelerators(tmp_path) == ("NVIDIA H100 80GB HBM3",) * 2
    assert nvidia_driver(version) == "570.133.20"
    assert (nvidia_accelerators(tmp_path / "none"), nvidia_driver(tmp_path / "none")) == ((), "")
