"""kubeflow.org/v2beta1 MPIJob: one pod starts the ranks by ssh, the others run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydantic import JsonValue

from finetune_contract.layout import ENV_FORWARD, MPI_HOSTFILE, SSH_PORT
from finetune_operator.jobs.launchers.launcher_status import KubeflowJob, Verdict
from finetune_operator.jobs.render.manifests import metadata
from finetune_operator.jobs.render.pod_parts import Pod, Resources
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.jobs.render.templates import document
from finetune_operator.jobs.render.trainer_pod import HOME, Role, StagePods, stage_pod, trainer_command

SSH_KEYS = "/home/mpiuser/.ssh"
"""Folder of ssh keys: ssh uses the home from passwd and ignores HOME."""
CACHES = {"XDG_CACHE_HOME": f"{HOME}/.cache", "TRITON_CACHE_DIR": f"{HOME}/.triton"}
"""Cache folders: ranks started by sshd get a read-only home from passwd, so each cache is moved by its own variable."""
STARTS_RANKS = Resources(requests={"cpu": "100m", "memory": "512Mi"})
"""Resources of the launcher, which starts the ranks and waits."""


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
    """Return the launcher's pod, with the PRTE_MCA_* variables of Open MPI 5; the MPI Operator sets OMPI_MCA_* only.

    An ssh session has none of the pod's variables: `launch` forwards those of the contract and those named here.
    """
    network = {} if pods.plan.network is None else pods.plan.network.env
    forwarded = [*CACHES, *network, *(str(variable["name"]) for variable in pods.context.spec.template.env)]
    variables = {
        "PRTE_MCA_prte_default_hostfile": MPI_HOSTFILE,
        "PRTE_MCA_prte_set_default_slots": str(pods.processes_per_node),
        "PRTE_MCA_prte_keep_fqdn_hostnames": "false",
        ENV_FORWARD: ",".join(dict.fromkeys(forwarded)),
    }
    pod = stage_pod(pods, Role(home=CACHES, computes=False, env=variables))
    return replace(pod, container=replace(pod.container, resources=STARTS_RANKS))


def _worker(pods: StagePods) -> Pod:
    pod, command = stage_pod(pods, Role(home=CACHES)), trainer_command("sshd")
    server = replace(pod.container, command=command, ports={"ssh": SSH_PORT}, ready_port=SSH_PORT)
    return replace(pod, container=server)


def read(value: Mapping[str, JsonValue]) -> Verdict:
    """Read an MPIJob's status, final only with a completion time: an eviction sets `Failed` alone, and the launcher may
    still be retried.
    """
    raw = KubeflowJob.model_validate(value)
    over, started = raw.status.completion_time, raw.status.start_time
    if over is not None and (done := raw.status.condition("Succeeded")):
        return Verdict("Succeeded", done, over, started=started)
    if over is not None and (failed := raw.status.condition("Failed")):
        return Verdict("Failed", failed, over, started=started)
    return raw.underway()
