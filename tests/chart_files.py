"""Generated parts of the chart and the overlays: schema and table of the values, and the rights.

A value's description is the comment above it in values.yaml, and its type follows from its default. This module adds
only properties that a default cannot show: the form of lists and free objects, choices and bounds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune_operator.spec.launcher_rows import SUPPORTED
from finetune_operator.spec.settings.settings import Settings

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "finetune-operator"
VALUES = CHART / "values.yaml"
OPERATOR = ROOT / "manifests" / "operator"

Schema = dict[str, Any]

NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DURATION = r"^([0-9]+(ms|s|m|h))*$"
REPOSITORY = r"^[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$"
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def closed(properties: dict[str, Schema], *required: str) -> Schema:
    """Return the schema of an object with these keys and no others."""
    found: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return found | ({"required": list(required)} if required else {})


def listed(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def one_of(*choices: str) -> Schema:
    return {"type": "string", "enum": list(choices)}


def free(description: str, *required: str) -> Schema:
    """Return the schema of an object that the API server checks: its form is Kubernetes', and grows with it."""
    found: Schema = {"type": "object", "description": description}
    return found | ({"required": list(required)} if required else {})


REGISTRY: Schema = {"type": "string", "pattern": r"^([A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*/?)?$"}
TAG: Schema = {"type": "string", "pattern": r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$"}
DIGEST: Schema = {"type": "string", "pattern": r"^(sha256:[a-f0-9]{64})?$"}
NATURAL: Schema = {"type": "integer", "minimum": 1}
QUANTITIES: Schema = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
PROBE = closed(
    {
        name: {"type": "integer", "minimum": 0 if name == "initialDelaySeconds" else 1}
        for name in ("initialDelaySeconds", "periodSeconds", "timeoutSeconds", "successThreshold", "failureThreshold")
    }
)
TOLERATION = closed(
    {
        "key": {"type": "string"},
        "operator": one_of("Equal", "Exists", "Lt", "Gt"),
        "value": {"type": "string"},
        "effect": one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
        "tolerationSeconds": {"type": "integer"},
    }
)
RELABELINGS = listed(free("A RelabelConfig, as the Prometheus operator has it."))

FORMS: dict[str, Schema] = {
    "global.imageRegistry": REGISTRY,
    "image.registry": REGISTRY,
    "image.repository": {"type": "string", "pattern": REPOSITORY},
    "image.tag": TAG,
    "image.digest": DIGEST,
    "image.pullPolicy": one_of("Always", "IfNotPresent", "Never"),
    "imagePullSecrets": listed(closed({"name": {"type": "string", "pattern": NAME}}, "name")),
    "trainer.image.registry": REGISTRY,
    "trainer.image.repository": {"type": "string", "pattern": REPOSITORY},
    "trainer.image.tag": TAG,
    "trainer.image.digest": DIGEST,
    "vllm.image.registry": REGISTRY,
    "vllm.image.repository": {"type": "string", "pattern": REPOSITORY},
    "vllm.image.tag": TAG | {"minLength": 1},
    "vllm.image.digest": DIGEST,
    "watchNamespaces": listed({"type": "string", "pattern": LABEL, "maxLength": 63}) | {"uniqueItems": True},
    "replicas": NATURAL,
    "log.format": one_of("json", "text"),
    "log.level": one_of("debug", "info", "warning", "error"),
    "workers": {"type": "integer", "minimum": 1, "maximum": 256},
    "extraArgs": listed({"type": "string"}),
    "serviceAccount.name": {"type": "string", "pattern": f"{NAME}|^$"},
    "serviceAccount.annotations": TEXTS,
    "labels": TEXTS,
    "annotations": TEXTS,
    "podLabels": TEXTS,
    "podAnnotations": TEXTS,
    "podSecurityContext": free("A PodSecurityContext, as Kubernetes has it."),
    "securityContext": free("A SecurityContext, as Kubernetes has it."),
    "resources": closed({"requests": QUANTITIES, "limits": QUANTITIES, "claims": listed(free("A ResourceClaim."))}),
    "probes.startup": PROBE,
    "probes.liveness": PROBE,
    "probes.readiness": PROBE,
    "nodeSelector": TEXTS,
    "tolerations": listed(TOLERATION),
    "affinity": closed(
        {kind: free(f"As Kubernetes has it: {kind}.") for kind in ("nodeAffinity", "podAffinity", "podAntiAffinity")}
    ),
    "topologySpreadConstraints": listed(
        free("A TopologySpreadConstraint, as Kubernetes has it.", "maxSkew", "topologyKey", "whenUnsatisfiable")
    ),
    "podDisruptionBudget.minAvailable": {
        "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^[0-9]{1,3}%$"}]
    },
    "webhook.failurePolicy": one_of("Ignore", "Fail"),
    "webhook.timeoutSeconds": {"type": "integer", "minimum": 1, "maximum": 30},
    "webhook.namespaceSelector": closed(
        {"matchLabels": TEXTS, "matchExpressions": listed(free("A LabelSelectorRequirement."))}
    ),
    "webhook.annotations": TEXTS,
    "webhook.certManager.issuerRef": closed(
        {name: {"type": "string", "minLength": 1} for name in ("name", "kind", "group")}
    ),
    "networkPolicy.apiServerPorts": listed({"type": "integer", "minimum": 1, "maximum": 65535}) | {"minItems": 1},
    "networkPolicy.metricsFrom": listed(free("A NetworkPolicyPeer.")),
    "webhook.clientCertificates.names": listed({"type": "string", "minLength": 1}),
    "networkPolicy.extraIngress": listed(
        closed({"from": listed(free("A NetworkPolicyPeer.")), "ports": listed(free("A NetworkPolicyPort."))})
    ),
    "networkPolicy.extraEgress": listed(
        closed({"to": listed(free("A NetworkPolicyPeer.")), "ports": listed(free("A NetworkPolicyPort."))})
    ),
    "service.annotations": TEXTS,
    "env": listed(
        closed({"name": {"type": "string"}, "value": {"type": "string"}, "valueFrom": free("An EnvVarSource.")}, "name")
    ),
    "volumes": listed(free("A Volume, as Kubernetes has it.", "name")),
    "volumeMounts": listed(free("A VolumeMount, as Kubernetes has it.", "name", "mountPath")),
    **{
        f"metrics.{monitor}.{name}": form
        for monitor in ("serviceMonitor", "podMonitor", "endpointMonitor")
        for name, form in {
            "interval": {"type": "string", "pattern": DURATION},
            "scrapeTimeout": {"type": "string", "pattern": DURATION},
            "labels": TEXTS,
            "relabelings": RELABELINGS,
            "metricRelabelings": RELABELINGS,
        }.items()
    },
    "metrics.prometheusRule.labels": TEXTS,
    "metrics.dashboards.labels": TEXTS,
    "metrics.dashboards.annotations": TEXTS,
    "tests.namespace": {"type": "string", "pattern": f"{LABEL}|^$", "maxLength": 63},
    "tests.waitFor": one_of("Accepted", "Planned", "Running", "Succeeded"),
    "tests.timeoutSeconds": NATURAL,
    "tests.spec": free("The spec of a FineTuneJob, as docs/api.md lists it; the CRD checks it."),
}
"""Schemas that the defaults do not show, by the path of the value."""

