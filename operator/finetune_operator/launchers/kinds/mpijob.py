"""kubeflow.org/v2beta1 MPIJob: one pod starts the ranks by ssh, the others run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydantic import JsonValue

from finetune_contract.layout import ENV_FORWARD, MPI_HOSTFILE, SSH_PORT
from finetune_operator.launchers.kinds.launcher_status import KubeflowJob, Verdict
from finetune_operator.rendering.manifests import metadata
from finetune_operator.rendering.pod_parts import Pod, Resources
from finetune_operator.rendering.render_types import Manifest
from finetune_operator.rendering.templates import document
from finetune_operator.rendering.trainer_pod import HOME, Role, StagePods, stage_pod

SSH_KEYS = "/home/mpiuser/.ssh"
"""ssh looks for keys in the home that passwd names for the user, whatever HOME says."""
CACHES = {"XDG_CACHE_HOME": f"{HOME}/.cache", "TRITON_CACHE_DIR": f"{HOME}/.triton"}
"""Ranks that sshd starts get their home from passwd, which is read-only: each cache is moved by its own name."""
STARTS_RANKS = Resources(requests={"cpu": "100m", "memory": "512Mi"})
"""The launcher starts the ranks and waits."""


def render(pods: StagePods) -> tuple[Manifest, ...]:
    made = document(
        "mpijob",
        metadata=metadata(pods),
        nodes=pods.nodes,
        processes_per_node=pods.processes_per_node,
        ssh_path=SSH_KEYS,
        launcher=_launcher(pods).manifest(),
        worker=_worker(pods).manifest(),
    )
    return (made,)


def _launcher(pods: StagePods) -> Pod:
    """Open MPI 5 (PRRTE) reads other names than Open MPI 4; the MPI Operator sets OMPI_MCA_* and not these.

    A session of ssh has none of the pod's variables: `launch` passes those of the contract on, and those named here.
    """
    forwarded = [*CACHES, *(str(variable["name"]) for variable in pods.context.spec.template.env)]
    variables = {
        "PRTE_MCA_prte_default_hostfile": MPI_HOSTFILE,
        "PRTE_MCA_prte_set_default_slots": str(pods.processes_per_node),
        "PRTE_MCA_prte_keep_fqdn_hostnames": "false",
        ENV_FORWARD: ",".join(dict.fromkeys(forwarded)),
    }
    pod = stage_pod(pods, Role(home=CACHES, computes=False, env=variables))
    return replace(pod, container=replace(pod.container, resources=STARTS_RANKS))


def _worker(pods: StagePods) -> Pod:
    pod, command = stage_pod(pods, Role(home=CACHES)), ("python", "-m", "finetune_trainer", "sshd")
    server = replace(pod.container, command=command, ports={"ssh": SSH_PORT}, ready_port=SSH_PORT)
    return replace(pod, container=server)


def read(value: Mapping[str, JsonValue]) -> Verdict:
    """It is over when it says so and has a completion time: an eviction sets `Failed` alone, and the launcher may still
    be tried again.
    """
    raw = KubeflowJob.model_validate(value)
    over, started = raw.status.completion_time, raw.status.start_time
    if over is not None and (done := raw.status.condition("Succeeded")):
        return Verdict("Succeeded", done, over, started=started)
    if over is not None and (failed := raw.status.condition("Failed")):
        return Verdict("Failed", failed, over, started=started)
    return raw.underway()
