"""The catalog: every figure has a source, clusters are named in a few words, and users add their own."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from phalanx.hardware.catalog import accelerator, accelerators, cluster, load_user, systems
from phalanx.hardware.cluster import Fact, HardwareError, with_value
from phalanx.hardware.profile import profile_names, profile_of


def facts(entry: Any) -> list[Fact]:
    if isinstance(entry, Fact):
        return [entry]
    if isinstance(entry, dict):
        return [fact for value in entry.values() for fact in facts(value)]
    if dataclasses.is_dataclass(entry):
        return [fact for field in dataclasses.fields(entry) for fact in facts(getattr(entry, field.name))]
    return []


@pytest.mark.parametrize("key", accelerators())
def test_every_figure_of_an_accelerator_has_a_source_and_a_date(key: str) -> None:
    assert len(facts(accelerator(key))) > 6
    assert all(fact.source and fact.date for fact in facts(accelerator(key)))


@pytest.mark.parametrize("key", systems())
def test_every_figure_of_a_system_has_a_source_and_a_date(key: str) -> None:
    assert all(fact.source and fact.date for fact in facts(systems()[key]))


@pytest.mark.parametrize("key", accelerators())
def test_every_accelerator_has_constants_whose_shares_are_shares(key: str) -> None:
    constants = profile_of(accelerator(key)).constants
    shares = [
        fit.efficiency
        for fit in (*constants.matmul.values(), *constants.collectives.values(), constants.memory)
    ]
    shares += [constants.attention.forward, constants.attention.backward, constants.network.efficiency]
    assert all(0 < share <= 1 for share in shares)
    assert all(fit.provenance.source for fit in (*constants.matmul.values(), *constants.collectives.values()))


def test_lower_precision_is_never_slower_and_sparsity_never_below_dense() -> None:
    for entry in accelerators().values():
        rates = [
            entry.flops[name].value for name in ("fp32", "tf32", "bf16", "fp8", "fp4") if name in entry.flops
        ]
        assert rates == sorted(rates), entry.key
        assert all(sparse.value >= entry.flops[name].value for name, sparse in entry.sparse_flops.items())


def test_the_links_of_a_system_are_slower_than_its_memory_and_faster_than_its_network() -> None:
    for system in systems().values():
        assert system.fabric.bytes_per_s.value < system.domain.bytes_per_s.value
        assert system.domain.bytes_per_s.value < system.accelerator.memory_bytes_per_s.value


@pytest.mark.parametrize(
    ("description", "key", "count"),
    [
        ("h100:16384", "h100", 16_384),
        ("gb200-nvl72 x 1389", "gb200", 100_008),
        ("gb200-nvl72 × 2", "gb200", 144),
        ("vr200-nvl72:100000", "vr200", 100_000),
        ("h100:100,000", "h100", 100_000),
        ("a100", "a100", 8),
    ],
)
def test_a_cluster_is_named_by_accelerators_or_by_domains(description: str, key: str, count: int) -> None:
    described = cluster(description)
    assert (described.accelerator.key, described.accelerators) == (key, count)


@pytest.mark.parametrize(
    ("description", "says"),
    [
        ("h999:8", "there are h100"),
        ("h100:0", "at least one"),
        ("h100:8:8", "NAME:ACCELERATORS"),
        (f"h100:{'9' * 5_000}", "5,000 digits: write NAME:ACCELERATORS"),
        ("h100 x 1000000", "describe a larger fabric"),
        ("missing.toml:8", "phalanx calibrate"),
    ],
)
def test_a_wrong_cluster_is_explained(description: str, says: str) -> None:
    with pytest.raises(HardwareError, match=says):
        cluster(description)


def test_a_user_states_only_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[system]\nlike = "h100"\nsource = "my offer"\nfabric = {bytes_per_s = 25e9}\n')
    own, stock = cluster(f"{path}:64"), cluster("h100:64")
    assert own.fabric.bytes_per_s == Fact(25e9, "my offer", "")
    assert own.fabric.levels == stock.fabric.levels
    assert own.domain == stock.domain
    assert own.accelerator == stock.accelerator
    path.write_text('[system]\nlike = "h100"\npue = 1.05\n')
    assert cluster(f"{path}:64").pue == Fact(1.05, f"stated in {path}", "")


def test_a_user_adds_an_accelerator_and_its_constants(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    profile = (Path(__file__).parents[2] / "src/phalanx/hardware/profiles/h100.toml").read_text()
    path.write_text(
        'source = "my bench"\n[accelerator]\nlike = "h100"\nkey = "h100x"\nsource = "my bench"\nmemory_bytes = 1e11\n'
        f'[system]\nlike = "h100"\n{profile[profile.index("[profile]") :]}'.replace(
            "efficiency = 0.8238", "efficiency = 0.5"
        )
    )
    own = cluster(f"{path}:8").accelerator
    assert (own.key, own.memory_bytes) == ("h100x", Fact(1e11, "my bench", ""))
    assert profile_of(own).constants.matmul["bf16"].efficiency == 0.5
    assert profile_of(accelerator("h100")).constants.matmul["bf16"].efficiency != 0.5


def test_an_accelerator_like_another_names_the_profile_that_it_shares(tmp_path: Path) -> None:
    path = tmp_path / "dom.toml"
    text = '[system]\nlike = "h100"\n[accelerator]\nlike = "h100"\n'
    path.write_text(text)
    with pytest.raises(HardwareError, match=r"no profile 'dom': .*h100.*set \[accelerator\] profile"):
        profile_of(cluster(f"{path}:16").accelerator)
    path.write_text(text + 'profile = "h100"\n')
    stock = profile_of(accelerator("h100")).constants
    assert profile_of(cluster(f"{path}:16").accelerator).constants == stock


def test_this_machine_is_read_from_its_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "this.toml"
    monkeypatch.setenv("PHALANX_THIS_MACHINE", str(path))
    with pytest.raises(HardwareError, match="phalanx calibrate --out"):
        cluster("this")
    path.write_text('[system]\nlike = "cpu"\n')
    assert cluster("this:2").accelerators == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[system]\nlike = "zork"\n', r"like: 'zork' is not known \(one of 'h100'"),
        (
            '[system]\nlike = "h100"\nper_nod = 4\n',
            r"per_nod: there is no such field \(did you mean per_node\?\)",
        ),
        ('[system]\nlike = "h100"\npue = "low"\n', r"pue.value: 'low' is not a number \(must be a number\)"),
        ('[system]\naccelerator = "h100"\n', r"per_node: is missing \(add it\)"),
        (
            '[system]\nlike = "h100"\nfabric = {kind = "mesh"}\n',
            r"fabric.kind: 'mesh' is not known \(one of 'fat-tree'",
        ),
        (
            '[system]\nlike = "h100"\n[[system.fabric.levels]]\nname = "a"\nreach = 8\nshare = 2.0\nlatency_s = 0\n',
            r"fabric.levels\[0\].share: 2.0 is out of range \(must be above 0 and at most 1\)",
        ),
        ('[system]\nlike = "h100"\naccelerator = ["h100"]\n', r"accelerator: \['h100'\] is not known"),
        ('system = "h100"\n', r"system: 'h100' is not a table \(add a table \[system\]\)"),
        ("[system\n", "is not TOML"),
        ('[sistem]\nlike = "h100"\n', r"sistem: there is no such field \(did you mean system\?\)"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(HardwareError, match=says):
        load_user(path)


def test_a_file_that_is_no_utf_8_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes('[system]\nname = "Zürich"\n'.encode("latin-1"))
    with pytest.raises(HardwareError, match=r"mine\.toml is not TOML: 'utf-8' codec"):
        load_user(path)


def test_all_mistakes_of_a_table_are_reported_at_once_with_their_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[system]\nlike = "h100"\npue = -1\nper_node = 0\n[system.domain]\nsiz = 8\n')
    with pytest.raises(HardwareError) as caught:
        load_user(path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path}, [system]: 3 problems"
    assert {line.split(":")[0].strip() for line in lines[1:]} == {"pue.value", "per_node", "domain.siz"}


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("k_half = 121.9", "k_halve = 121.9", "matmul.bf16.k_halve: there is no such field"),
        ("k_half = 121.9", "", "matmul.bf16.k_half: is missing"),
        (
            "[profile.collectives.dispatch]",
            "[profile.collectives.dispatched]",
            "collectives.dispatch: is missing",
        ),
        ("grouped_efficiency = 0.9", "grouped_efficiency = -0.9", "grouped_efficiency: -0.9 is out of range"),
    ],
)
def test_a_wrong_profile_is_explained(tmp_path: Path, before: str, after: str, says: str) -> None:
    text = (Path(__file__).parents[2] / "src/phalanx/hardware/profiles/h100.toml").read_text()
    assert before in text
    path = tmp_path / "fitted.toml"
    path.write_text(text.replace(before, after))
    with pytest.raises(HardwareError, match=re.escape(says)) as caught:
        profile_of(accelerator("h100"), str(path))
    assert f"{path}, [profile]" in str(caught.value)


def test_a_figure_is_overridden_by_its_dotted_name_and_noted() -> None:
    stock = cluster("h100:64")
    changed = with_value(with_value(stock, "fabric.bytes_per_s", 1e9), "accelerator.flops.bf16", 1e15)
    assert (changed.fabric.bytes_per_s.value, changed.accelerator.flops["bf16"].value) == (1e9, 1e15)
    assert changed.overrides == {"fabric.bytes_per_s": 1e9, "accelerator.flops.bf16": 1e15}
    assert stock.fabric.bytes_per_s.value == 50e9


@pytest.mark.parametrize(
    "name",
    [
        *("zork", "fabric", "fabric.zork", "key", "accelerator.flops", "pue.value"),
        *("per_node.x", "domain.latency_s.x", "accelerator.flops.bf16.x"),
    ],
)
def test_only_figures_can_be_overridden(name: str) -> None:
    with pytest.raises(HardwareError, match="figure"):
        with_value(cluster("h100:64"), name, 1.0)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("pue", 0.8, "set 1 or more"),
        ("domain.size", 2.5, "set a whole number, as 8 is"),
        ("accelerators", 128, "--cluster h100:128"),
        ("accelerator.power_w", 1000, "no more than 700, with which its rates were measured"),
        ("accelerator.power_w", 0, "more than accelerator.idle_power_w, which is 75"),
        ("accelerator.power_w", 50, "more than accelerator.idle_power_w, which is 75"),
        ("accelerator.idle_power_w", 5000, "no more than accelerator.power_w, which is 700"),
    ],
)
def test_a_figure_that_nothing_can_have_is_refused(name: str, value: float, says: str) -> None:
    with pytest.raises(HardwareError, match=re.escape(says)):
        with_value(cluster("h100:64"), name, value)


def test_a_site_draws_no_less_than_its_machines(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[system]\nlike = "h100"\npue = 0.8\n')
    with pytest.raises(HardwareError, match=r"pue: 0\.8 is below 1"):
        cluster(f"{path}:64")


def test_an_accelerator_draws_no_less_under_load_than_idle(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[system]\nlike = "h100"\n[accelerator]\nlike = "h100"\nprofile = "h100"\npower_w = 0\n')
    with pytest.raises(HardwareError, match="power_w: 0 is below idle_power_w = 75"):
        cluster(f"{path}:64")


def test_a_missing_profile_lists_those_that_exist() -> None:
    with pytest.raises(HardwareError, match="there are"):
        profile_of(accelerator("h100"), "zork")
    assert {"a100", "h100", "h200", "b200", "gb200"} <= set(profile_names())


def test_announced_hardware_is_marked() -> None:
    announced = [entry.key for entry in accelerators().values() if entry.announced_only]
    assert announced == ["vr200"]
