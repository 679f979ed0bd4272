"""A stand-in for the Spark Operator: a SparkApplication gets its driver's pod, and a status as from the real one.

States, labels and the driver's name are those of the Kubeflow Spark Operator 2 (`internal/controller/sparkapplication`
and `api/v1beta2/sparkapplication_types.go` there). There is no Spark here, and so there are no executors, which the
driver would create.
"""

from __future__ import annotations

import asyncio
import copy

from cluster_support.api_access import MERGE, AsyncApi, Object, path_of
from cluster_support.background import Background
from cluster_support.kubelet import now

_VERSION, _PLURAL = "sparkoperator.k8s.io/v1beta2", "sparkapplications"
_APP_LABEL = "sparkoperator.k8s.io/app-name"
REFUSED = "example.com/submission-refused"
"""Annotation of a driver that cannot be submitted, with the reason."""
_ENDS = ("COMPLETED", "FAILED")


class SparkOperator:
    """Level-triggered: any change of an application or its driver reconciles both."""

    def __init__(self, api: AsyncApi, background: Background) -> None:
        self._api = api
        self._background = background
        self._applications: dict[str, Object] = {}
        self._drivers: dict[str, Object] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def up(self) -> None:
        """Start; without the CRD there is nothing to follow."""
        self._background.start(self._watch_applications())
        self._background.start(self._watch_drivers())

    async def _watch_applications(self) -> None:
        async for there, application in self._api.follow(path_of(_VERSION, _PLURAL)):
            uid = application["metadata"]["uid"]
            if there and not application["metadata"].get("deletionTimestamp"):
                self._applications[uid] = application
                self._background.spawn(self._look(uid))
            else:
                self._applications.pop(uid, None)

    async def _watch_drivers(self) -> None:
        async for there, pod in self._api.follow(path_of("v1", "pods"), {"labelSelector": "spark-role=driver"}):
            for owner in pod["metadata"].get("ownerReferences", []):
                if there:
                    self._drivers[owner["uid"]] = pod
                else:
                    self._drivers.pop(owner["uid"], None)
                self._background.spawn(self._look(owner["uid"]))

    async def _look(self, uid: str) -> None:
        async with self._locks.setdefault(uid, asyncio.Lock()):
            application = self._applications.get(uid)
            if application is None or application["spec"].get("suspend"):
                return
            state = application.get("status", {}).get("applicationState", {}).get("state", "")
            if state in _ENDS:
                return
            if not state:
                await self._submit(uid, application)
                return
            phase = self._drivers.get(uid, {}).get("status", {}).get("phase")
            wanted = {"Running": "RUNNING", "Succeeded": "COMPLETED", "Failed": "FAILED"}.get(phase, state)
            if wanted != state:
                message = "driver container failed" if wanted == "FAILED" else ""
                await self._set_state(uid, wanted, message)

    async def _submit(self, uid: str, application: Object) -> None:
        meta, driver = application["metadata"], application["spec"]["driver"]
        pod = copy.deepcopy(driver["template"])
        given = pod.get("metadata", {})
        labels = {**given.get("labels", {}), "spark-role": "driver", _APP_LABEL: meta["name"]}
        owner = {"apiVersion": _VERSION, "kind": "SparkApplication", "name": meta["name"], "uid": uid}
        pod["metadata"] = {
            "name": f"{meta['name']}-driver",
            "labels": labels,
            "annotations": given.get("annotations", {}),
            "ownerReferences": [{**owner, "controller": True}],
        }
        pod["spec"]["containers"][0]["args"] = ["driver", *application["spec"].get("arguments", [])]
        refused = pod["metadata"]["annotations"].get(REFUSED)
        if refused is not None:
            # With restartPolicy Never a failed submission is not retried.
            await self._set_state(uid, "FAILED", f"failed to run spark-submit: {refused}", ran=False)
            return
        path = path_of("v1", "pods", meta["namespace"])
        await self._api.quietly("POST", path, {"apiVersion": "v1", "kind": "Pod", **pod})
        await self._set_state(uid, "SUBMITTED")

    async def _set_state(self, uid: str, state: str, message: str = "", ran: bool = True) -> None:
        application = self._applications.get(uid)
        if application is None:
            return  # deleted while its driver was created
        meta = application["metadata"]
        status = {
            "applicationState": {"state": state, "errorMessage": message},
            "driverInfo": {"podName": f"{meta['name']}-driver"} if ran else {},
            "lastSubmissionAttemptTime": application.get("status", {}).get("lastSubmissionAttemptTime") or now(),
            "terminationTime": now() if state in _ENDS and ran else None,
        }
        path = path_of(_VERSION, _PLURAL, meta["namespace"], meta["name"], "status")
        changed = await self._api.quietly("PATCH", path, {"metadata": {"uid": uid}, "status": status}, MERGE)
        if changed is not None and uid in self._applications:
            self._applications[uid] = changed