DECIDED_ELSEWHERE = {
    "namespaces": "watchNamespaces", "defaults.image": "trainer.image", "defaults.vllmImage": "vllm.image",
}  # fmt: skip
"""Settings that other values decide, so that there is no second owner."""


# --------------------------------------------------------------------------------------------------------------- values


@dataclass(frozen=True)
class Value:
    """One key of values.yaml."""

    path: str
    description: str
    default: Any
    inner: tuple[Value, ...]
    """Values of a section; none for a value with a form in FORMS or without keys."""


@functools.cache
def values() -> tuple[Value, ...]:
    """Return the keys of values.yaml with the comments above them."""
    text = VALUES.read_text(encoding="utf-8")
    node = yaml.compose(text)
    assert isinstance(node, yaml.MappingNode)
    return tuple(_values(node, yaml.safe_load(text), text.splitlines(), ""))


def leaves() -> Iterator[Value]:
    """Yield the values that are no sections."""
    waiting = list(reversed(values()))
    while waiting:
        value = waiting.pop()
        if value.inner:
            waiting.extend(reversed(value.inner))
        else:
            yield value


def _values(node: yaml.MappingNode, read: dict[str, Any], lines: list[str], prefix: str) -> Iterator[Value]:
    for key, inner in node.value:
        path = f"{prefix}{key.value}"
        section = isinstance(inner, yaml.MappingNode) and not inner.flow_style and path not in FORMS
        nested = tuple(_values(inner, read[key.value], lines, f"{path}.")) if section else ()
        yield Value(path, _comment(lines, key.start_mark.line, path), read[key.value], nested)


