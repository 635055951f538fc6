"""A healthy run as series of Prometheus' unit tests, and what each trouble changes of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from phalanx_watch.why.observed import CODES

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules"
MINUTES = 130
"""Longer than what any rule needs; the rule of six hours makes do with what there is."""


def require(program: str) -> str:
    """The path of a program of Debian's; the test is skipped with a message where it is missing."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed: make servers")
    return path


def alerts() -> list[dict[str, object]]:
    groups = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    """The expressions of all rules."""
    files = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yml"))]
    return [rule["expr"] for file in files for group in file["groups"] for rule in group["rules"]]


def names_in(expression: str) -> set[str]:
    """The names of our own series that an expression reads."""
    return set(re.findall(r"\b(?:phalanx_\w+|DCGM_\w+|phalanx:[\w:]+|vllm:\w+)", expression))


_COORDINATOR = 'job="phalanx",instance="h:9400",run="r"'
_NODES = tuple(f'job="phalanx",instance="h:940{n + 1}",run="r",node="n{n}"' for n in range(2))
_UI = 'job="phalanx-ui",instance="h:7425"'
_SOFTWARE = 'phalanx="0.1.0",python="3.11.7",torch="2.13.0",numpy="2.4.6"'

HEALTHY: dict[str, str] = {
    f"up{{{_COORDINATOR}}}": f"1x{MINUTES}",
    f'phalanx_run_state{{{_COORDINATOR},state="training"}}': f"1x{MINUTES}",
    f"phalanx_last_step_timestamp_seconds{{{_COORDINATOR}}}": f"0+60x{MINUTES}",
    f"phalanx_usual_step_seconds{{{_COORDINATOR}}}": f"10x{MINUTES}",
    f"phalanx_steps_total{{{_COORDINATOR}}}": f"0+6x{MINUTES}",
    f"phalanx_step{{{_COORDINATOR}}}": f"0+6x{MINUTES}",
    f"phalanx_checkpoint_step{{{_COORDINATOR}}}": f"0+6x{MINUTES}",
    f"phalanx_checkpoint_failures_total{{{_COORDINATOR}}}": f"0x{MINUTES}",
    f"phalanx_evaluations_total{{{_COORDINATOR}}}": f"0+1x{MINUTES}",
    f"phalanx_evaluation_seconds_total{{{_COORDINATOR}}}": f"0+1x{MINUTES}",
    f"phalanx_nonfinite_steps_total{{{_COORDINATOR}}}": f"0x{MINUTES}",
    f"phalanx_loss_spikes_total{{{_COORDINATOR}}}": f"0x{MINUTES}",
    f"phalanx_loss{{{_COORDINATOR}}}": f"4-0.001x{MINUTES}",
    f"phalanx_tokens_per_second{{{_COORDINATOR}}}": f"1000x{MINUTES}",
    f'phalanx_ledger_seconds_total{{{_COORDINATOR},bucket="step.compute"}}': f"0+55x{MINUTES}",
    f'phalanx_ledger_seconds_total{{{_COORDINATOR},bucket="ckpt.blocking"}}': f"0+5x{MINUTES}",
    f'phalanx_fleet_nodes{{{_COORDINATOR},role="member"}}': f"2x{MINUTES}",
    f'phalanx_fleet_nodes{{{_COORDINATOR},role="spare"}}': f"1x{MINUTES}",
    f'phalanx_fleet_nodes{{{_COORDINATOR},role="warming"}}': f"0x{MINUTES}",
    f"phalanx_fleet_expected_nodes{{{_COORDINATOR}}}": f"3x{MINUTES}",
    f'phalanx_fleet_phase{{{_COORDINATOR},phase="waiting"}}': f"0x{MINUTES}",
    f"phalanx_fleet_recoveries_total{{{_COORDINATOR}}}": f"0x{MINUTES}",
    f"phalanx_fleet_state_timestamp_seconds{{{_COORDINATOR}}}": f"0+60x{MINUTES}",
    f'phalanx_fleet_node_straggler{{{_COORDINATOR},node="n0"}}': f"0x{MINUTES}",
    f'phalanx_fleet_node_quarantined{{{_COORDINATOR},node="n0"}}': f"0x{MINUTES}",
}
HEALTHY |= {
    f"up{{{_UI}}}": f"1x{MINUTES}",
    f'phalanx_reasons_timestamp_seconds{{{_UI},run="r"}}': f"0+60x{MINUTES}",
    f'phalanx_ledger_seconds_total{{{_COORDINATOR},bucket="step.data_wait"}}': f"0+0.1x{MINUTES}",
    **{f'phalanx_reason{{{_UI},run="r",code="{code}"}}': f"0x{MINUTES}" for code in CODES},
}
for _node in _NODES:
    HEALTHY |= {
        f"up{{{_node}}}": f"1x{MINUTES}",
        f"phalanx_node_disk_free_bytes{{{_node}}}": f"500x{MINUTES}",
        f"phalanx_node_disk_bytes{{{_node}}}": f"1000x{MINUTES}",
        f"phalanx_node_memory_free_bytes{{{_node}}}": f"500x{MINUTES}",
        f"phalanx_node_memory_bytes{{{_node}}}": f"1000x{MINUTES}",
        f"phalanx_clock_timestamp_seconds{{{_node}}}": f"0+60x{MINUTES}",
        f"phalanx_node_software_info{{{_node},{_SOFTWARE}}}": f"1x{MINUTES}",
        f'phalanx_exporter_failures_total{{{_node},source="machine"}}': f"0x{MINUTES}",
        f'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{_node},gpu="0"}}': f"0x{MINUTES}",
        f'DCGM_FI_DEV_ROW_REMAP_FAILURE{{{_node},gpu="0"}}': f"0x{MINUTES}",
        f'DCGM_FI_DEV_ROW_REMAP_PENDING{{{_node},gpu="0"}}': f"0x{MINUTES}",
        f'DCGM_FI_DEV_CLOCK_THROTTLE_REASONS{{{_node},gpu="0"}}': f"1x{MINUTES}",  # idle, which is well
        f'DCGM_FI_DEV_XID_ERRORS{{{_node},gpu="0"}}': f"0x{MINUTES}",
    }
