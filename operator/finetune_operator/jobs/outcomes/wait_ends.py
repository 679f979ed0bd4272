"""Ends of waits: by a person, by free capacity, or by a component of the cluster.

Kubernetes says so only in texts, for people. Sources are beside the patterns; a text that matches none counts as one
that resolves by itself sooner or later (Capacity or Controller), so that no healthy job is called stalled at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from finetune_operator.jobs.state.decision_types import StartEvent
from finetune_operator.spec.quantities import parse_quantity
from finetune_operator.spec.types import WaitingFor

QUOTA = "QuotaExceeded"
PODS_REFUSED = "PodsRefused"
UNSCHEDULABLE = "Unschedulable"
CLAIM = "ClaimNotBound"
FAILED_MOUNT = "FailedMount"
CONTAINER_CREATING = "ContainerCreating"
_KUBELET = frozenset({FAILED_MOUNT, "FailedAttachVolume", "FailedCreatePodSandBox", "FailedMapVolume"})
"""Reasons of events that become reasons of conditions; others may be anything, as tenants may create events."""


@dataclass(frozen=True)
class WaitEnd:
    """Reason of a wait, and who ends it."""

    reason: str
    waits_for: WaitingFor
    hint: str = ""


_QUOTA_HINT = "Ask for less under resources, or let the administrator raise the quota (kubectl describe quota)."
_REFUSED_HINT = "Correct what the message names: an absent service account, a LimitRange, or a policy on pods."
_NODES_HINT = (
    "No node of the cluster can ever run the pod: ask for less under resources, correct template.nodeSelector and "
    "template.tolerations, or add such a node."
)
_CLAIM_HINT = "Create the claim, or name one and a storage class that exist (kubectl get pvc,storageclass)."
_MOUNT_HINT = "Create what the message names in the job's namespace; the pod then starts by itself."
_NODE_HINT = "Look at the pod's node and the component that the message names: a driver, the network, or the node."
FREE_HINT = "Wait until other jobs end, ask for less under resources, or add nodes or quota."

_NODES = re.compile(r"\d+/(\d+) nodes are available")
"""kubernetes pkg/scheduler/framework/types.go, FitError"""
_UNHELPFUL = re.compile(r"(\d+) Preemption is not helpful for scheduling")
"""Nodes on which the pod would not fit either if all others left (framework/preemption)."""
_NEVER_PREEMPTS = "not eligible due to preemptionPolicy=Never"
_TAKEN = re.compile(r"Insufficient |Too many pods|free ports|No preemption victims found")
_COMING = re.compile(
    r"node\.kubernetes\.io/(not-ready|unreachable|unschedulable|network-unavailable)|node\(s\) were unschedulable"
    r"|node\.cloudprovider\.kubernetes\.io/uninitialized"
)
"""Taints of nodes that start, restart or are drained."""
_UNBOUND = "unbound immediate PersistentVolumeClaims"
_NO_CLAIM = re.compile(r'persistentvolumeclaim "[^"]*" not found|storageclass\S* "[^"]*" not found')
_ADDS_NODES = frozenset({"TriggeredScaleUp", "Nominated"})
"""Events of the cluster autoscaler and of Karpenter."""
_CLAIM_FAULTS = frozenset({"ProvisioningFailed", "FailedBinding"})
"""pkg/controller/volume/events; ExternalProvisioning and Provisioning are the ordinary ones."""


def scheduling_end(message: str, events: Sequence[StartEvent], *, spot: bool = False) -> WaitEnd:
    """Return who ends the wait of a pod without a node. `spot`: its nodes come and go, so their absence is no fault."""
    if _NO_CLAIM.search(message):
        return WaitEnd(CLAIM, "Person", _CLAIM_HINT)
    if _UNBOUND in message:
        faults = any(one.kind == "PersistentVolumeClaim" and one.reason in _CLAIM_FAULTS for one in events)
        return WaitEnd(CLAIM, "Person" if faults else "Controller", _CLAIM_HINT)
    adds = any(one.kind == "Pod" and one.reason in _ADDS_NODES for one in events)
    if spot or adds or _COMING.search(message):
        return WaitEnd(UNSCHEDULABLE, "Capacity", FREE_HINT)
    nodes = _NODES.search(message)
    count = 0 if nodes is None else int(nodes[1])
    never = sum(int(one[1]) for one in _UNHELPFUL.finditer(message))
    if _NEVER_PREEMPTS in message:
        never = 0 if _TAKEN.search(message) else count
    elif nodes is None and "no nodes available" not in message:
        return WaitEnd(UNSCHEDULABLE, "Capacity", FREE_HINT)
    if never >= count:
        return WaitEnd(UNSCHEDULABLE, "Person", _NODES_HINT)
    return WaitEnd(UNSCHEDULABLE, "Capacity", FREE_HINT)


_EXCEEDED = re.compile(r"exceeded quota: \S+, requested: (\S+), used: \S+, limited: (\S+)")
"""plugin/pkg/admission/resourcequota/controller.go"""


def refusal_end(message: str) -> WaitEnd:
    """Return who ends the wait for an object that the API server refuses."""
    exceeded = list(_EXCEEDED.finditer(message))
    if not exceeded:
        return WaitEnd(PODS_REFUSED, "Person", _REFUSED_HINT)
    if any(_exceeds(_amounts(one[1]), _amounts(one[2])) for one in exceeded):
        return WaitEnd(QUOTA, "Person", _QUOTA_HINT)
    return WaitEnd(QUOTA, "Capacity", FREE_HINT)


def _exceeds(requested: dict[str, Decimal], limited: dict[str, Decimal]) -> bool:
    """Return whether the quota would be exceeded even if nobody else used any of it."""
    return any(amount > limited.get(name, amount) for name, amount in requested.items())


def _amounts(text: str) -> dict[str, Decimal]:
    amounts = {}
    for part in text.rstrip(".").split(","):
        name, _, amount = part.partition("=")
        try:
            amounts[name] = parse_quantity(amount)
        except ValueError:
            continue
    return amounts


_ABSENT = re.compile(r'(configmap|secret|persistentvolumeclaim)s? "[^"]*" not found|references non-existent')
"""pkg/volume: configmap, secret, projected"""


def mounting_end(event: StartEvent) -> WaitEnd:
    """Return who ends the wait of a pod whose node cannot prepare its container."""
    reason = event.reason if event.reason in _KUBELET else CONTAINER_CREATING
    if _ABSENT.search(event.message):
        return WaitEnd(reason, "Person", _MOUNT_HINT)
    return WaitEnd(reason, "Controller", _NODE_HINT)
