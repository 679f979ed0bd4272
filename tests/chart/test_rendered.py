"""Output of the chart: whole files on record, and the same operator as `kubectl apply -k manifests/operator`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_files import CHART, OPERATOR, VALUES, leaves
from chart_rendering import (
    VALUE_SETS,
    Object,
    complete_chart,
    helm,
    kustomize,
    nested,
    one,
    render,
    template,
    without_tests,
)
from finetune_operator.cli.files.images import pulled_images, read_values
from finetune_operator.documents import read_documents
from finetune_operator.spec.checks.settings_check import check_settings
from finetune_operator.spec.schema.crd import crd
from finetune_operator.spec.settings.settings import VLLM_IMAGE

CRD = "finetunejobs.finetune.dev"
CHART_LABELS = {
    "helm.sh/chart",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/version",
    "app.kubernetes.io/component",
}
NAME_LABEL = "app.kubernetes.io/name"
CHECKSUM = "checksum/settings"


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return complete_chart(tmp_path_factory.mktemp("chart"))


def in_short(each: Object) -> Object:
    """Return the object without texts that are compared with their own sources elsewhere."""
    annotations = each["metadata"].get("annotations", {})
    match each["kind"], each["metadata"]["name"]:
        case "CustomResourceDefinition", _:
            return {**each, "spec": "as in manifests/crd"}
        case "PrometheusRule", _:
            return {**each, "spec": "as in files/rules.yaml"}
        case "ConfigMap", "finetune-operator-dashboards":
            return {**each, "data": "as in files/dashboards"}
        case "Pod", _ if annotations.get("helm.sh/hook") == "test":
            each["spec"]["containers"][0]["args"] = ["as in files/test_job.py"]
    return each


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_objects_are_those_on_record(name: str, chart: Path, golden: Callable[[str, str], None]) -> None:
    found = [in_short(each) for each in render(None, name, chart=chart)]
    assert len(found) >= 12
    golden(f"golden/{name}.yaml", yaml.safe_dump_all(found, sort_keys=False, width=120))


def test_there_is_a_record_for_each_set_of_values_and_no_other() -> None:
    folder = Path(__file__).parent
    for kind in ("values", "golden"):
        assert {file.stem for file in (folder / kind).glob("*.yaml")} == set(VALUE_SETS)


# -------------------------------------------------------------------------------------------- the same as the manifests


def comparable(each: Object) -> Object:
    """Return an object as kustomize and the chart should both have it."""
    metadata = each["metadata"]
    labels = {key: value for key, value in metadata.get("labels", {}).items() if key not in CHART_LABELS}
    found = {**each, "metadata": {"name": metadata["name"], "labels": labels}}
    if "namespace" in metadata:
        found["metadata"]["namespace"] = metadata["namespace"]
    return walked(found)


def walked(node: Any) -> Any:
    """Remove the operator's name from the chart's selectors: its namespace may hold other things with a component
    `operator`, unlike the manifests' namespace.
    """
    if isinstance(node, list):
        return [walked(each) for each in node]
    if not isinstance(node, dict):
        return node
    if node.get("app.kubernetes.io/component") == "operator":
        node = {key: value for key, value in node.items() if key != NAME_LABEL}
    return {key: walked(value) for key, value in node.items()}


def rules_of(each: Object) -> set[tuple[str, ...]]:
    return {
        (group, resource, verb, *rule.get("resourceNames", ()))
        for rule in each["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_without_values_it_is_the_operator_of_the_manifests() -> None:
    expected = {(each["kind"], each["metadata"]["name"]): comparable(each) for each in kustomize(OPERATOR)}
    found = {(each["kind"], each["metadata"]["name"]): comparable(each) for each in without_tests(render())}
    # Helm creates the namespace, or finds it: a chart that owns its own namespace cannot be installed into it.
    del expected["Namespace", "finetune-system"]
    # kustomize puts the settings' hash into their name, the chart into an annotation of the pods.
    (hashed,) = (key for key in expected if key[0] == "ConfigMap")
    settings = expected.pop(hashed)
    assert yaml.safe_load(found["ConfigMap", "finetune-operator-settings"]["data"]["settings.yaml"]) == yaml.safe_load(
        settings["data"]["settings.yaml"]
    )
    del found["ConfigMap", "finetune-operator-settings"]
    deployment = "Deployment", "finetune-operator"
    volumes = expected[deployment]["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["configMap"]["name"] == hashed[1]
    volumes[0]["configMap"]["name"] = "finetune-operator-settings"
    pod = found[deployment]["spec"]["template"]
    assert list(pod["metadata"].pop("annotations")) == [CHECKSUM]
    # Kubernetes' own default for an image with a tag other than latest; a value needs some default.
    assert pod["spec"]["containers"][0].pop("imagePullPolicy") == "IfNotPresent"
    for kind in ("Role", "ClusterRole"):
        for key in [key for key in expected if key[0] == kind]:
            expected[key]["rules"], found[key]["rules"] = rules_of(expected[key]), rules_of(found[key])
    assert len(expected) >= 13
    assert found.keys() == expected.keys()
    # Another test checks it; kustomize writes its numbers in forms that PyYAML reads as text.
    del expected["CustomResourceDefinition", CRD]
    for key, each in expected.items():
        assert found[key] == each, key


def test_the_crd_is_the_generated_one_and_stays_when_the_release_goes() -> None:
    found = one(render(), "CustomResourceDefinition", CRD)
    assert found["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    del found["metadata"]["labels"]
    assert found == crd()


def test_braces_in_the_texts_of_others_stay_as_they_are(tmp_path: Path) -> None:
    chart = complete_chart(tmp_path)
    text = (chart / "files/crd.yaml").read_text()
    (chart / "files/crd.yaml").write_text(text.replace("Fine-tunes,", "Fine {{ .Values }},"))
    (chart / "files/rules.yaml").write_text('groups: [{name: "{{ $labels.job }}"}]\n')
    for file in (chart / "files/dashboards").glob("*.json"):
        file.unlink()
    (chart / "files/dashboards/a.json").write_text('{"legend": "{{ phase }}"}')
    found = render(None, "monitoring", chart=chart)
    schema = one(found, "CustomResourceDefinition", CRD)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert schema["description"].startswith("Fine {{ .Values }},")
    assert one(found, "PrometheusRule", "finetune-operator")["spec"] == {"groups": [{"name": "{{ $labels.job }}"}]}
    assert one(found, "ConfigMap", "finetune-operator-dashboards")["data"] == {"a.json": '{"legend": "{{ phase }}"}'}


def test_missing_rules_and_dashboards_render_nothing(tmp_path: Path) -> None:
    chart = complete_chart(tmp_path)
    for file in (chart / "files/rules.yaml", *(chart / "files/dashboards").glob("*.json")):
        file.unlink()
    kinds = {each["kind"] for each in render(None, "monitoring", chart=chart)}
    assert "ServiceMonitor" in kinds
    assert "PrometheusRule" not in kinds


# ------------------------------------------------------------------------------------------------------------- settings


def settings_of(found: tuple[Object, ...]) -> Any:
    text = one(found, "ConfigMap", "finetune-operator-settings")["data"]["settings.yaml"]
    (document,), problems = read_documents(text.encode())
    assert problems == []
    settings, wrong = check_settings(document.value)
    assert wrong == []
    return settings


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_operator_takes_the_settings(name: str) -> None:
    settings_of(render(None, name))


EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example_has_usage_notes_and_valid_settings(file: Path) -> None:
    assert f"--values charts/finetune-operator/examples/{file.name}" in file.read_text()
    settings = settings_of(render(yaml.safe_load(file.read_text())))
    assert len(settings.spot.nodes) == 1


def test_there_are_examples_for_the_clouds() -> None:
    assert [file.stem for file in EXAMPLES] == ["aws", "azure", "gcp", "karpenter"]


def test_other_settings_roll_the_pods_and_the_same_do_not() -> None:
    def checksum(values: Object) -> str:
        pods = one(render(values), "Deployment", "finetune-operator")["spec"]["template"]
        return str(pods["metadata"]["annotations"][CHECKSUM])

    assert checksum({}) == checksum({"settings": {}}) != checksum({"settings": {"currency": "EUR"}})


IMAGES: dict[str, tuple[Object, str]] = {
    "nothing: the chart's version": ({}, "finetune-operator:0.1.0"),
    "a tag": ({"image": {"tag": "1.2"}}, "finetune-operator:1.2"),
    "a digest alone": ({"image": {"digest": f"sha256:{'a' * 64}"}}, f"finetune-operator@sha256:{'a' * 64}"),
    "a tag and a digest": (
        {"image": {"tag": "1.2", "digest": f"sha256:{'a' * 64}"}}, f"finetune-operator:1.2@sha256:{'a' * 64}"
    ),
    "a registry": ({"image": {"registry": "a.example.com/x/"}}, "a.example.com/x/finetune-operator:0.1.0"),
    "a registry for all, which comes first": (
        {"image": {"registry": "a.example.com"}, "global": {"imageRegistry": "b.example.com:5000"}},
        "b.example.com:5000/finetune-operator:0.1.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", IMAGES)
def test_an_image_is_named_by(case: str) -> None:
    values, image = IMAGES[case]
    found = render(values)
    assert one(found, "Deployment", "finetune-operator")["spec"]["template"]["spec"]["containers"][0]["image"] == image
    assert one(found, "Pod", "finetune-operator-test")["spec"]["containers"][0]["image"] == image
    trainer = render({**values, "trainer": {"image": values.get("image", {})}})
    assert settings_of(trainer).defaults.image == image.replace("operator", "trainer")


@pytest.mark.parametrize(
    ("values", "image"),
    [
        pytest.param({}, VLLM_IMAGE, id="nothing"),
        pytest.param({"global": {"imageRegistry": "b.example.com:5000"}}, f"b.example.com:5000/{VLLM_IMAGE}", id="all"),
        pytest.param({"vllm": {"image": {"tag": "v1"}}}, "vllm/vllm-openai:v1", id="a tag"),
    ],
)
def test_image_of_vllm_is_named_by(values: Object, image: str) -> None:
    assert settings_of(render(values)).defaults.vllm_image == image


# ----------------------------------------------------------------------------------------------------------- namespaces


def test_for_given_namespaces_nothing_is_made_for_the_cluster() -> None:
    found = render(None, "namespaced")
    assert {each["kind"] for each in found if "namespace" not in each["metadata"]} == set()
    places = {each["metadata"]["namespace"] for each in found}
    assert places == {"finetune-system", "team-a", "0815"}
    assert settings_of(found).namespaces == ("team-a", "0815")


REVIEW = {("authentication.k8s.io", "tokenreviews", "create")}
BY_KEYS: Object = {"settings": {"progress": {"tokens": "keys"}}}
BY_REVIEW: Object = {"settings": {"progress": {"tokens": "review"}}}
GRANTED: Object = {"rbac": {"tokenReview": True}}
WAYS: dict[str, tuple[str, Object, str, bool]] = {
    # Set of values, and more -> how tokens are checked, and whether the chart grants TokenReviews.
    "for a cluster": ("default", {}, "review", True),
    "for a cluster that is to do without": ("default", BY_KEYS, "keys", False),
    "for given namespaces": ("namespaced", {}, "keys", False),
    "for given namespaces, with settings of progress": (
        "namespaced", {"settings": {"progress": {"statusSeconds": 1}}}, "keys", False),
    "for given namespaces, with the right": ("namespaced", GRANTED, "review", True),
    "for given namespaces, with a right that somebody else grants": ("namespaced", BY_REVIEW, "review", False),
    "for given namespaces, with a right that is of no use": ("namespaced", GRANTED | BY_KEYS, "keys", False),
}  # fmt: skip


@pytest.mark.parametrize("case", WAYS)
def test_progress_tokens_are_verified_with_the_available_permissions(case: str) -> None:
    name, values, way, granted = WAYS[case]
    found = render(values, name)
    progress = settings_of(found).progress
    assert (progress.enabled, progress.tokens) == (True, way)
    rules = {rule for each in found if each["kind"] == "ClusterRole" for rule in rules_of(each)}
    assert (rules & REVIEW == REVIEW) is granted
    # The right for its certificate, without which pods could not trust it.
    assert ("", "secrets", "create") in rules_of(one(found, "Role", "finetune-operator"))


def test_token_review_is_the_only_cluster_wide_permission_if_enabled() -> None:
    found = render(GRANTED, "namespaced")
    (role,) = (each for each in found if each["kind"] == "ClusterRole")
    assert rules_of(role) == REVIEW


READ_NODES = {("", "nodes", "list")}
NODES: Object = {"rbac": {"nodes": True}}
NOT_READ: Object = {"settings": {"nodes": {"read": False}}}


@pytest.mark.parametrize(
    ("name", "values", "read"),
    [
        ("default", {}, True),
        ("default", NOT_READ, False),
        ("namespaced", {}, False),
        ("namespaced", {"settings": {"nodes": {"read": True}}}, False),
        ("namespaced", NODES, True),
        ("namespaced", NODES | NOT_READ, False),
    ],
)
def test_operator_reads_nodes_only_with_the_permission(name: str, values: Object, read: bool) -> None:
    found = render(values, name)
    rules = {rule for each in found if each["kind"] == "ClusterRole" for rule in rules_of(each)}
    assert (rules >= READ_NODES, settings_of(found).nodes.read) == (read, read)


@pytest.mark.parametrize("namespaces", [[], ["team-a"]], ids=["in a cluster", "in a namespace"])
def test_without_progress_there_are_no_rights_for_it(namespaces: list[str]) -> None:
    found = render({"watchNamespaces": namespaces, "settings": {"progress": {"enabled": False}}})
    granted = {rule[1] for each in found if each["kind"] in ("Role", "ClusterRole") for rule in rules_of(each)}
    assert granted & {"secrets", "tokenreviews"} == set()
    assert "leases" in granted


def test_single_replica_has_no_disruption_budget() -> None:
    assert "PodDisruptionBudget" in {each["kind"] for each in render()}
    assert "PodDisruptionBudget" not in {each["kind"] for each in render({"replicas": 1})}


# --------------------------------------------------------------------------------------------------------------- values

OTHERS: dict[str, Any] = {
    "image.pullPolicy": "Always",
    "imagePullSecrets": [{"name": "registry"}],
    "watchNamespaces": ["team-a"],
    "settings": {"currency": "EUR"},
    "replicas": 3,
    "log.format": "text",
    "log.level": "debug",
    "extraArgs": ["--listen=::"],
    "podSecurityContext": {"runAsUser": 1000},
    "securityContext": {"readOnlyRootFilesystem": False},
    "resources": {"limits": {"memory": "2Gi"}},
    "probes.startup": {"failureThreshold": 60},
    "probes.liveness": {"timeoutSeconds": 5},
    "probes.readiness": {"periodSeconds": 10},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [],
    "podDisruptionBudget.minAvailable": "50%",
    "networkPolicy.apiServerPorts": [6443],
    "networkPolicy.metricsFrom": [{"namespaceSelector": {"matchLabels": {"monitoring": "yes"}}}],
    "networkPolicy.extraIngress": [{"ports": [{"port": 1}]}],
    "networkPolicy.extraEgress": [{"ports": [{"port": 1}]}],
    "webhook.failurePolicy": "Fail",
    "webhook.namespaceSelector": {"matchLabels": {"ml": "yes"}},
    "webhook.certManager.issuerRef": {"name": "ours", "kind": "ClusterIssuer"},
    "webhook.clientCertificates.names": ["kube-apiserver"],
    "env": [{"name": "A", "value": "b"}],
    "volumes": [{"name": "a", "emptyDir": {}}],
    "volumeMounts": [{"name": "tmp", "mountPath": "/var/tmp"}],
    "tests.waitFor": "Accepted",
    "tests.spec": {"task": "text-classification"},
    "metrics.dashboards.labels": {"grafana_dashboard": "yes"},
    **{
        f"metrics.{monitor}.{name}": value
        for monitor in ("serviceMonitor", "podMonitor", "endpointMonitor")
        for name, value in {
            "interval": "30s",
            "scrapeTimeout": "10s",
            "relabelings": [{"action": "labeldrop", "regex": "pod"}],
            "metricRelabelings": [{"action": "drop", "regex": "a"}],
        }.items()
    },
}
"""Values other than the defaults; others follow from the default."""
WITH: dict[str, Object] = {
    "rbac.tokenReview": {"watchNamespaces": ["team-a"]},
    "rbac.nodes": {"watchNamespaces": ["team-a"]},
    "webhook.enabled": {},
    "webhook.certManager.issuerRef": {"webhook": {"enabled": True, "certManager": {"enabled": True}}},
    "webhook.clientCertificates.": {"webhook": {"enabled": True, "clientCertificates": {"authorities": "any"}}},
    "webhook.": {"webhook": {"enabled": True}},
    **{
        f"metrics.{name}.": {"metrics": {name: {"enabled": True}}}
        for name in ("serviceMonitor", "podMonitor", "endpointMonitor", "prometheusRule", "dashboards")
    },
}
"""Settings that a value needs to have an effect, by the beginning of its path."""
PATHS = [value.path for value in leaves()]


def other(path: str, default: Any) -> Any:
    if path in OTHERS:
        return OTHERS[path]
    if path.endswith("igest"):
        return f"sha256:{'a' * 64}"
    match default:
        case bool():
            return not default
        case int():
            return default + 1
        case str():
            return "other"
        case {}:
            return {"example.com/other": "yes"}
    raise AssertionError(f"say in OTHERS what {path} may be besides {default!r}")


@pytest.mark.parametrize("path", PATHS)
def test_every_value_changes_the_rendered_objects(path: str, chart: Path) -> None:
    default = {value.path: value.default for value in leaves()}[path]
    around = next((values for start, values in WITH.items() if path.startswith(start)), {})
    if path.endswith(".enabled") and path.startswith("metrics."):
        around = {}
    changed = other(path, default)
    assert changed != default
    before = template(around, chart=chart)
    merged = yaml.safe_load(yaml.safe_dump(around))
    merge(merged, nested(path, changed))
    after = template(merged, chart=chart)
    assert (before.returncode, after.returncode) == (0, 0), before.stderr + after.stderr
    assert after.stdout != before.stdout


def merge(into: Object, more: Object) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def test_the_set_of_everything_leaves_few_values_out() -> None:
    given = yaml.safe_load((Path(__file__).parent / "values" / "everything.yaml").read_text())

    def there(path: str) -> bool:
        node: Any = given
        for part in path.split("."):
            if not isinstance(node, dict) or part not in node:
                return False
            node = node[part]
        return True

    assert {path for path in PATHS if not there(path)} == {
        # Beside others of the set they would remove its objects.
        "watchNamespaces", "rbac.create", "rbac.tokenReview", "rbac.nodes", "serviceAccount.create", "crds.install",
        "tests.enabled",
        "podDisruptionBudget.enabled", "networkPolicy.enabled", "trainer.image.registry", "trainer.image.digest",
        "vllm.image.registry", "vllm.image.digest",
        "webhook.certManager.enabled", "webhook.certManager.issuerRef",
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the webhook


def test_cert_manager_certificate_needs_no_operator_permissions() -> None:
    values: Object = {"webhook": {"enabled": True, "certManager": {"enabled": True}}, "watchNamespaces": ["team-a"]}
    found = render(values)
    hook = one(found, "ValidatingWebhookConfiguration", "finetune-operator-finetune-system")
    certificate = one(found, "Certificate", "finetune-operator-webhook")
    assert hook["metadata"]["annotations"] == {
        "cert-manager.io/inject-ca-from": "finetune-system/finetune-operator-webhook"
    }
    assert hook["webhooks"][0]["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a"]
    assert "finetune-operator-progress.finetune-system.svc" in certificate["spec"]["dnsNames"]
    assert {each["kind"] for each in found}.isdisjoint({"ClusterRole", "ClusterRoleBinding"})
    pod = one(found, "Deployment", "finetune-operator")["spec"]["template"]["spec"]
    secret = {"name": "webhook", "secret": {"secretName": certificate["spec"]["secretName"]}}
    assert secret in pod["volumes"]
    command = pod["containers"][0]["command"]
    assert command[command.index("--webhook-certificate") + 1] == "/etc/finetune-webhook"


def test_the_webhook_can_be_kept_for_clients_with_a_certificate() -> None:
    clients = {"authorities": "front-proxy", "key": "ca.pem", "names": ["kube-apiserver", "second"]}
    found = render({"webhook": {"enabled": True, "clientCertificates": clients}})
    pod = one(found, "Deployment", "finetune-operator")["spec"]["template"]["spec"]
    command, mounts = pod["containers"][0]["command"], pod["containers"][0]["volumeMounts"]
    place = command[command.index("--webhook-client-authorities") + 1]
    (mount,) = (one for one in mounts if place == f"{one['mountPath']}/ca.pem")
    (volume,) = (one for one in pod["volumes"] if one["name"] == mount["name"])
    assert volume["configMap"] == {"name": "front-proxy"}
    names = [after for before, after in itertools.pairwise(command) if before == "--webhook-client-name"]
    assert names == ["kube-apiserver", "second"]


def metrics_sources(values: Object) -> list[Object] | None:
    """Return the sources that may reach the port of metrics; None: no source."""
    rules = one(render(values), "NetworkPolicy", "finetune-operator")["spec"]["ingress"]
    (found,) = [rule["from"] for rule in rules if {"port": "http"} in rule["ports"]] or [None]
    return found


def test_where_metrics_may_be_read_is_a_value() -> None:
    prometheus = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert metrics_sources({}) == [{"namespaceSelector": {}}]
    assert metrics_sources({"networkPolicy": {"metricsFrom": prometheus}}) == prometheus
    assert metrics_sources({"networkPolicy": {"metricsFrom": []}}) is None


def test_webhook_with_watched_namespaces_needs_cert_manager() -> None:
    ran = template({"webhook": {"enabled": True}, "watchNamespaces": ["team-a"]})
    assert ran.returncode != 0
    assert "needs webhook.certManager.enabled" in ran.stderr


def test_the_operator_may_write_its_own_webhook_configuration_and_no_other() -> None:
    found = render({"webhook": {"enabled": True}})
    name = "finetune-operator-finetune-system"
    (rule,) = one(found, "ClusterRole", f"{name}-webhook")["rules"]
    assert (rule["resourceNames"], rule["verbs"]) == ([name], ["get", "update"])
    command = one(found, "Deployment", "finetune-operator")["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[command.index("--webhook-configuration") + 1] == name


# ------------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_linter_finds_nothing(name: str) -> None:
    ran = helm("lint", "--strict", str(CHART), "--values", str(Path(__file__).parent / "values" / f"{name}.yaml"))
    assert ran.returncode == 0, ran.stdout + ran.stderr


NOTES: dict[str, tuple[Object, list[str], list[str]]] = {
    "for a cluster": (
        {}, ["runs jobs of all namespaces", "helm --namespace finetune-system test finetune-operator --logs"],
        ["progress", "not part of this release"],
    ),
    "for a namespace": (
        {"watchNamespaces": ["team-a"]},
        ["runs jobs of the namespaces team-a", "--namespace team-a apply", "verified by the API server's public keys"],
        ["do not report"],
    ),
    "for a namespace, with the right to review tokens": (
        {"watchNamespaces": ["team-a"], "rbac": {"tokenReview": True}}, [], ["progress"],
    ),
    "without progress": ({"settings": {"progress": {"enabled": False}}}, ["Pods do not report progress"], []),
    "without the kind": ({"crds": {"install": False}}, ["not part of this release"], ["Uninstalling retains"]),
    "without a registry": (
        {},
        ["WARNING: finetune-operator:0.1.0 and finetune-trainer:0.1.0 are named without a registry", "docker push"], [],
    ),
    "with a registry for the operator alone": (
        {"image": {"registry": "registry.example.com"}},
        ["WARNING: finetune-trainer:0.1.0 is named without a registry"], ["finetune-operator:0.1.0 and"],
    ),
    "with a registry for all": ({"global": {"imageRegistry": "registry.example.com"}}, [], ["WARNING", "docker push"]),
    "with repositories": (
        {"image": {"repository": "acme/operator"}, "trainer": {"image": {"repository": "acme/trainer"}}}, [],
        ["WARNING"],
    ),
    "without a test": ({"tests": {"enabled": False}}, [], ["helm --namespace"]),
}  # fmt: skip


@pytest.mark.parametrize("case", NOTES)
def test_notes_show_the_next_commands(case: str) -> None:
    values, there, not_there = NOTES[case]
    ran = helm(
        "install", "finetune-operator", str(CHART), "--namespace", "finetune-system", "--dry-run=client",
        "--values", "-", stdin=yaml.safe_dump(values),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    notes = ran.stdout.partition("\nNOTES:\n")[2]
    assert "kubectl --namespace finetune-system rollout status deployment/finetune-operator" in notes
    assert [text for text in there if text not in notes] == []
    assert [text for text in not_there if text in notes] == []


def test_values_are_described_in_sentences() -> None:
    described = {value.path: value.description for value in leaves()}
    assert len(described) > 70
    assert [path for path, text in described.items() if not text.endswith(".") or not text[0].isupper()] == []
    assert all(len(line) <= 160 for line in VALUES.read_text().splitlines())


def test_impossible_helm_test_is_refused() -> None:
    ran = template({"tests": {"waitFor": "Succeeded"}})
    assert ran.returncode != 0
    assert "tests.waitFor Succeeded needs tests.spec" in ran.stderr


def test_null_takes_a_default_away() -> None:
    values = {"podSecurityContext": {"runAsUser": None, "runAsGroup": None}, "resources": {"limits": None}}
    pod = one(render(values), "Deployment", "finetune-operator")["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert list(pod["containers"][0]["resources"]) == ["requests"]


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_images_are_those_that_finetune_images_lists(name: str) -> None:
    found = render(None, name)
    pods = [each["spec"] for each in found if each["kind"] == "Pod"]
    pods += [each["spec"]["template"]["spec"] for each in found if each["kind"] == "Deployment"]
    pulled = {container["image"] for pod in pods for container in pod["containers"]}
    listed = pulled_images(read_values(Path(__file__).parent / "values" / f"{name}.yaml"))
    defaults = settings_of(found).defaults
    assert {each.target for each in listed} == pulled | {defaults.image, defaults.vllm_image}
