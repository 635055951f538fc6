"""What a cluster's administrator asks of the pods: the restricted Pod Security Standard, scraped ports, Secrets, and a patch of the template."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from launch.kubernetes.requests import request, spec_of
from phalanx.launch.engines.order import EngineError
from phalanx.launch.kubernetes.manifests import pod_template
from phalanx.launch.kubernetes.request import read_pod_patch, request_of
from phalanx.run.spec import ObserveSpec

ROOT = Path(__file__).parents[3]


def template(**launch: Any) -> dict[str, Any]:
    found: dict[str, Any] = pod_template(request(**launch), "word")
    return found


def container(**launch: Any) -> dict[str, Any]:
    (found,) = [one for one in template(**launch)["spec"]["containers"] if one["name"] == "agent"]
    return dict(found)


@pytest.mark.parametrize("launch", [{}, {"resources": ("rdma/hca=8",)}, {"run_as": "1234:100"}])
def test_a_pod_keeps_the_restricted_pod_security_standard(launch: dict[str, Any]) -> None:
    """kubernetes.io/docs/concepts/security/pod-security-standards, restricted."""
    pod, own = template(**launch)["spec"]["securityContext"], container(**launch)["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_an_image_that_runs_as_root_is_said_to() -> None:
    assert template(run_as="0")["spec"]["securityContext"]["runAsNonRoot"] is False


def test_the_pod_monitor_selects_the_pods_and_scrapes_ports_that_they_declare() -> None:
    monitor = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "pod-monitor.yaml").read_text())["spec"]
    spec = dataclasses.replace(spec_of(), observe=ObserveSpec(metrics_port=9500))
    pod: dict[str, Any] = pod_template(request_of(spec, ""), "word")
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports.keys()
    assert (ports["metrics-fleet"], ports["metrics-node"]) == (9500, 9501)
    assert all(len(name) <= 15 for name in ports)


def test_a_variable_without_a_value_comes_from_the_secret_and_no_manifest_has_it() -> None:
    own = container(environment=("NCCL_DEBUG=INFO", "WANDB_API_KEY"), secrets="tracker-keys")
    variables = {one["name"]: one for one in own["env"]}
    reference = {"secretKeyRef": {"name": "tracker-keys", "key": "WANDB_API_KEY"}}
    assert variables["WANDB_API_KEY"] == {"name": "WANDB_API_KEY", "valueFrom": reference}
    assert variables["NCCL_DEBUG"]["value"] == "INFO"
    assert own["envFrom"] == [{"secretRef": {"name": "tracker-keys"}}]


PATCH = {
    "metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"}},
    "spec": {
        "runtimeClassName": "nvidia",
        "hostNetwork": True,
        "securityContext": {"fsGroup": None},
        "tolerations": [
            {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 30}
        ],
        "containers": [
            {
                "name": "agent",
                "resources": {"limits": {"cpu": "64"}},
                "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
            },
            {"name": "sidecar", "image": "registry.example/sidecar:1"},
        ],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
    },
}


@pytest.mark.parametrize("form", ["json", "toml"])
def test_a_patch_is_merged_into_the_template_and_the_pod_stays_valid(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"patch.{form}"
    path.write_text(
        json.dumps(PATCH)
        if form == "json"
        else '[metadata.annotations]\n"k8s.v1.cni.cncf.io/networks" = "rdma-net"\n'
    )
    launch = {
        "pod_patch": str(path),
        "tolerations": ("dedicated=training:NoSchedule",),
        "resources": ("cpu=64",),
    }
    pod = template(**launch)
    assert pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rdma-net"
    if form == "toml":
        return
    agent, sidecar = pod["spec"]["containers"]
    assert (agent["name"], sidecar["name"], pod["spec"]["runtimeClassName"]) == ("agent", "sidecar", "nvidia")
    assert agent["resources"]["requests"]["cpu"] == agent["resources"]["limits"]["cpu"] == "64"
    assert [mount["name"] for mount in agent["volumeMounts"]][-1] == "scratch"
    assert len(pod["spec"]["tolerations"]) == 2
    assert "fsGroup" not in pod["spec"]["securityContext"]
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", **pod["metadata"]},
        "spec": pod["spec"],
    }
    kubernetes_validate.validate(body, "1.33", strict=True)


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy"),
        ({"spec": {"containers": [{"name": "agent", "command": ["sh"]}]}}, "spec.containers.agent.command"),
        ({"metadata": {"labels": {"phalanx.run/name": "x"}}}, "metadata.labels.phalanx.run/name"),
        ({"metadata": []}, "metadata.labels.phalanx.run/name"),
        ({"metadata": {"labels": None}}, "metadata.labels.phalanx.run/name"),
        ({"spec": None}, "spec.restartPolicy"),
        ({"spec": 1}, "spec.restartPolicy"),
        ({"spec": {"containers": None}}, "spec.containers.agent"),
        ({"spec": {"containers": {"agent": 1}}}, "spec.containers.agent"),
        ({"replicas": 3}, "other fields than metadata and spec"),
    ],
)
def test_a_patch_of_what_a_fleet_rests_on_is_refused(tmp_path: Path, patch: object, field: str) -> None:
    path = tmp_path / "patch.json"
    path.write_text(json.dumps(patch))
    with pytest.raises(EngineError, match=f"launch.pod_patch: .*{field}"):
        request(pod_patch=str(path))


def test_an_entry_whose_name_is_no_text_is_left_to_the_api_server(tmp_path: Path) -> None:
    path = tmp_path / "patch.json"
    path.write_text(json.dumps({"spec": {"containers": [{"name": ["agent"]}]}}))
    assert template(pod_patch=str(path))["spec"]["containers"][1:] == [{"name": ["agent"]}]


def test_the_job_and_the_run_directory_have_one_digest() -> None:
    asked = request(name="big run")
    assert asked.run_dir.rpartition("-")[2] == asked.name.rpartition("-")[2]
    assert request(run_dir="/runs/mine").name != request(run_dir="/runs/other").name


def test_a_patch_behind_a_link_is_read(tmp_path: Path) -> None:
    (tmp_path / "patch.toml").write_text("[metadata.annotations]\nteam = 'a'\n")
    (tmp_path / "link.toml").symlink_to(tmp_path / "patch.toml")
    assert read_pod_patch(tmp_path / "link.toml") == {"metadata": {"annotations": {"team": "a"}}}
