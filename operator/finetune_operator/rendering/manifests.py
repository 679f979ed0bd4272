"""From a plan to the Kubernetes objects that run it, in the order in which they have to be created.

Pure: the operator creates what these functions return and `finetune render` prints it. Refused with PlanRefused is what
validation refuses too: a launcher or a stage that cannot be rendered, a URI that names no claim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from pydantic import JsonValue

from finetune_contract.choices import Stage
from finetune_operator.api.problems import Problem, describe_value
from finetune_operator.api.types import API_VERSION, KIND
from finetune_operator.planning.names import JobNames
from finetune_operator.planning.types import JobPlan, PlanRefused
from finetune_operator.rendering.network import ALLOWS_ANNOTATION, rules_of
from finetune_operator.rendering.pods import CONTAINER_NAME
from finetune_operator.rendering.spot import first_capacity
from finetune_operator.rendering.templates import document
from finetune_operator.rendering.trainer_pod import (
    CA_FILE,
    PYTORCHJOB_PORT,
    RENDEZVOUS_PORT,
    SSH_KEYS,
    StagePods,
    spark_arguments,
    spark_driver,
    spark_executor,
    spark_image,
    stage_pod,
)
from finetune_operator.rendering.types import JOB_LABEL, MANAGED_BY, Attempt, Manifest, RenderContext


def render(plan: JobPlan, context: RenderContext) -> tuple[Manifest, ...]:
    """Everything that a job without a failure needs: what is shared, then the first attempt of every stage in order."""
    attempts = [Attempt(each, capacity=first_capacity(context.spec, each)) for each in plan.stages]
    stages = [stage(plan, context, attempt) for attempt in attempts]
    return (*shared(plan, context), *(manifest for made in stages for manifest in made))


def shared(plan: JobPlan, context: RenderContext) -> tuple[Manifest, ...]:
    """What outlives attempts: the rules for the pods' network, and the claim for the workspace when the job names none.

    The claim belongs to nobody, as it holds the results: deleting the job leaves it, and a later job of the same name
    takes it up again.
    """
    policy = (_network_policy(plan, context),) if context.settings.network_policy.enabled else ()
    if context.spec.storage.workspace is not None:
        return policy
    asked, defaults = context.spec.storage, context.settings.defaults
    # A claim that one node at a time may attach would keep the other pods from starting. The launcher of an MPIJob is
    # one more pod beside its workers.
    world = plan.trainer.world
    several = plan.trainer.preparation.pods > 1 or (
        world is not None and (world.nodes > 1 or plan.launcher == "mpijob")
    )
    modes = defaults.access_modes or ("ReadWriteMany" if several else "ReadWriteOnce",)
    claim = document(
        "claim",
        metadata={
            "name": JobNames.of(plan.name).claim,
            "namespace": context.namespace,
            "labels": {**MANAGED_BY, JOB_LABEL: plan.name},
        },
        access_modes=list(modes),
        storage_class=asked.storage_class_name or defaults.storage_class_name,
        size=asked.size,
    )
    return (*policy, claim)


def stage(plan: JobPlan, context: RenderContext, attempt: Attempt) -> tuple[Manifest, ...]:
    """One attempt of a stage: its ConfigMap, a Service where its pods look for each other, and last what runs them."""
    pods = StagePods(plan, context, attempt)
    if attempt.stage is Stage.SERVE:
        raise _refused("spec.endpoint", None, "servers cannot be rendered yet", "leave it out")
    if attempt.stage is Stage.PREPARE and plan.trainer.preparation.engine == "spark":
        return (_config_map(pods), _sparkapplication(pods))
    if attempt.stage is not Stage.TRAIN:
        return (_config_map(pods), _job(pods))
    match plan.launcher:
        case "pytorchjob":
            return (_config_map(pods), _pytorchjob(pods))
        case "mpijob":
            return (_config_map(pods), _mpijob(pods))
        case "job" if pods.service is not None:
            return (_config_map(pods), _service(pods, pods.service), _job(pods))
        case "job":
            return (_config_map(pods), _job(pods))
        case "trainjob" | "jobset" | "local":
            rule, way_out = "it cannot be rendered", "set launcher to pytorchjob, mpijob or job"
            raise _refused("spec.launcher", plan.launcher, rule, way_out)
        case _:
            assert_never(plan.launcher)


def _refused(field: str, value: str | None, rule: str, way_out: str) -> PlanRefused:
    shown = None if value is None else describe_value(value, field.split("."))
    return PlanRefused((Problem(field, shown, rule, way_out, reason="NotYetSupported"),))


# ------------------------------------------------------------------------------------------------------------- objects


def _metadata(pods: StagePods, name: str) -> dict[str, JsonValue]:
    metadata: dict[str, JsonValue] = {
        "name": name,
        "namespace": pods.context.namespace,
        "labels": dict(pods.labels),
    }
    return {**metadata, **_owned(pods.context)}


def _owned(context: RenderContext) -> Manifest:
    """The reference to the job, by which an object goes with it."""
    owner = context.owner
    if owner is None:
        return {}
    # Without blockOwnerDeletion: where owner references are policed, it needs a right on the job's finalizers.
    reference: JsonValue = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
    }
    return {"ownerReferences": [reference]}


def _network_policy(plan: JobPlan, context: RenderContext) -> Manifest:
    rules = rules_of(plan.name, context)
    metadata: Manifest = {
        "name": JobNames.of(plan.name).network_policy,
        "namespace": context.namespace,
        "labels": {**MANAGED_BY, **context.job_labels(plan.name)},
        "annotations": {ALLOWS_ANNOTATION: rules.words},
        **_owned(context),
    }
    return document("networkpolicy", metadata=metadata, pods=rules.pods, egress=list(rules.egress))


def _config_map(pods: StagePods) -> Manifest:
    data: dict[str, JsonValue] = {**pods.files}
    if pods.context.progress is not None:
        data[CA_FILE] = pods.context.progress.ca_certificate
    return document("configmap", metadata=_metadata(pods, pods.name), data=data)


def _service(pods: StagePods, name: str) -> Manifest:
    selector: JsonValue = dict(pods.identity)
    return document("service", metadata=_metadata(pods, name), selector=selector, port=RENDEZVOUS_PORT)


def _job(pods: StagePods) -> Manifest:
    return document(
        "job",
        metadata=_metadata(pods, pods.name),
        nodes=pods.nodes,
        container=CONTAINER_NAME,
        # Of pods that prepare, the first ends well once all is done, whoever did it; of a gang each one's end counts.
        first_pod_decides=pods.stage is Stage.PREPARE and pods.plan.trainer.preparation.engine == "job",
        pod=replace(stage_pod(pods), subdomain=pods.service).manifest(),
    )


def _pytorchjob(pods: StagePods) -> Manifest:
    pod = stage_pod(pods)
    return document(
        "pytorchjob",
        metadata=_metadata(pods, pods.name),
        nodes=pods.nodes,
        processes_per_node=str(pods.processes_per_node),
        pod=replace(pod, container=replace(pod.container, ports=PYTORCHJOB_PORT)).manifest(),
    )


def _mpijob(pods: StagePods) -> Manifest:
    return document(
        "mpijob",
        metadata=_metadata(pods, pods.name),
        nodes=pods.nodes,
        processes_per_node=pods.processes_per_node,
        ssh_path=SSH_KEYS,
        launcher=stage_pod(pods, "mpi-launcher").manifest(),
        worker=stage_pod(pods, "mpi-worker").manifest(),
    )


def _sparkapplication(pods: StagePods) -> Manifest:
    return document(
        "sparkapplication",
        metadata=_metadata(pods, pods.name),
        image=spark_image(pods),
        arguments=list(spark_arguments(pods)),
        container=CONTAINER_NAME,
        executors=pods.plan.trainer.preparation.workers,
        driver=spark_driver(pods).manifest(),
        executor=spark_executor(pods).manifest(),
    )
