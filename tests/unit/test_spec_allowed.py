"""Validation of allowed settings: rules for all jobs, lists of the operator's settings, and the strict profile."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune_operator.spec.checks.settings_check import check_settings
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.problems import HIDDEN
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings


def job(**spec: Any) -> dict[str, Any]:
    base = {"task": "text-classification", "model": {"uri": "hf://a/b"}, "dataset": {"uri": "hf://c/d"}, "training": {}}
    head = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "a"}}
    return {**head, "spec": {**base, **spec}}


def settings(**allow: Any) -> Settings:
    read, problems = check_settings({"allow": allow})
    assert read is not None, problems
    return read


def paths(value: dict[str, Any], taken: Settings = CLUSTER_SETTINGS) -> list[str]:
    return [problem.path for problem in validate_job(value, taken)[1]]


def env(name: str, value: str = "x") -> dict[str, Any]:
    return {"template": {"env": [{"name": name, "value": value}]}}


def mount(path: str) -> dict[str, Any]:
    volume = {"name": "v", "emptyDir": {}}
    return {"template": {"volumes": [volume], "volumeMounts": [{"name": "v", "mountPath": path}]}}


def annotated(key: str, value: str = "x") -> dict[str, Any]:
    return {"template": {"annotations": {key: value}}}


def routed(gateway: str) -> dict[str, Any]:
    return {"endpoint": {"traffic": {"gateway": gateway, "canaryPercent": 5}}}


def projected(source: dict[str, Any]) -> dict[str, Any]:
    return {"template": {"volumes": [{"name": "v", "projected": {"sources": [source]}}]}}


def volume(source: dict[str, Any]) -> dict[str, Any]:
    return {"template": {"volumes": [{"name": "v", **source}]}}


DURING = "DuringSchedulingIgnoredDuringExecution"
ON_ONE_NODE = {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": "kubernetes.io/hostname"}


def avoiding(**term: Any) -> dict[str, Any]:
    return {"template": {"affinity": {"podAntiAffinity": {f"required{DURING}": [{**ON_ONE_NODE, **term}]}}}}


def tolerating(**toleration: Any) -> dict[str, Any]:
    return {"template": {"tolerations": [toleration]}}


def ephemeral(size: str) -> dict[str, Any]:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    return volume({"ephemeral": {"volumeClaimTemplate": {"spec": claim}}})


NEVER: dict[str, tuple[dict[str, Any], str]] = {
    "a library before all others": (env("LD_PRELOAD", "/mnt/x.so"), "spec.template.env[0].name"),
    "another program search path": (env("PATH", "/mnt"), "spec.template.env[0].name"),
    "another standard library": (env("PYTHONHOME", "/mnt"), "spec.template.env[0].name"),
    "a storage key": (env("AWS_SECRET_ACCESS_KEY", "wJalr"), "spec.template.env[0].value"),
    "an API key": (env("WANDB_API_KEY", "0123456789abcdef"), "spec.template.env[0].value"),
    "a password": (env("DB_PASSWORD", "correct horse"), "spec.template.env[0].value"),
    "a mount over the image's package": (mount("/opt/finetune/lib"), "spec.template.volumeMounts[0].mountPath"),
    "a mount over the image's programs": (mount("/usr/local/bin"), "spec.template.volumeMounts[0].mountPath"),
    "a mount over the linker's list": (mount("/etc/ld.so.conf.d"), "spec.template.volumeMounts[0].mountPath"),
    "a mount above": (mount("/opt"), "spec.template.volumeMounts[0].mountPath"),
    "two slashes before the image's package": (mount("//opt/finetune"), "spec.template.volumeMounts[0].mountPath"),
    "a slash and a dot before the image's programs": (mount("/./usr/bin"), "spec.template.volumeMounts[0].mountPath"),
    "a mount over everything by two slashes": (mount("//"), "spec.template.volumeMounts[0].mountPath"),
    "a search path of the trainer's own": (env("PYTHONSAFEPATH", ""), "spec.template.env[0].name"),
    "no AppArmor": (
        annotated("container.apparmor.security.beta.kubernetes.io/trainer", "unconfined"),
        'spec.template.annotations["container.apparmor.security.beta.kubernetes.io/trainer"]',
    ),
    "another network": (
        annotated("k8s.v1.cni.cncf.io/networks", "host-net"),
        'spec.template.annotations["k8s.v1.cni.cncf.io/networks"]',
    ),
    "a sidecar": (
        annotated("sidecar.istio.io/inject", "true"), 'spec.template.annotations["sidecar.istio.io/inject"]',
    ),
    "a seccomp profile of elsewhere": (
        {"template": {"securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "../../x"}}}},
        "spec.template.securityContext.seccompProfile.localhostProfile",
    ),
    "the node's own priority": (
        {"runPolicy": {"priorityClassName": "system-node-critical"}}, "spec.runPolicy.priorityClassName",
    ),
    "the operator's label": (
        {"template": {"labels": {"app.kubernetes.io/component": "operator"}}}, "spec.template.labels",
    ),
    "a file of the image as a model": ({"model": {"uri": "hf:///etc/passwd"}}, "spec.model.uri"),
    "a folder above": ({"model": {"uri": "hf://../../etc"}}, "spec.model.uri"),
    "a way round": ({"model": {"uri": "hf://our/../evil/x"}}, "spec.model.uri"),
    "three parts": ({"dataset": {"uri": "hf://our/data/more"}}, "spec.dataset.uri"),
}  # fmt: skip


@pytest.mark.parametrize("case", NEVER)
def test_forbidden_value_is_refused_under_every_profile(case: str) -> None:
    spec, path = NEVER[case]
    assert paths(job(**spec)) == [path]


FINE: dict[str, dict[str, Any]] = {
    "a path to a mounted key": env("GOOGLE_APPLICATION_CREDENTIALS", "/mnt/keys/key.json"),
    "a flag that is called token": env("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"),
    "a key by reference": {
        "template": {"env": [{"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}
    },
    "a new folder": mount("/data"),
    "a folder below /mnt": mount("/mnt/rows"),
    "no sidecar": annotated("sidecar.istio.io/inject", "false"),
    "an annotation of somebody": annotated("example.com/cost-centre", "7"),
    "a proxy": env("HTTPS_PROXY", "http://proxy:3128"),
    "a service account": {"template": {"serviceAccountName": "trainer"}},
    "a repository without an organisation": {"model": {"uri": "hf://gpt2"}},
}


@pytest.mark.parametrize("case", FINE)
def test_by_default_a_job_may(case: str) -> None:
    assert paths(job(**FINE[case])) == []


STRICT: dict[str, tuple[dict[str, Any], str]] = {
    "another service account": ({"template": {"serviceAccountName": "admin"}}, "spec.template.serviceAccountName"),
    "any Secret as a variable": (
        {"template": {"env": [{"name": "TZ", "valueFrom": {"secretKeyRef": {"name": "db", "key": "k"}}}]}},
        "spec.template.env[0].valueFrom.secretKeyRef.name",
    ),
    "any Secret as files": (
        {"template": {"volumes": [{"name": "v", "secret": {"secretName": "db"}}]}},
        "spec.template.volumes[0].secret.secretName",
    ),
    "any Secret among other sources": (
        projected({"secret": {"name": "db"}}), "spec.template.volumes[0].projected.sources[0].secret.name",
    ),
    "any Secret for the Hub": ({"secrets": {"hubToken": {"name": "db"}}}, "spec.secrets.hubToken.name"),
    "any Secret to sign with": (
        {"checkpoints": {"signingKey": {"name": "db"}}}, "spec.checkpoints.signingKey.name",
    ),
    "any Secret for storage": ({"secrets": {"storage": {"name": "db"}}}, "spec.secrets.storage.name"),
    "any Secret for images": (
        {"template": {"imagePullSecrets": [{"name": "db"}]}}, "spec.template.imagePullSecrets[0].name",
    ),
    "a token for the API server": (
        projected({"serviceAccountToken": {"path": "t"}}),
        "spec.template.volumes[0].projected.sources[0].serviceAccountToken.audience",
    ),
    "a token for a cloud": (
        projected({"serviceAccountToken": {"path": "t", "audience": "sts.amazonaws.com"}}),
        "spec.template.volumes[0].projected.sources[0].serviceAccountToken.audience",
    ),
    "a priority class": ({"runPolicy": {"priorityClassName": "high"}}, "spec.runPolicy.priorityClassName"),
    "another Hub": (env("HF_ENDPOINT", "https://evil.example.com"), "spec.template.env[0].name"),
    "a proxy": (env("HTTPS_PROXY", "http://evil:1"), "spec.template.env[0].name"),
    "another authority for git": (env("GIT_SSL_CAINFO", "/mnt/ca.crt"), "spec.template.env[0].name"),
    "modules of elsewhere": (env("PYTHONPATH", "/mnt"), "spec.template.env[0].name"),
    **{
        f"{usage} by {name}": (env(name, "/mnt/x"), "spec.template.env[0].name")
        for name, usage in {
            "NCCL_NET_PLUGIN": "a library", "NCCL_TUNER_PLUGIN": "a library", "TORCH_EXTENSIONS_DIR": "libraries",
            "TRITON_PTXAS_PATH": "a program", "TRITON_CACHE_DIR": "compiled code", "XDG_CACHE_HOME": "compiled code",
            "NCCL_COMM_ID": "a server", "NCCL_CONF_FILE": "settings", "HF_DATASETS_TRUST_REMOTE_CODE": "code",
        }.items()
    },
    **{
        f"{name}, which chooses code": (env(name, "/mnt/x"), "spec.template.env[0].name")
        for name in (
            "LD_LIBRARY_PATH", "LD_BIND_NOW", "PYTHONUSERBASE", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX",
            "PYTHONWARNINGS", "PYTHONBREAKPOINT", "PYTHONNOUSERSITE", "GCONV_PATH",
        )
    },
    **{
        f"a folder {folder} of the root": (mount(folder), "spec.template.volumeMounts[0].mountPath")
        for folder in ("/finetune_trainer", "/finetune_contract", "/torch", "/app", "/srv/x", "/mnt2", "//x")
    },
    "an annotation": (annotated("example.com/a"), 'spec.template.annotations["example.com/a"]'),
    "a driver that gives out secrets": (
        volume({"csi": {"driver": "secrets-store.csi.k8s.io"}}), "spec.template.volumes[0].csi.driver",
    ),
    "a Gateway": (routed("infra/public"), "spec.endpoint.traffic.gateway"),
    "nodes kept from all": (tolerating(operator="Exists"), "spec.template.tolerations[0].operator"),
    "broken nodes": (tolerating(operator="Exists", effect="NoExecute"), "spec.template.tolerations[0].operator"),
    "nodes by an empty key": (tolerating(operator="Exists", key=""), "spec.template.tolerations[0].operator"),
    "no node beside pods of any namespace": (
        avoiding(namespaceSelector={}),
        f"spec.template.affinity.podAntiAffinity.required{DURING}[0].namespaceSelector",
    ),
    "no node beside pods of another namespace": (
        avoiding(namespaces=["others"]), f"spec.template.affinity.podAntiAffinity.required{DURING}[0].namespaces",
    ),
    "a node beside pods of others, if there is one": (
        {"template": {"affinity": {"podAffinity": {f"preferred{DURING}": [
            {"weight": 1, "podAffinityTerm": {**ON_ONE_NODE, "namespaceSelector": {"matchLabels": {"a": "b"}}}}
        ]}}}},
        f"spec.template.affinity.podAffinity.preferred{DURING}[0].podAffinityTerm.namespaceSelector",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STRICT)
def test_strict_profile_refuses_values_that_the_open_one_allows(case: str) -> None:
    spec, path = STRICT[case]
    assert (paths(job(**spec)), paths(job(**spec), settings(profile="strict"))) == ([], [path])


def test_strict_profile_allows_the_needs_of_training() -> None:
    spec = {
        "secrets": {"hubToken": {"name": "finetune-hub"}, "storage": {"name": "finetune-storage"}},
        "template": {
            "serviceAccountName": "default",
            "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
            "volumes": [{"name": "v", "emptyDir": {}}],
            "volumeMounts": [{"name": "v", "mountPath": path} for path in ("/mnt/a/b", "//data", "/scratch/")],
            **tolerating(key="nvidia.com/gpu", operator="Exists")["template"],
            **avoiding(namespaces=[])["template"],
        },
    }
    assert paths(job(**spec), settings(profile="strict")) == []


def test_a_list_of_the_settings_takes_the_place_of_the_profiles() -> None:
    taken = settings(profile="strict", serviceAccounts=["team-*"], env=[])
    assert paths(job(template={"serviceAccountName": "team-a"}), taken) == []
    assert paths(job(template={"serviceAccountName": "default"}), taken) == ["spec.template.serviceAccountName"]
    assert paths(job(**env("NCCL_DEBUG")), taken) == ["spec.template.env[0].name"]


LISTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a driver": ("csiDrivers", volume({"csi": {"driver": "other"}}), "spec.template.volumes[0].csi.driver"),
    "a Secret of a driver": (
        "secrets", volume({"csi": {"driver": "d.org", "nodePublishSecretRef": {"name": "other"}}}),
        "spec.template.volumes[0].csi.nodePublishSecretRef.name",
    ),
    "a claim as a volume": (
        "claims", volume({"persistentVolumeClaim": {"claimName": "other"}}),
        "spec.template.volumes[0].persistentVolumeClaim.claimName",
    ),
    "a Gateway": ("gateways", routed("other"), "spec.endpoint.traffic.gateway"),
    "a claim of a model": ("claims", {"model": {"uri": "pvc://other/model"}}, "spec.model.uri"),
    "a claim of data": ("claims", {"dataset": {"uri": "pvc://other"}}, "spec.dataset.uri"),
    "a claim for results": ("claims", {"storage": {"workspace": "pvc://other"}}, "spec.storage.workspace"),
    "a ConfigMap as files": (
        "configMaps", volume({"configMap": {"name": "other"}}), "spec.template.volumes[0].configMap.name",
    ),
    "a ConfigMap among other sources": (
        "configMaps", projected({"configMap": {"name": "other"}}),
        "spec.template.volumes[0].projected.sources[0].configMap.name",
    ),
    "a ConfigMap as a variable": (
        "configMaps",
        {"template": {"env": [{"name": "TZ", "valueFrom": {"configMapKeyRef": {"name": "other", "key": "k"}}}]}},
        "spec.template.env[0].valueFrom.configMapKeyRef.name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LISTED)
def test_list_refuses_names_it_does_not_contain(case: str) -> None:
    which, spec, path = LISTED[case]
    named = json.loads(json.dumps(spec).replace("other", "team-a"))
    lists = settings(**{which: ["team-*"]})
    assert paths(job(**spec)) == []
    assert (paths(job(**spec), lists), paths(job(**named), lists)) == ([path], [])


def test_a_bound_of_costs_needs_prices() -> None:
    _, problems = check_settings({"allow": {"maxCost": 5}})
    assert [problem.path for problem in problems] == ["allow.maxCost"]
    price = {"product": "cpu", "gpus": 0, "perHour": 1}
    assert check_settings({"allow": {"maxCost": 5}, "prices": [price]})[1] == []


SIZES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "nodes": ({"maxNodes": 2}, {"resources": {"nodes": 3}}, "spec.resources.nodes"),
    "GPUs": ({"maxGpus": 8}, {"resources": {"nodes": 2, "gpusPerNode": 8}}, "spec.resources.gpusPerNode"),
    "workers that prepare": ({"maxWorkers": 4}, {"preparation": {"workers": 5}}, "spec.preparation.workers"),
    "workers that predict": ({"maxWorkers": 4}, {"predict": {"workers": 5}}, "spec.predict.workers"),
    "storage": ({"maxStorage": "50Gi"}, {"storage": {"size": "60G"}}, "spec.storage.size"),
    "storage of each pod": (
        {"maxStorage": "50Gi"}, {"storage": {"size": "1Gi"}, **ephemeral("60Gi")},
        "spec.template.volumes[0].ephemeral.volumeClaimTemplate.spec.resources.requests.storage",
    ),
    "the default's storage": ({"maxStorage": "99Gi"}, {}, "spec.storage.size"),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_too_large_job_is_refused_with_the_limit(case: str) -> None:
    allow, spec, path = SIZES[case]
    before = {(each.path, each.rule) for each in validate_job(job(**spec))[1]}
    found = validate_job(job(**spec), settings(**allow))[1]
    (problem,) = [each for each in found if (each.path, each.rule) not in before]
    assert problem.path == path
    assert str(*allow.values()) in problem.rule
    assert str(*allow.values()) in problem.hint


def test_no_value_of_a_credential_is_repeated() -> None:
    (problem,) = validate_job(job(**env("DB_PASSWORD", "correct horse")))[1]
    assert problem.value == HIDDEN
    assert "correct horse" not in json.dumps([problem.rule, problem.hint])


def test_strict_profile_says_how_to_schedule_within_the_namespace() -> None:
    spec = {"template": {**tolerating(operator="Exists")["template"], **avoiding(namespaceSelector={})["template"]}}
    problems = validate_job(job(**spec), settings(profile="strict"))[1]
    assert [(one.value, one.rule, one.hint) for one in problems] == [
        (
            '"Exists"',
            "tolerates every taint without a key, also of control planes, which the settings do not allow",
            "name the key of the taint",
        ),
        (
            "an object with 0 fields",
            "is about pods of other namespaces, which the settings do not allow",
            "leave it out: the term is then about the job's own namespace",
        ),
    ]
