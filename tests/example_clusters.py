"""Clusters for tests that must not change when the catalog learns a better figure."""

from __future__ import annotations

from dataclasses import replace

from phalanx.hardware.cluster import Accelerator, Cluster, Domain, Fabric, FabricLevel, Fact


def fact(value: float) -> Fact:
    return Fact(value, "test")


H100 = Accelerator(
    key="h100",
    name="H100 SXM",
    vendor="NVIDIA",
    announced_only=False,
    flops={"bf16": fact(989.5e12), "fp8": fact(1979e12)},
    sparse_flops={},
    memory_bytes=fact(80e9),
    memory_bytes_per_s=fact(3.35e12),
    multiprocessors=132,
    power_w=fact(700.0),
    idle_power_w=fact(70.0),
    host_bytes_per_s=fact(55e9),
    price_per_hour=fact(2.0),
)


def h100s(accelerators: int) -> Cluster:
    """DGX-like nodes of 8 on a non-blocking fat tree of 400 Gb/s links; storage of 2 TB/s."""
    return Cluster(
        key=f"h100:{accelerators}",
        accelerator=H100,
        accelerators=accelerators,
        per_node=8,
        domain=Domain(8, fact(450e9), 2e-6),
        fabric=Fabric("fat-tree", fact(50e9), (FabricLevel("core", accelerators, 1.0, 5e-6),)),
        node_power_w=fact(4600.0),
        host_memory_bytes=fact(2e12),
        pue=fact(1.25),
        storage_bytes_per_s=fact(2e12),
    )


def with_rates(cluster: Cluster, *, storage: float = 1.0, fabric: float = 1.0, host: float = 1.0) -> Cluster:
    """The cluster with some bandwidths multiplied."""
    return replace(
        cluster,
        storage_bytes_per_s=fact(cluster.storage_bytes_per_s.value * storage),
        fabric=replace(cluster.fabric, bytes_per_s=fact(cluster.fabric.bytes_per_s.value * fabric)),
        accelerator=replace(
            cluster.accelerator, host_bytes_per_s=fact(cluster.accelerator.host_bytes_per_s.value * host)
        ),
    )
