"""Required node affinity that keeps pods on spot nodes and on those with the requested GPU, in addition to the user's
own template.

Required terms of node affinity are ORed, the expressions of one term ANDed. So a term of ours beside the user's would
allow nodes that the user has ruled out: each term of the user is combined with each of ours. Nodes to avoid are in the
list of preferred terms, which does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from finetune_contract.choices import Stage
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import Capacity, FineTuneJobSpec

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def first_capacity(spec: FineTuneJobSpec, stage: Stage) -> Capacity | None:
    """Return the capacity type of the first attempt at `stage`; None for any node."""
    return "spot" if spec.spot.enabled and stage is Stage.TRAIN else None


def spot_tolerations(settings: Settings) -> tuple[Manifest, ...]:
    """Return the pods' tolerations for taints of spot nodes."""
    return tuple(
        toleration.model_dump(mode="json", by_alias=True, exclude_none=True) for toleration in settings.spot.tolerations
    )


def only_on(affinity: Mapping[str, JsonValue], nodes: Sequence[Mapping[str, str]]) -> Manifest:
    """Restrict `affinity` to nodes that have all labels of one of `nodes`; without `nodes`, return it unchanged."""
    return only_with(affinity, [{key: (value,) for key, value in labels.items()} for labels in nodes])


def only_with(affinity: Mapping[str, JsonValue], nodes: Sequence[Mapping[str, Sequence[str]]]) -> Manifest:
    """Restrict `affinity` to nodes that match one of `nodes`: each label with one of its values; () changes nothing."""
    if not nodes:
        return dict(affinity)
    of_nodes = _object(affinity.get("nodeAffinity"))
    required = _object(of_nodes.get(_REQUIRED))
    given = required.get("nodeSelectorTerms")
    # An empty term matches no node, but combined with ours it would match some.
    nonempty = [] if not isinstance(given, list) else [term for term in map(_object, given) if any(term.values())]
    if given and not nonempty:
        return dict(affinity)
    terms: list[JsonValue] = [_both(term, labels) for term in nonempty or [{}] for labels in nodes]
    return {**affinity, "nodeAffinity": {**of_nodes, _REQUIRED: {**required, "nodeSelectorTerms": terms}}}


def _both(term: Manifest, labels: Mapping[str, Sequence[str]]) -> Manifest:
    given = term.get("matchExpressions")
    ours: list[JsonValue] = [{"key": key, "operator": "In", "values": list(values)} for key, values in labels.items()]
    return {**term, "matchExpressions": [*(given if isinstance(given, list) else ()), *ours]}


def _object(value: JsonValue) -> Manifest:
    return value if isinstance(value, dict) else {}
