"""Objects beside those that run attempts: shared by all attempts of a job, or of one attempt."""

from __future__ import annotations

from pydantic import JsonValue

from finetune_contract.choices import Stage
from finetune_operator.jobs.render.claims import needs_workspace
from finetune_operator.jobs.render.network import ALLOWS_ANNOTATION, rules_of
from finetune_operator.jobs.render.render_types import JOB_LABEL, MANAGED_BY, Manifest, RenderContext
from finetune_operator.jobs.render.templates import TemplateName, document
from finetune_operator.jobs.render.trainer_pod import CA_FILE, RENDEZVOUS_PORT, StagePods
from finetune_operator.plan.types.names import JobNames
from finetune_operator.plan.types.plan_types import JobPlan
from finetune_operator.spec.launcher_rows import launcher
from finetune_operator.spec.types import API_VERSION, KIND


def shared(plan: JobPlan, context: RenderContext) -> tuple[Manifest, ...]:
    """Return the objects that outlive attempts: the NetworkPolicy, and a claim for the workspace if the job names none.

    The claim holds the results. Unless `storage.retain` is `delete` it has no owner reference: it outlives the job, and
    a later job of the same name reuses it as it is.
    """
    policy = (_network_policy(plan, context),) if context.settings.network_policy.enabled else ()
    if context.spec.storage.workspace is not None or not needs_workspace(context.spec):
        return policy
    requested, defaults = context.spec.storage, context.settings.defaults
    # A ReadWriteOnce claim would keep pods on other nodes from starting.
    world = plan.trainer.world
    beside = plan.launcher != "local" and launcher(plan.launcher).starter_pod is not None
    servers = 1 if plan.servers is None else plan.servers.most
    sharing = max(plan.trainer.preparation.pods, plan.predict_workers, servers)
    several = sharing > 1 or (world is not None and (world.nodes > 1 or beside))
    modes = defaults.access_modes or ("ReadWriteMany" if several else "ReadWriteOnce",)
    claim = document(
        "claim",
        metadata={
            "name": JobNames.of(plan.name).claim,
            "namespace": context.namespace,
            "labels": {**MANAGED_BY, JOB_LABEL: plan.name},
            **(owned(context) if requested.retain == "delete" else {}),
        },
        access_modes=list(modes),
        storage_class=requested.storage_class_name or defaults.storage_class_name,
        size=requested.size,
    )
    return (*policy, claim)


# ------------------------------------------------------------------------------------------------------------- objects


def metadata(pods: StagePods, name: str | None = None) -> Manifest:
    """Return `metadata` of an object of the attempt, by default of the one that runs it."""
    labels: JsonValue = dict(pods.labels)
    return {"name": name or pods.name, "namespace": pods.context.namespace, "labels": labels, **owned(pods.context)}


def owned(context: RenderContext) -> Manifest:
    """Return the owner reference to the job, so that the object is deleted with it."""
    owner = context.owner
    if owner is None:
        return {}
    # No blockOwnerDeletion: admission by OwnerReferencesPermissionEnforcement asks for a right on the job's finalizers.
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
        "annotations": {ALLOWS_ANNOTATION: rules.summary},
        **owned(context),
    }
    return document("networkpolicy", metadata=metadata, pods=rules.pods, egress=list(rules.egress))


def config_map(pods: StagePods) -> Manifest:
    """Return the ConfigMap with the files that the pods of the attempt read."""
    data: dict[str, JsonValue] = {**pods.files}
    if pods.reports_to is not None:
        data[CA_FILE] = pods.reports_to.ca_certificate
    template: TemplateName = "server_configmap" if pods.stage is Stage.SERVE else "configmap"
    return document(template, metadata=metadata(pods), data=data)


def service(pods: StagePods, name: str) -> Manifest:
    """Return the headless Service that gives the pods of the attempt addresses."""
    selector: JsonValue = dict(pods.identity)
    return document("service", metadata=metadata(pods, name), selector=selector, port=RENDEZVOUS_PORT)
