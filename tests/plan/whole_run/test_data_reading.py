"""A run's waits for its data: the closed form, and the warning of a plan."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from example_clusters import h100s
from phalanx.data.reading import cached_shard
from phalanx.data.stored.shard_writer import BLOCK_BYTES as STORED_BLOCK_BYTES
from phalanx_plan.cli.plan_command import command
from phalanx_plan.whole_run.assumptions import RunAssumptions, RunEstimateError, RunInputs, assumed
from phalanx_plan.whole_run.estimate import estimate_run
from phalanx_plan.whole_run.resources import (
    BLOCK_BYTES,
    REQUESTS_AT_ONCE,
    DataNeed,
    data_reading,
    stored_sample_bytes,
)

TRILLION = DataNeed(samples=512, sample_bytes=stored_sample_bytes(8192, 128_000), remote=True)
RATES = st.floats(0.1, 1e9)


def test_a_trillion_parameters_on_a_hundred_thousand_gpus_read_what_the_design_counts() -> None:
    # 6.7 M tokens/s are 820 samples of 8,192 tokens, 27 MB/s of 4 bytes a token.
    step_s = 512 * 8192 / 6.7e6
    local = data_reading(replace(TRILLION, remote=False), step_s, 12_500, 12_500, bytes_per_s=1e12)
    assert local.requests_per_s == pytest.approx(818, rel=1e-3)
    assert local.bytes_per_s == pytest.approx(26.8e6, rel=1e-2)
    assert not local.binds


@given(RATES, RATES, RATES, RATES, st.integers(1, 10_000), st.integers(1, 10_000), st.booleans())
def test_the_share_is_what_is_needed_over_the_least_of_what_is_given(
    step_s: float,
    bandwidth: float,
    latency_s: float,
    requests: float,
    nodes: int,
    replicas: int,
    remote: bool,
) -> None:
    reading = data_reading(
        replace(TRILLION, remote=remote),
        step_s,
        nodes,
        replicas,
        bytes_per_s=bandwidth,
        latency_s=latency_s,
        requests_per_s=requests,
    )
    each = TRILLION.sample_bytes + (BLOCK_BYTES if remote else 0)
    times = [512 * max(1, nodes / replicas) * each / bandwidth]  # seconds that a step's data take
    if remote:
        times += [
            512 * max(1, nodes / replicas) * latency_s / (REQUESTS_AT_ONCE * max(nodes, replicas)),
            512 * max(1, nodes / replicas) / requests,
        ]
    assert reading.share == pytest.approx(max(times) / step_s)
    assert reading.binds == (reading.share > 1)
    assert reading.bytes_per_s == pytest.approx(reading.requests_per_s * each)


def test_the_constants_are_those_of_the_reader() -> None:
    assert (BLOCK_BYTES, REQUESTS_AT_ONCE) == (STORED_BLOCK_BYTES, cached_shard._AT_ONCE)


@pytest.mark.parametrize("name", ["data_bytes_per_s", "data_latency_s", "data_requests_per_s"])
def test_a_rate_that_cannot_be_is_refused_by_name(name: str) -> None:
    for value in ("0", "-1", "nan"):
        with pytest.raises(RunEstimateError, match=f"{name} must"):
            assumed([f"{name}={value}"], RunAssumptions().step_time_band)
    with pytest.raises(RunEstimateError, match="did you mean data_latency_s"):
        assumed(["data_latency=1"], RunAssumptions().step_time_band)
    with pytest.raises(ValueError, match="step_s must be above 0"):
        data_reading(TRILLION, 0.0, 1, 1, bytes_per_s=1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_latency_s", "inf"),
        ("data_latency_s", "1e308"),
        ("data_bytes_per_s", "1e-300"),
        ("data_requests_per_s", "1e-320"),
    ],
)
def test_a_store_that_gives_next_to_nothing_is_refused_by_the_name_of_its_figure(
    name: str, value: str
) -> None:
    assumptions = replace(assumed([f"{name}={value}"], RunAssumptions().step_time_band), draws=20)
    inputs = RunInputs(h100s(64), 1.0, 512 * 8192, 1e9, 1e12, 64, 64, data=TRILLION)
    with pytest.raises(ValueError, match=f"{name} = .*--assume {name}="):
        estimate_run(inputs, assumptions)


def test_an_estimate_warns_with_the_limit_and_its_remedy_only_where_data_bind() -> None:
    inputs = RunInputs(h100s(64), 1.0, 512 * 8192, 1e9, 1e12, 64, 64, data=TRILLION)
    few = RunAssumptions(draws=20)
    for changes, limit in (
        ({"data_bytes_per_s": 1e6}, "bandwidth"),
        ({"data_latency_s": 30.0}, "latency"),
        ({"data_requests_per_s": 10.0}, "requests"),
    ):
        run = estimate_run(inputs, replace(few, **changes))  # type: ignore[arg-type]
        (note,) = [text for text in run.warnings if "data would bind" in text]
        assert f"({limit})" in note
        assert next(iter(changes)) in note or limit == "bandwidth"
        assert run.to_dict()["data"]["binds"]  # type: ignore[index]
    usual = estimate_run(inputs, few)
    assert not [text for text in usual.warnings if "data would bind" in text]
    assert usual.data is not None
    assert not usual.data.binds


def test_a_plan_has_the_reading_of_data_in_its_table_and_in_json() -> None:
    words = ["--model", "llama3-8b", "--cluster", "h100:64", "--batch", "128", "--seq-len", "4096"]
    words += ["--layout", "tp=2,dp=32,zero=3"]
    local = json.loads(CliRunner().invoke(command, [*words, "--json"]).stdout)["whole_run"]
    need = 128 / (local["data"]["bytes_per_s"] / local["data"]["requests_per_s"])
    assert need == pytest.approx(128 / stored_sample_bytes(4096, 128_256))
    assert not local["data"]["binds"]
    remote = ["--set", "data.path=s3://bucket/web", "--assume", "data_latency_s=60"]
    printed = CliRunner().invoke(command, [*words, *remote], env={"COLUMNS": "200"}).output
    assert "records/s" in printed
    assert "data would bind" in printed