_SERVER = 'job="phalanx-serve",instance="h:8000",model_name="m"'
HEALTHY |= {
    'up{job="phalanx-serve",instance="h:8000"}': f"1x{MINUTES}",
    f"vllm:num_requests_running{{{_SERVER}}}": f"4x{MINUTES}",
    f"vllm:num_requests_waiting{{{_SERVER}}}": " ".join(["0 3"] * (MINUTES // 2)),
    f"vllm:kv_cache_usage_perc{{{_SERVER}}}": f"0.5x{MINUTES}",
    f"vllm:prompt_tokens_total{{{_SERVER}}}": f"0+1000x{MINUTES}",
    f"vllm:generation_tokens_total{{{_SERVER}}}": f"0+6000x{MINUTES}",
    f'vllm:request_success_total{{{_SERVER},finished_reason="stop"}}': f"0+100x{MINUTES}",
    f'phalanx_requests_refused_total{{{_SERVER},status="400"}}': f"0+100x{MINUTES}",  # the clients' own fault
    f'phalanx_requests_refused_total{{{_SERVER},status="429"}}': f"0+1x{MINUTES}",
    **{
        f'vllm:time_to_first_token_seconds_bucket{{{_SERVER},le="{bound}"}}': f"0+100x{MINUTES}"
        for bound in ("1.0", "10.0", "+Inf")
    },
}
_LATE = MINUTES - 15


def _till(late: int, before: str, after: str) -> str:
    return f"{before}x{late} {after}x{MINUTES - late}"


TROUBLES: dict[str, dict[str, str]] = {
    "PhalanxNoStep": {"phalanx_last_step_timestamp_seconds": _till(_LATE, "0+60", f"{60 * _LATE}")},
    "PhalanxNotFinite": {"phalanx_nonfinite_steps_total": _till(MINUTES - 3, "0", "1")},
    "PhalanxNotFinite (the loss)": {"phalanx_loss": f"3x{_LATE}{' NaN' * 15}"},
    "PhalanxLossSpike": {"phalanx_loss": _till(MINUTES - 3, "3", "5")},
    "PhalanxLossSpike (counted)": {"phalanx_loss_spikes_total": _till(MINUTES - 3, "0", "1")},
    "PhalanxGoodputLow": {
        'phalanx_ledger_seconds_total{bucket="step.compute"}': f"0+30x{MINUTES}",
        'phalanx_ledger_seconds_total{bucket="ckpt.blocking"}': f"0+30x{MINUTES}",
    },
    "PhalanxThroughputDown": {"phalanx_tokens_per_second": _till(MINUTES - 25, "1000", "850")},
    "PhalanxStraggler": {"phalanx_fleet_node_straggler": _till(_LATE, "0", "1")},
    "PhalanxSparesExhausted": {'phalanx_fleet_nodes{role="spare"}': _till(_LATE, "1", "0")},
    "PhalanxWaiting": {"phalanx_fleet_phase": _till(_LATE, "0", "1")},
    "PhalanxFailing": {"phalanx_fleet_recoveries_total": _till(_LATE - 15, "0", "0+1")},
    "PhalanxCheckpointFailing": {"phalanx_checkpoint_failures_total": _till(_LATE, "0", "1")},
    "PhalanxCheckpointOld": {"phalanx_checkpoint_step": f"6x{MINUTES}"},
    "PhalanxDiskFilling": {"phalanx_node_disk_free_bytes": _till(_LATE, "500", "40")},
    "PhalanxDiskFilling (soon)": {"phalanx_node_disk_free_bytes": f"1000-6x{MINUTES}"},
    "PhalanxMemoryLow": {"phalanx_node_memory_free_bytes": _till(_LATE, "500", "20")},
    "PhalanxNodeUnfit": {"phalanx_fleet_node_quarantined": _till(_LATE, "0", "1")},
    "PhalanxGpuErrors": {"DCGM_FI_DEV_XID_ERRORS": _till(_LATE, "0", "79")},
    "PhalanxGpuErrors (memory)": {"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": _till(_LATE, "0", "2")},
    "PhalanxGpuErrors (rows)": {"DCGM_FI_DEV_ROW_REMAP_FAILURE": _till(_LATE, "0", "1")},
    "PhalanxClockSkew": {"phalanx_clock_timestamp_seconds": f"9+60x{MINUTES}"},
    "PhalanxCoordinatorGone": {f"up{{{_COORDINATOR}}}": _till(_LATE, "1", "0")},
    "PhalanxCoordinatorStuck": {"phalanx_fleet_state_timestamp_seconds": _till(_LATE, "0+60", f"{60 * _LATE}")},
    "PhalanxAgentGone": {f"up{{{_NODES[1]}}}": _till(_LATE, "1", "0")},
    "PhalanxMixedSoftware": {f"phalanx_node_software_info{{{_NODES[1]},{_SOFTWARE}}}": "_x1", f'phalanx_node_software_info{{{_NODES[1]},{_SOFTWARE},driver="570"}}': f"1x{MINUTES}"},
    "PhalanxGone": {'phalanx_reason{code="gone"}': _till(MINUTES - 1, "0", "3")},
    "PhalanxFailed": {'phalanx_reason{code="failed"}': _till(MINUTES - 1, "0", "3")},
    "PhalanxGone (elsewhere)": {'phalanx_reason{code="silent"}': _till(MINUTES - 1, "0", "2")},
    "PhalanxOtherData": {'phalanx_reason{code="other-data"}': _till(MINUTES - 1, "0", "3")},
    "PhalanxOtherData (gone)": {'phalanx_reason{code="data-gone"}': _till(MINUTES - 1, "0", "2")},
    "PhalanxCritical": {'phalanx_reason{code="stalled"}': _till(MINUTES - 1, "0", "3")},
    "PhalanxWarning": {'phalanx_reason{code="changed-libraries"}': _till(_LATE, "0", "2")},
    "PhalanxUnwatched": {f"up{{{_UI}}}": _till(_LATE, "1", "0")},
    "PhalanxUnwatched (hung)": {"phalanx_reasons_timestamp_seconds": _till(_LATE - 15, "0+60", f"{60 * (_LATE - 15)}")},
    "PhalanxSlowData": {'phalanx_ledger_seconds_total{bucket="step.data_wait"}': f"0+10x{MINUTES}"},
    "PhalanxThrottled": {"DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": _till(_LATE, "1", "64")},
    "PhalanxThrottled (brake)": {"DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": _till(_LATE, "4", "196")},
    "PhalanxServeGone": {'up{job="phalanx-serve"': _till(_LATE, "1", "0")},
    "PhalanxServeStuck": {"vllm:generation_tokens_total": _till(_LATE, "0+6000", f"{6000 * _LATE}"), "vllm:prompt_tokens_total": _till(_LATE, "0+1000", f"{1000 * _LATE}")},
    "PhalanxServeRefusing": {'phalanx_requests_refused_total{status="429"}': f"0+20x{MINUTES}"},
    "PhalanxServeQueue": {"vllm:num_requests_waiting": f"2x{MINUTES}"},
    "PhalanxServePagesFull": {"vllm:kv_cache_usage_perc": f"0.99x{MINUTES}"},
    "PhalanxServeSlowFirstToken": {'vllm:time_to_first_token_seconds_bucket{le="1.0"}': f"0+90x{MINUTES}"},
    "PhalanxMetricsFailing": {"phalanx_exporter_failures_total": f"0+1x{MINUTES}"},
}  # fmt: skip
"""Alert -> the series that are otherwise, by their whole names or by what is enough to know them."""


def with_trouble(changes: dict[str, str]) -> dict[str, str]:
    """The healthy series with ``changes``."""
    series = dict(HEALTHY)
    for name, values in changes.items():
        metric, _, labels = name.partition("{")
        matching = [
            key
            for key in series
            if key == name or (key.startswith(f"{metric}{{") and labels.rstrip("}") in key)
        ]
        if name.count("instance="):
            matching = [name]
        assert matching, name
        series |= dict.fromkeys(matching, values)
    return series


def unit_test(series: dict[str, str], expected: set[str]) -> dict[str, object]:
    """A test of ``promtool``: at the end exactly the expected alerts fire."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})  > bool 0',
                "eval_time": f"{MINUTES}m",
                "exp_samples": [
                    {"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(expected)
                ],
            }
        ],
    }
