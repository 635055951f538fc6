"""GPUs' reports under DCGM's names."""

from __future__ import annotations

from phalanx.fleet.health.node_health import GpuReading, Xid
from phalanx.fleet.node.node_metrics import gpu_samples, samples_of
from phalanx.observe.metrics.samples import Labels

READING = GpuReading("H100", "00000000:3B:00.0", 61.0, 87.0, 1980.0, 0x8, 2, True, False)


def test_each_gpu_is_a_label_and_each_fact_has_the_name_of_dcgm() -> None:
    samples = samples_of(
        [READING, READING], (Xid("0000:3b:00", 13), Xid("0000:3b:00", 79)), Labels(run="r", node="n")
    )
    first = {sample.metric.name: sample.value for sample in samples if sample.labels.pairs["gpu"] == "0"}
    assert first == {
        "DCGM_FI_DEV_GPU_TEMP": 61.0,
        "DCGM_FI_DEV_SM_CLOCK": 1980.0,
        "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": 8,
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 2,
        "DCGM_FI_DEV_ROW_REMAP_PENDING": 1,
        "DCGM_FI_DEV_ROW_REMAP_FAILURE": 0,
        "DCGM_FI_DEV_XID_ERRORS": 79,
    }
    assert {sample.labels.pairs["gpu"] for sample in samples} == {"0", "1"}


def test_a_machine_without_gpus_has_no_samples_of_them() -> None:
    assert gpu_samples(Labels()) == []
