"""A git host as a pod of the cluster, over HTTPS with its own certificate authority, as in companies.

Its Service listens at 443, so that repositories have the usual form: https://HOST/NAME.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from box_support.servers import server, way_to
from box_support.team import Team
from cluster_support import self_signed
from cluster_support.api_access import Object, path_of, wait_until

SERVER = Path(__file__).parents[1] / "script_support" / "git_server.py"
NAME = "git"
PORT = 8443
AUTHORITY = "git-authority"
"""ConfigMap in the team's namespace with the certificate of the host's authority."""
TEMPLATE: Object = {
    "env": [{"name": "GIT_SSL_CAINFO", "value": "/mnt/git-authority/ca.crt"}],
    "volumes": [{"name": AUTHORITY, "configMap": {"name": AUTHORITY}}],
    "volumeMounts": [{"name": AUTHORITY, "mountPath": "/mnt/git-authority", "readOnly": True}],
}
"""`spec.template` of a job that makes git trust the host."""


@contextmanager
def git_pod(team: Team, host: str, repositories: Mapping[str, Mapping[str, str]], folder: Path) -> Iterator[None]:
    """Serve repositories (name -> file name -> text), each of one commit, as `host` (git.NAMESPACE.svc); `folder` is
    for its certificate.
    """
    namespace = host.split(".")[1]
    pair = self_signed.for_hosts(folder, "git", names=(host,))
    wait_until(lambda: not _ending(team, namespace), f"the namespace {namespace} of an earlier host is gone")
    team.box.kubectl("apply", "-f", "-", stdin=yaml.safe_dump({"apiVersion": "v1", "kind": "Namespace",
                                                               "metadata": {"name": namespace}}))  # fmt: skip
    where = ("-n", namespace)
    secret = {"tls.crt": pair.certificate.read_text(), "tls.key": pair.key.read_text()}
    team.box.kubectl("apply", *where, "-f", "-", stdin=yaml.safe_dump_all(_server(repositories, secret)))
    authority = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": AUTHORITY}}
    team.apply_manifest(
        {**authority, "data": {"ca.crt": secret["tls.crt"]}}, way_to(NAME, namespace, PORT, team.namespace)
    )
    team.box.kubectl("wait", "--for=condition=Ready", *where, f"pod/{NAME}", "--timeout=120s", seconds=150)
    try:
        yield
    finally:
        team.box.kubectl("delete", "-n", team.namespace, f"configmap/{AUTHORITY}", f"networkpolicy/{NAME}")
        team.box.kubectl("delete", "namespace", namespace, "--wait=false")


def _ending(team: Team, namespace: str) -> bool:
    found = team.box.api.get(path_of("v1", "namespaces", name=namespace)) or {"metadata": {}}
    return "deletionTimestamp" in found["metadata"]


def _server(repositories: Mapping[str, Mapping[str, str]], secret: Mapping[str, str]) -> list[Object]:
    options = ["--certificate", "/tls/tls.crt", "--key", "/tls/tls.key"]
    volumes: dict[str, Object] = {"tls": {"secret": {"secretName": NAME}}}
    objects: list[Object] = []
    for name, files in repositories.items():
        volume = f"repository-{name}"
        options += ["--commit", f"{name}=/{volume}"]
        volumes[volume] = {"configMap": {"name": volume}}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": volume}, "data": dict(files)})
    return [*objects, *server(NAME, SERVER, options, secret, port=PORT, service_port=443, volumes=volumes)]
