"""Runs to ask a Kubernetes cluster for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.launch.kubernetes.request import PodRequest, request_of, with_pod_run_dir
from phalanx.run.spec import FleetSpec, LaunchSpec, RunSpec


def spec_of(
    name: str = "big", *, nodes: int = 14, spares: int = 2, run_dir: str = "", **launch: Any
) -> RunSpec:
    """A run of 14 nodes and 2 spares with 8 GPUs each, on the claim runs."""
    given = {"container_image": "registry.example/phalanx:0.1", "container_mounts": ("runs:/runs",), **launch}
    fleet = FleetSpec(nodes=nodes, spares=spares, workers_per_node=8)
    spec = RunSpec(name=name, run_dir=run_dir, fleet=fleet, launch=LaunchSpec(**given))
    return with_pod_run_dir(spec)


def request(**given: Any) -> PodRequest:
    """What is asked of the cluster for it."""
    return request_of(spec_of(**given), 'name = "big"\n')


def on_cpu(spec: RunSpec) -> RunSpec:
    """The run without GPUs."""
    return replace(spec, runtime=replace(spec.runtime, device="cpu"))