def _comment(lines: list[str], line: int, path: str) -> str:
    found: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        found.insert(0, lines[line].lstrip().removeprefix("#").strip())
    assert found, f"values.yaml has no comment for {path}"
    return " ".join(found)


# --------------------------------------------------------------------------------------------------------------- schema


def values_schema() -> str:
    """Return values.schema.json in draft-07, which Helm 3 and 4 read."""
    settings, definitions = _settings_schema()
    properties = {value.path: _schema(value, settings) for value in values()}
    # This chart reads one of an umbrella chart's global values and cannot know the others.
    properties["global"].pop("additionalProperties")
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart finetune-operator",
        **closed(properties),
        "definitions": definitions,
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _schema(value: Value, settings: Schema) -> Schema:
    described: Schema = {"description": value.description}
    if value.inner:
        return described | closed({inner.path.rpartition(".")[2]: _schema(inner, settings) for inner in value.inner})
    if value.path == "settings":
        return described | settings
    form = FORMS.get(value.path) or _inferred(value)
    return form | described | {"default": value.default}


def _inferred(value: Value) -> Schema:
    match value.default:
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer", "minimum": 0}
        case str():
            return {"type": "string"}
        case other:
            raise TypeError(f"the form of {value.path}, {other!r}, needs a row in FORMS")


def _settings_schema() -> tuple[Schema, Schema]:
    """Return the schema of the operator's settings from their models, and the referenced definitions."""
    whole = Settings.model_json_schema(ref_template="#/definitions/{model}")
    definitions = {name: _draft_07(node) for name, node in whole.pop("$defs").items()}
    settings = _draft_07(whole)
    settings.pop("description")
    for path in DECIDED_ELSEWHERE:
        block, _, name = path.rpartition(".")
        owner = definitions[block.capitalize()] if block else settings
        del owner["properties"][name]
    return settings, definitions


