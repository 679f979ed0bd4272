"""A stand-in for KServe's controller in Standard mode: an InferenceService gets a Deployment and a Service.

Names, labels and fields passed on to pods are those of KServe 0.20 (`pkg/controller/v1beta1/inferenceservice`). Its
webhooks, finalizer and ingresses are left out; the real one runs in tests/e2e/cluster.
"""

from __future__ import annotations

import copy

from cluster_support.api_access import APPLY, MERGE, AsyncApi, Object, path_of
from cluster_support.background import Background

VERSION, PLURAL, KIND = "serving.kserve.io/v1beta1", "inferenceservices", "InferenceService"
LABEL = "serving.kserve.io/inferenceservice"
SCALER = "serving.kserve.io/autoscalerClass"
_OWN = ("minReplicas", "maxReplicas", "deploymentStrategy", "labels", "annotations")
_APPLIED = "?fieldManager=kserve&force=true"


class KServe:
    """Level-triggered: any change of an InferenceService or its Deployment applies its objects or its status again."""

    def __init__(self, api: AsyncApi, background: Background) -> None:
        self._api = api
        self._background = background

    def up(self) -> None:
        """Start; without the CRD there is nothing to follow."""
        self._background.start(self._watch_services())
        self._background.start(self._watch_deployments())

    async def _watch_services(self) -> None:
        async for there, service in self._api.follow(path_of(VERSION, PLURAL)):
            if there and not service["metadata"].get("deletionTimestamp"):
                for made in (deployment_of(service), service_of(service)):
                    await self._apply(made)

    async def _watch_deployments(self) -> None:
        async for there, found in self._api.follow(path_of("apps/v1", "deployments"), {"labelSelector": LABEL}):
            if there:
                await self._update_status(found)

    async def _apply(self, made: Object) -> None:
        plural = f"{made['kind'].lower()}s"
        meta = made["metadata"]
        path = path_of(made["apiVersion"], plural, meta["namespace"], meta["name"])
        await self._api.quietly("PATCH", f"{path}{_APPLIED}", made, APPLY)

    async def _update_status(self, deployment: Object) -> None:
        meta, status = deployment["metadata"], deployment.get("status", {})
        available = status.get("availableReplicas", 0)
        ready = {"type": "PredictorReady", "status": "True" if available else "Unknown"}
        name, namespace = meta["labels"][LABEL], meta["namespace"]
        reported = {"conditions": [ready], "url": f"http://{name}-{namespace}.example.com"}
        path = path_of(VERSION, PLURAL, namespace, name, "status")
        await self._api.quietly("PATCH", path, {"status": reported}, MERGE)


def _meta(service: Object) -> Object:
    meta, predictor = service["metadata"], service["spec"]["predictor"]
    owner = {"apiVersion": VERSION, "kind": KIND, "name": meta["name"], "uid": meta["uid"], "controller": True}
    name = f"{meta['name']}-predictor"
    own = {LABEL: meta["name"], "component": "predictor", "app": f"isvc.{name}"}
    return {
        "name": name,
        "namespace": meta["namespace"],
        "labels": {**meta.get("labels", {}), **predictor.get("labels", {}), **own},
        "annotations": {**meta.get("annotations", {}), **predictor.get("annotations", {})},
        "ownerReferences": [owner],
    }


def deployment_of(service: Object) -> Object:
    """Return the Deployment of an InferenceService."""
    predictor, meta = copy.deepcopy(service["spec"]["predictor"]), _meta(service)
    pod = {name: value for name, value in predictor.items() if name not in _OWN}
    fixed = meta["annotations"].get(SCALER) == "none"
    about = {"labels": meta["labels"], "annotations": meta["annotations"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": {
            **({"replicas": predictor["minReplicas"]} if fixed else {}),
            "selector": {"matchLabels": {"app": meta["labels"]["app"]}},
            "strategy": predictor["deploymentStrategy"],
            "template": {"metadata": about, "spec": pod},
        },
    }


def service_of(service: Object) -> Object:
    """Return the Service of an InferenceService."""
    meta = _meta(service)
    (port,) = service["spec"]["predictor"]["containers"][0]["ports"]
    ports = [{"name": port["name"], "port": 80, "targetPort": port["containerPort"], "protocol": "TCP"}]
    spec = {"selector": {"app": meta["labels"]["app"]}, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}
