"""A stand-in for a cluster's API server: keeps objects and answers kubectl, decides nothing and runs no pod."""

from __future__ import annotations

import json
import re
import shutil
import threading
import uuid
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlparse

import yaml

KINDS = {
    "v1": {
        "pods": "Pod",
        "secrets": "Secret",
        "configmaps": "ConfigMap",
        "persistentvolumeclaims": "PersistentVolumeClaim",
    },
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "jobset.x-k8s.io/v1alpha2": {"jobsets": "JobSet"},
    "kueue.x-k8s.io/v1beta2": {"localqueues": "LocalQueue", "workloads": "Workload"},
    "batch.volcano.sh/v1alpha1": {"jobs": "Job"},
}
_PATH = re.compile(
    r"/(?:api|apis)/(?P<version>v1|[^/]+/[^/]+)/namespaces/(?P<namespace>[^/]+)/(?P<plural>\w+)(?:/(?P<name>[^/]+))?(?:/(?P<part>\w+))?"
)


def missing() -> str:
    """What keeps the tests from asking a real kubectl; empty if nothing does."""
    return "" if shutil.which("kubectl") else "kubectl is not installed"


@dataclass
class ApiServer:
    """The objects of a cluster, and how to reach it."""

    port: int
    kubeconfig: Path
    objects: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    """By plural, namespace and name."""
    refuse: dict[str, str] = field(default_factory=dict)
    """What admission says to new objects of a kind."""
    unknown: set[str] = field(default_factory=set)
    """Groups that are not installed."""
    logs: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Method and path of every request that changes something."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a kubectl of this cluster."""
        return {"KUBECONFIG": str(self.kubeconfig), "HOME": str(self.kubeconfig.parent)}

    def add(self, plural: str, name: str, namespace: str = "default", **parts: Any) -> dict[str, Any]:
        """Puts an object there, as a controller or an administrator does."""
        metadata = {"name": name, "namespace": namespace, **parts.pop("metadata", {})}
        version, kind = next((one, kinds[plural]) for one, kinds in KINDS.items() if plural in kinds)
        found = {"apiVersion": version, "kind": kind, "metadata": metadata, **parts}
        self.objects[plural, namespace, name] = found
        return found

    def of(self, plural: str) -> list[dict[str, Any]]:
        """All objects of a kind."""
        return [one for (kind, _, _), one in self.objects.items() if kind == plural]


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """An API server that listens on loopback as long as the context lasts."""

    class Handler(_Handler):
        cluster: ClassVar[ApiServer]

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "x", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "", "namespace": "default"}}],
        "current-context": "x",
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    Handler.cluster = ApiServer(server.server_port, folder / "kubeconfig")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Handler.cluster
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    cluster: ClassVar[ApiServer]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _say(self, code: int, body: Any, kind: str = "application/json") -> None:
        raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _refuse(self, code: int, reason: str, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
        self._say(code, {**status, "reason": reason, "message": message})

    def _body(self) -> dict[str, Any]:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        read: dict[str, Any] = yaml.safe_load(text) or {}
        return read

    def _discovery(self, path: str) -> bool:
        versions = [one for one in KINDS if one.split("/")[0] not in self.cluster.unknown]
        groups = [one.split("/") for one in versions if "/" in one]
        if path == "/api":
            self._say(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            listed = []
            for group, version in groups:
                one = {"groupVersion": f"{group}/{version}", "version": version}
                listed.append({"name": group, "versions": [one], "preferredVersion": one})
            self._say(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed})
        elif (version := re.sub("^/apis?/", "", path)) in versions:
            kinds = KINDS[version]
            verbs = ["create", "get", "list", "patch", "delete", "deletecollection", "watch"]
            found = [
                {
                    "name": plural,
                    "singularName": kind.lower(),
                    "namespaced": True,
                    "kind": kind,
                    "verbs": verbs,
                }
                for plural, kind in kinds.items()
            ]
            self._say(200, {"kind": "APIResourceList", "groupVersion": version, "resources": found})
        elif path.startswith("/openapi/v3"):
            self._openapi(path.removeprefix("/openapi/v3").strip("/"), versions)
        else:
            return False
        return True

    def _openapi(self, which: str, versions: list[str]) -> None:
        """Says that the server validates fields itself, which kubectl asks for before it leaves that to the server."""
        roots = {("api/v1" if one == "v1" else f"apis/{one}"): one for one in versions}
        if not which:
            self._say(200, {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots}})
            return
        group, _, version = roots[which].rpartition("/")
        paths = {
            f"/{which}/namespaces/{{namespace}}/{plural}/{{name}}": {
                "patch": {
                    "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                    "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind},
                    "responses": {},
                }
            }
            for plural, kind in KINDS[roots[which]].items()
        }
        self._say(200, {"openapi": "3.0.0", "info": {"title": "x", "version": "1"}, "paths": paths})

    def _where(self) -> tuple[str, str, str, str, dict[str, list[str]]] | None:
        url = urlparse(self.path)
        match = _PATH.fullmatch(url.path)
        if match is None:
            self._refuse(404, "NotFound", "the server could not find the requested resource")
            return None
        return (
            match["plural"],
            match["namespace"],
            match["name"] or "",
            match["part"] or "",
            parse_qs(url.query),
        )

    def do_GET(self) -> None:
        if self._discovery(urlparse(self.path).path) or (where := self._where()) is None:
            return
        plural, namespace, name, part, query = where
        if part == "exec":
            self._exec(query)
        elif part == "log":
            self._say(200, self.cluster.logs.get(name, ""), "text/plain")
        elif name:
            found = self.cluster.objects.get((plural, namespace, name))
            if found is None:
                self._refuse(404, "NotFound", f'{plural} "{name}" not found')
            else:
                self._say(200, found)
        else:
            items = [
                one
                for (kind, space, _), one in self.cluster.objects.items()
                if (kind, space) == (plural, namespace) and _matches(one, query)
            ]
            kind = next(kinds[plural] for kinds in KINDS.values() if plural in kinds)
            self._say(200, {"apiVersion": "v1", "kind": f"{kind}List", "metadata": {}, "items": items})

    def _exec(self, query: dict[str, list[str]]) -> None:
        """Tells the words of a command that was to run in a pod, by the WebSocket protocol that kubectl speaks (KEP-4006): channel 1 is output, 3 its end."""
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", b64encode(sha1(key.encode()).digest()).decode())
        self.send_header("Sec-WebSocket-Protocol", "v5.channel.k8s.io")
        self.end_headers()
        said = f"{query['container'][0]} runs {' '.join(query['command'])}\n".encode()
        end = json.dumps({"apiVersion": "v1", "kind": "Status", "status": "Success"}).encode()
        for message in (b"\x01" + said, b"\x03" + end):
            self.wfile.write(bytes([0x82, 126]) + len(message).to_bytes(2, "big") + message)
        self.wfile.write(bytes([0x88, 2]) + (1000).to_bytes(2, "big"))
        self.close_connection = True

    def do_POST(self) -> None:
        where = self._where()
        if where is None:
            return
        plural, namespace, _, _, query = where
        given = self._body()
        self._keep(plural, namespace, given, query, new=True)

    def do_PATCH(self) -> None:
        where = self._where()
        if where is None:
            return
        plural, namespace, _, _, query = where
        self._keep(plural, namespace, self._body(), query, new=False)

    def _keep(
        self, plural: str, namespace: str, given: dict[str, Any], query: dict[str, list[str]], *, new: bool
    ) -> None:
        name = given["metadata"]["name"]
        if given["kind"] in self.cluster.refuse:
            self._refuse(403, "Forbidden", self.cluster.refuse[given["kind"]])
            return
        if new and (plural, namespace, name) in self.cluster.objects:
            self._refuse(409, "AlreadyExists", f'{plural} "{name}" already exists')
            return
        given["metadata"] |= {"namespace": namespace, "uid": str(uuid.uuid4())}
        if "dryRun" not in query:
            self.cluster.asked.append(f"{self.command} {plural}/{name}")
            self.cluster.objects[plural, namespace, name] = given
        self._say(201 if new else 200, given)

    def do_DELETE(self) -> None:
        where = self._where()
        if where is None:
            return
        self._body()
        plural, namespace, name, _, query = where
        gone = [
            key
            for key, one in self.cluster.objects.items()
            if key[:2] == (plural, namespace) and (key[2] == name if name else _matches(one, query))
        ]
        if name and not gone:
            self._refuse(404, "NotFound", f'{plural} "{name}" not found')
            return
        self.cluster.asked.append(f"DELETE {plural}/{name}")
        for key in gone:
            uid = self.cluster.objects.pop(key)["metadata"].get("uid", "")
            for other, one in list(self.cluster.objects.items()):  # as the garbage collector does
                if uid and uid in {owner["uid"] for owner in one["metadata"].get("ownerReferences", [])}:
                    del self.cluster.objects[other]
        self._say(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})


def _matches(one: dict[str, Any], query: dict[str, list[str]]) -> bool:
    wanted = dict(part.split("=", 1) for part in query.get("labelSelector", [""])[0].split(",") if part)
    labels = one["metadata"].get("labels", {})
    fields = query.get("fieldSelector", [""])[0]
    named = not fields or fields == f"metadata.name={one['metadata']['name']}"
    return named and all(labels.get(key) == value for key, value in wanted.items())