def _draft_07(node: Any) -> Any:
    """Remove titles, and move siblings of a $ref, which draft-07 would ignore, around it."""
    if isinstance(node, list):
        return [_draft_07(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {}
    for key, inner in node.items():
        if key == "properties":
            found[key] = {name: _draft_07(each) for name, each in inner.items()}
        elif key != "title":
            found[key] = inner if key in ("default", "enum", "const") else _draft_07(inner)
    if "$ref" in found and len(found) > 1:
        return {"allOf": [{"$ref": found.pop("$ref")}], **found}
    return found


# --------------------------------------------------------------------------------------------------------------- README

README = """\
# The chart finetune-operator

Generated from the comments of values.yaml by `make generate`; do not edit.

Installs the operator that runs `FineTuneJob`s: the same objects as `kubectl apply -k manifests/operator`, with values
instead of overlays. Works with Helm 3 and 4.

No image is published: build both, push them, and set their registry ([docs/install.md](../../docs/install.md)).

```console
$ helm install finetune-operator charts/finetune-operator --namespace finetune-system --create-namespace \\
    --set image.registry=registry.example.com --set trainer.image.registry=registry.example.com
$ helm test finetune-operator --namespace finetune-system --logs
```

[docs/install.md](../../docs/install.md) describes installation for given namespaces, high availability, air-gapped
clusters, and monitoring; [docs/operator.md](../../docs/operator.md) describes the operator. `examples/` has values for
AWS, Google Cloud, Azure and Karpenter.

- Names of objects are fixed and do not depend on the release, as jobs and replicas find the operator by them. Install
  one release per namespace.
- Unknown and invalid values are rejected before anything changes (`values.schema.json`).
- `settings` contains the [operator's settings](../../docs/settings.md), except `namespaces`, `defaults.image` and
  `defaults.vllmImage`, which `watchNamespaces`, `trainer.image` and `vllm.image` set. The operator restarts when they
  change.

## Values

| Value | Default | Description |
|---|---|---|
"""


def chart_readme() -> str:
    """Return README.md of the chart."""
    return README + "\n".join(_rows(values())) + "\n"


def _rows(found: tuple[Value, ...]) -> Iterator[str]:
    """Yield a row for each value, below one with the description of its section."""
    for value in found:
        default = "" if value.inner else f"`{_flow(value.default)}`"
        yield f"| `{value.path}` | {default} | {_cell(value)} |"
        yield from _rows(value.inner)


def _flow(default: Any) -> str:
    return json.dumps(default, ensure_ascii=False)


def _cell(value: Value) -> str:
    return value.description.replace("|", "\\|")


# --------------------------------------------------------------------------------------------------------------- rights

TOKENS, NODES = "tokenreviews", "nodes"


def rights() -> dict[str, list[Any]]:
    """Return the rules of manifests/operator by scope: namespaces of jobs, cluster, own namespace; and separately those
    that only an operator with progress reports needs.
    """
    by_kind: dict[str, list[Any]] = {}
    for document in yaml.safe_load_all((OPERATOR / "rbac.yaml").read_text(encoding="utf-8")):
        by_kind.setdefault(document["kind"], []).extend(document.get("rules", []))
    rules = by_kind["ClusterRole"]
    users = yaml.safe_load_all((OPERATOR / "user-roles.yaml").read_text(encoding="utf-8"))
    return {
        "jobs": [rule for rule in rules if not {TOKENS, NODES} & set(rule["resources"])],
        "nodes": [rule for rule in rules if NODES in rule["resources"]],
        "tokens": [rule for rule in rules if TOKENS in rule["resources"]],
        "own": [rule for rule in by_kind["Role"] if "secrets" not in rule["resources"]],
        "serving": [rule for rule in by_kind["Role"] if "secrets" in rule["resources"]],
        "users": [
            {"name": role["metadata"]["name"], "labels": role["metadata"]["labels"], "rules": role["rules"]}
            for role in users
        ],
    }


PARTS = {"app.kubernetes.io/name": "finetune-operator", "app.kubernetes.io/part-of": "finetune-operator"}
FROM_CHART = "# Generated from charts/finetune-operator/files by `make generate`; do not edit.\n"
HEAD = "# Generated from manifests/operator by `make generate`; do not edit.\n"


def launcher_rights() -> str:
    """Return the rules of manifests/operator on the launchers' kinds, as rows of a YAML list."""
    groups = sorted({each.group for each in SUPPORTED})
    plurals = {group: ", ".join(each.plural for each in SUPPORTED if each.group == group) for group in groups}
    return "".join(
        f"  - apiGroups: [{group}]\n    resources: [{plurals[group]}]\n    verbs: [get, list, watch, create, delete]\n"
        for group in groups
    )


def chart_rights() -> str:
    """Return files/rights.yaml of the chart."""
    return HEAD + _dump(rights())


def overlay_rights() -> str:
    """Return the Role of manifests/overlays/namespaced."""
    meta = {"name": "finetune-operator-jobs", "namespace": "team-a"}
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": "finetune-operator", "namespace": "finetune-system"}
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta, "rules": rights()["jobs"]}
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": meta,
        "roleRef": {"apiGroup": group, "kind": "Role", "name": meta["name"]},
        "subjects": [subject],
    }
    return HEAD + _dump(role) + "---\n" + _dump(binding)


def overlay_rules() -> str:
    """Return the chart's alerts for manifests/overlays/monitoring; none while the chart has none."""
    file = CHART / "files" / "rules.yaml"
    rules = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {"groups": []}
    meta = {"name": "finetune-operator", "namespace": "finetune-system", "labels": {**PARTS, "release": "prometheus"}}
    return FROM_CHART + _dump(
        {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": meta, "spec": rules}
    )


def overlay_dashboards() -> str:
    """Return the chart's dashboards for manifests/overlays/monitoring."""
    files = sorted((CHART / "files" / "dashboards").glob("*.json"))
    meta = {
        "name": "finetune-operator-dashboards",
        "namespace": "finetune-system",
        "labels": {**PARTS, "grafana_dashboard": "1"},
    }
    data = {file.name: file.read_text(encoding="utf-8") for file in files}
    return FROM_CHART + _dump({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data})


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _dump(data: Any) -> str:
    return yaml.dump(data, Dumper=_Plain, sort_keys=False, width=120, default_flow_style=None)
