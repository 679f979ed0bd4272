"""The real Spark Operator as a process of this machine, with the rights granted by its own chart.

It submits drivers with the `spark-submit` of PySpark. Nodes are those of the stand-in kubelet: a driver follows its
script, so there are no executors.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from cluster_support.api_access import kubeconfig_text, new_session, wait_until
from cluster_support.control_plane import Cluster, assets_folder, free_port
from suite_plugins.patience import patient

_NAMESPACE, _RELEASE = "spark-operator", "spark-operator"
_RIGHTS = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}


@contextmanager
def running_spark_operator(cluster: Cluster, folder: Path) -> Iterator[Path]:
    """Run it and yield its log; skip if its program, its chart, Helm, Java or PySpark are missing."""
    cluster.own("the Spark Operator's rights over all namespaces")
    program, spark = _program(), _spark_home()
    account = _install(cluster)
    token = cluster.must("create", "token", account, "-n", _NAMESPACE, "--duration=12h").strip()
    access, kubeconfig, log = cluster.access, folder / "spark-operator.kubeconfig", folder / "spark-operator.log"
    kubeconfig.write_text(kubeconfig_text(access.host, str(access.ca) if access.ca else None, token, _NAMESPACE))
    address, probe = urlsplit(access.host), free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "SPARK", "PYSPARK"))},
        "KUBECONFIG": str(kubeconfig),
        "KUBERNETES_SERVICE_HOST": str(address.hostname),
        "KUBERNETES_SERVICE_PORT": str(address.port),
        "SPARK_HOME": str(spark),
    }
    command = [str(program), "controller", "start", f"--health-probe-bind-address=127.0.0.1:{probe}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=folder
        )

    def ready() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        return new_session().get(f"http://127.0.0.1:{probe}/readyz", timeout=patient(5)).status_code == 200

    try:
        wait_until(ready, "the Spark Operator is ready", detail=lambda: log.read_text(errors="replace")[-4000:])
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(patient(60))


def _program() -> Path:
    program = assets_folder() / "images" / "spark-operator" / "bin" / "spark-operator"
    if not program.is_file():
        pytest.skip("KUBEBUILDER_ASSETS has no Spark Operator; `kube-assets/build spark-operator` builds it")
    return program


def _spark_home() -> Path:
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None or shutil.which("java") is None:
        pytest.skip("the Spark Operator submits with spark-submit, which needs PySpark and Java")
    return Path(found.origin).parent


def _install(cluster: Cluster) -> str:
    """Install its CRDs and its chart's accounts and roles for all namespaces; return the controller's account."""
    assets = assets_folder()
    chart, helm = assets / "charts" / "spark-operator", shutil.which("helm", path=f"{assets}:{os.environ['PATH']}")
    if helm is None or not chart.is_dir():
        pytest.skip("KUBEBUILDER_ASSETS has no Helm, or not the Spark Operator's chart")
    command = [helm, "template", _RELEASE, str(chart), "--namespace", _NAMESPACE, "--set", "spark.jobNamespaces={}"]
    rendered = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
    assert rendered.returncode == 0, rendered.stderr
    documents = [each for each in yaml.safe_load_all(rendered.stdout) if each and each["kind"] in _RIGHTS]
    kinds = sorted((chart / "crds").glob("*.yaml"))
    cluster.must("apply", "--server-side", "--force-conflicts", *(f"--filename={path}" for path in kinds))
    cluster.wait_served(*(yaml.safe_load(path.read_text())["metadata"]["name"] for path in kinds))
    cluster.must("create", "namespace", _NAMESPACE)
    cluster.must("apply", "-f", "-", stdin="\n---\n".join(json.dumps(each) for each in documents))
    return f"{_RELEASE}-controller"
