"""`finetune validate` on whole job files: silent about good ones, with every problem of bad ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from each_case import each_case, pairs_of
from finetune_operator.documents import read_documents
from finetune_operator.spec.checks.validation import foreign, validate_job
from finetune_operator.spec.fields.shapes import find, leaves, spec_shape
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS, Settings

JOBS = Path(__file__).parent / "jobs"
GOOD = sorted(path.stem for path in (JOBS / "good").glob("*.yaml"))

# File -> (path, reason, part of the rule or of the hint) of every problem, in order.
BAD: dict[str, list[tuple[str, str, str]]] = {
    "affinity-forms": [
        (
            "spec.template.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].values",
            "Required",
            "is required for operator In",
        ),
        (
            "spec.template.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[1].values",
            "Invalid",
            "must be one quoted integer for operator Gt",
        ),
        (
            "spec.template.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[2].key",
            "Invalid",
            "a label key is an optional DNS name and /, and a name of",
        ),
        (
            "spec.template.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[3].values",
            "Invalid",
            "is not allowed with operator Exists",
        ),
        (
            "spec.template.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchFields[0]",
            "Invalid",
            "matchFields supports only metadata.name with In or NotIn",
        ),
    ],
    "affinity-misspelt": [
        ("spec.template.affinity.nodeAfinity", "Unknown", "did you mean nodeAffinity?"),
    ],
    "bad-uri": [
        ("spec.model.uri", "Invalid", "must be a URI that begins with hf://, file://, pkg:// or pvc://"),
        ("spec.dataset.uri", "Invalid", "must be a URI that begins with hf://, file://, pkg:// or pvc://"),
    ],
    "batch-not-divisible": [
        ("spec.training.globalBatchSize", "Invalid", "use 96 or 112, multiples of 16 = 16 ranks"),
    ],
    "checkpoint-interval-misspelt": [
        ("spec.checkpoints.every.step", "Unknown", "did you mean steps?"),
    ],
    "checkpoint-interval-twice": [
        ("spec.checkpoints.every", "Invalid", "takes exactly one of steps and minutes"),
    ],
    "claim-forms": [
        ("spec.model.uri", "Invalid", "must be pvc://claim or pvc://claim/path, with a claim"),
        ("spec.dataset.uri", "Invalid", "must be pvc://claim or pvc://claim/path, with a claim"),
        ("spec.predict.dataset.uri", "Invalid", "must be pvc://claim or pvc://claim/path, with a claim"),
        ("spec.predict.output", "Invalid", "must be pvc://claim or pvc://claim/path, with a claim"),
        ("spec.storage.workspace", "Invalid", "must be pvc://claim or pvc://claim/path, with a claim"),
        ("spec.storage.cache", "Invalid", "must be pvc://claim or pvc://claim/path, with a claim"),
    ],
    "deepspeed-keys": [
        ("spec.parallelism.deepspeedConfig.train_batch_size", "Forbidden", "is set by spec.training.globalBatchSize"),
        ("spec.parallelism.deepspeedConfig.activation_checkpointing", "Invalid", "must be an object for DeepSpeed"),
        ("spec.parallelism.deepspeedConfig.zero_optimisation", "Unknown", "did you mean zero_optimization?"),
        (
            "spec.parallelism.deepspeedConfig.zero_optimization.stage",
            "Forbidden",
            "is set by spec.parallelism.zeroStage",
        ),
        ("spec.parallelism.deepspeedConfig.zero_optimization.overlap_com", "Unknown", "did you mean overlap_comm?"),
    ],
    "env-forms": [
        ("spec.template.env[0].valeu", "Unknown", "did you mean value?"),
        ("spec.template.env[1].value", "Invalid", "must be text"),
        ("spec.template.env[2].name", "Invalid", "must be a name of letters, digits, -, _ and . that does "),
        ("spec.template.env[3].valueFrom", "Invalid", "is not allowed together with value"),
        ("spec.template.env[4].valueFrom.secretKeyRef.key", "Required", "is required"),
        ("spec.template.env[5].valueFrom", "Invalid", "takes exactly one of fieldRef, resourceFieldRef, configM"),
        ("spec.template.env[6].name", "Required", "is required"),
        ("spec.template.env[8].name", "Duplicate", "is a duplicate"),
    ],
    "env-of-the-contract": [
        ("spec.template.env[0].name", "Forbidden", "is set by the operator or the launcher"),
        ("spec.template.env[1].name", "Forbidden", "is set by the operator or the launcher"),
        ("spec.template.env[2].name", "Forbidden", "is set by the operator or the launcher"),
        ("spec.template.env[3].name", "Forbidden", "is set by the operator or the launcher"),
        ("spec.template.env[4].name", "Forbidden", "is set by the operator or the launcher"),
        ("spec.template.env[5].name", "Forbidden", "is set by the operator or the launcher"),
    ],
    "env-plain-secrets": [
        ("spec.template.env[0].value", "Forbidden", "a job must not contain a token in plain text"),
        ("spec.template.env[1].value", "Forbidden", "looks like a credential, which a job must not contain"),
        ("spec.template.env[2].value", "Forbidden", "looks like a credential, which a job must not contain"),
    ],
    "env-token-twice": [
        ("spec.template.env[0].name", "Forbidden", "is set from spec.secrets.hubToken"),
    ],
    "epochs-and-steps": [
        ("spec.training.maxSteps", "Invalid", "cannot be combined with spec.training.epochs, which it"),
    ],
    "evaluation-without-dataset": [
        ("spec.dataset", "Required", "is required for training and evaluation"),
    ],
    "frame-odds": [
        ("apiVersion", "Required", "is required"),
        ("metadata.labels", "Invalid", "must be an object"),
        ("metadata.annotations", "Invalid", "must be an object"),
    ],
    "gate-not-measured": [
        ("spec.evaluation.gate.metric", "Invalid", "must be one of spec.evaluation.metrics"),
    ],
    "host-namespaces": [
        ("spec.template.hostNetwork", "Unknown", "there is no such field"),
        ("spec.template.hostPID", "Unknown", "there is no such field"),
        ("spec.template.hostIPC", "Unknown", "there is no such field"),
    ],
    "hub-only-fields": [
        ("spec.predict.output", "Invalid", "must end in .jsonl or .parquet, which also sets the"),
        ("spec.model.revision", "Invalid", "applies to the Hub only: spec.model.uri must begin with hf://"),
        ("spec.dataset.config", "Invalid", "applies to the Hub only: spec.dataset.uri must begin with hf://"),
        ("spec.training.warmupSteps", "Invalid", "cannot be combined with spec.training.scheduler constant"),
        ("spec.resources.accelerator", "Invalid", "needs spec.resources.gpusPerNode"),
    ],
    "image-form": [
        ("spec.image", "Invalid", "must be an image such as registry.example.com/team/train"),
        ("spec.imagePullPolicy", "NotSupported", "must be one of Always, IfNotPresent, Never"),
    ],
    "image-in-capitals": [
        ("spec.image", "Invalid", "must be an image such as registry.example.com/team/train"),
    ],
    "image-pull-secrets-twice": [
        ("spec.template.imagePullSecrets[1].name", "Duplicate", "is a duplicate"),
    ],
    "labels-of-tags": [
        ("spec.dataset.labels", "Invalid", "applies to text-classification only"),
    ],
    "launcher-of-others": [
        ("spec.launcher", "NotSupported", "must be one of auto, pytorchjob, mpijob, job"),
    ],
    "launchers-to-come": [
        ("spec.launcher", "NotYetSupported", "is not supported in this version"),
    ],
    "managed-by-form": [
        ("spec.runPolicy.managedBy", "Invalid", "must be a name with a domain, such as kueue.x-k8s.io/mul"),
    ],
    "micro-batch-not-divisible": [
        ("spec.training.globalBatchSize", "Invalid", "use 24 or 32, multiples of 8 = 8 rows per micro-batch"),
    ],
    "missing-required": [
        ("spec.task", "Required", "is required"),
        ("spec.model", "Required", "is required"),
        ("spec.dataset.uri", "Required", "is required"),
    ],
    "misspelt-kind": [
        ("kind", "Invalid", "must be FineTuneJob"),
    ],
    "mount-forms": [
        ("spec.template.volumeMounts[0].mountPath", "Invalid", "must not contain .."),
        ("spec.template.volumeMounts[1].subPath", "Invalid", "must not contain .."),
        ("spec.template.volumeMounts[3].mountPath", "Required", "is required"),
        ("spec.template.volumeMounts[3].mountpath", "Unknown", "did you mean mountPath?"),
        (
            "spec.template.volumeMounts[4].mountPath",
            "Invalid",
            "must be an absolute path such as /mnt/data, without :, at",
        ),
        ("spec.template.volumeMounts[5].mountPropagation", "NotSupported", "must be one of None, HostToContainer"),
        ("spec.template.volumeMounts[2].mountPath", "Duplicate", "is a duplicate"),
    ],
    "mount-reserved": [
        ("spec.template.volumeMounts[0].mountPath", "Forbidden", "overlaps /etc/finetune, which the trainer uses"),
        ("spec.template.volumeMounts[1].mountPath", "Forbidden", "overlaps /workspace, which the trainer uses"),
        ("spec.template.volumeMounts[2].mountPath", "Forbidden", "overlaps /dev, which the trainer uses"),
        (
            "spec.template.volumeMounts[3].mountPath",
            "Invalid",
            "must be an absolute path such as /mnt/data, without :, at",
        ),
        ("spec.template.volumeMounts[4].mountPath", "Forbidden", "overlaps /var/run/secrets, which the trainer uses"),
        ("spec.template.volumeMounts[5].mountPath", "Forbidden", "overlaps /tmp, which the trainer uses"),
        ("spec.template.volumeMounts[6].mountPath", "Forbidden", "overlaps /claims, which the trainer uses"),
    ],
    "mount-without-volume": [
        ("spec.template.volumeMounts[0].name", "Invalid", "must be the name of a volume in spec.template.volumes"),
    ],
    "name-form": [
        ("metadata.name", "Invalid", "must have at most 63 characters: a-z, 0-9 and -, and must"),
        ('metadata.labels["a b"]', "Invalid", "a label key is an optional DNS name and /, and a name of"),
        ("metadata.labels.tier", "Invalid", "a label value has at most 63 letters, digits, -, _ and .,"),
        ("metadata.labels.true", "Invalid", "put the value in quotes"),
    ],
    "name-number": [
        ("metadata.name", "Invalid", "put the value in quotes"),
    ],
    "network-of-none": [
        ("spec.resources.network", "NotSupported", "must be one of auto, tcp, rdma, efa"),
    ],
    "no-dataset": [
        ("spec.dataset", "Required", "is required for training"),
        ("spec.predict.dataset", "Required", "is required without spec.dataset, whose test or "),
    ],
    "no-name": [
        ("metadata.name", "Required", "is required"),
    ],
    "not-yet-supported": [
        ("spec.launcher", "NotYetSupported", "is not supported in this version"),
        ("spec.storage.workspace", "NotYetSupported", "is not supported in this version"),
        ("spec.runPolicy.queue", "NotYetSupported", "is not supported in this version"),
    ],
    "nothing-to-do": [
        ("spec.training", "Required", "at least one of spec.training, spec.evaluation and spec"),
    ],
    "offload-at-stage-0": [
        ("spec.parallelism.offload.optimizer", "Invalid", "needs a ZeRO stage from 1 to 3"),
    ],
    "other-version": [
        ("apiVersion", "NotSupported", "must be finetune.dev/v1alpha1, the version that is serve"),
    ],
    "pair-for-tokens": [
        ("spec.dataset.columns.textPair", "Invalid", "applies to text-classification only"),
    ],
    "queue": [
        ("spec.runPolicy.queue", "NotYetSupported", "is not supported in this version"),
    ],
    "remote-code": [
        ("spec.model.trustRemoteCode", "Forbidden", "runs code of the model's author, which the settings do not"),
    ],
    "run-policy-values": [
        ("spec.runPolicy.activeDeadlineSeconds", "Invalid", "must be an integer of at least 1"),
        ("spec.runPolicy.ttlSecondsAfterFinished", "Invalid", "must be an integer of at least 0"),
        ("spec.runPolicy.maxRestarts", "Invalid", "must be an integer from 0 to 1000"),
        ("spec.runPolicy.onOutOfMemory", "NotSupported", "must be one of adapt, fail"),
        ("spec.runPolicy.priorityClassName", "Invalid", "must be a name of lowercase letters, digits, - and . that"),
    ],
    "script-beside-the-loop": [
        ("spec.training.epochs", "Invalid", "cannot be combined with spec.training.script, which"),
        ("spec.training.learningRate", "Invalid", "cannot be combined with spec.training.script, which"),
        ("spec.training.arguments", "Invalid", "cannot be combined with spec.training.script, which"),
        ("spec.parallelism.strategy", "Invalid", "cannot be combined with spec.training.script, which"),
        ("spec.checkpoints.every", "Invalid", "cannot be combined with spec.training.script, which"),
        ("spec.preparation.maxLength", "Invalid", "cannot be combined with spec.training.script, which"),
    ],
    "script-form": [
        ("spec.training.script.git.ref", "Invalid", "must be a branch, tag or commit"),
        ("spec.training.script.git.path", "Invalid", "must be a relative path without :, at most 256 characters"),
        ("spec.training.script.entryPoint", "Invalid", "must stay inside the repository"),
        ('spec.training.script.hyperparameters["--x"]', "Invalid", "must be a name of letters, digits, -, _ and ."),
        ('spec.training.script.hyperparameters["a b"]', "Invalid", "must be a name of letters, digits, -, _ and ."),
        ("spec.training.script.hyperparameters.nul", "Invalid", "contains a NUL character, which a command-line"),
    ],
    "script-host": [
        ("spec.training.script.git.url", "Forbidden", "is a local or cloud metadata address, which is never"),
    ],
    "script-url": [
        ("spec.training.script.git.url", "Invalid", "must be an HTTPS URL of a host and a path, without user,"),
    ],
    "secret-as-text": [
        ("spec.secrets.hubToken", "Invalid", "must be an object with the fields name, key"),
        ("spec.secrets.storage.name", "Invalid", "must be a name of lowercase letters, digits, - and . that"),
    ],
    "secret-key-form": [
        ("spec.secrets.hubToken.key", "Invalid", "must be a key of letters, digits, -, _ and ., at most 25"),
    ],
    "security-out": [
        (
            "spec.template.securityContext.privileged",
            "Forbidden",
            "is a setting of the container, which the operator controls",
        ),
        (
            "spec.template.securityContext.procMount",
            "Forbidden",
            "is a setting of the container, which the operator controls",
        ),
        ("spec.template.securityContext.sysctls", "Forbidden", "would change the node's kernel"),
        ("spec.template.securityContext.windowsOptions", "Forbidden", "is for Windows; trainers run on Linux"),
        (
            "spec.template.securityContext.seccompProfile.type",
            "NotSupported",
            "must be one of RuntimeDefault, Localhost",
        ),
        ("spec.template.securityContext.seLinuxOptions.user", "Unknown", "there is no such field"),
    ],
    "security-root": [
        ("spec.template.securityContext.runAsUser", "Forbidden", "would run the trainer as root"),
        ("spec.template.securityContext.runAsNonRoot", "Forbidden", "would run the trainer as root"),
    ],
    "single-with-many": [
        ("spec.parallelism.strategy", "Invalid", "single runs one process, and spec.resources requests more"),
    ],
    "steps-too-many": [
        ("spec.training.maxSteps", "Invalid", "must be an integer of at least 1"),
        ("spec.training.globalBatchSize", "Invalid", "must be an integer of at least 1"),
        ("spec.resources.nodes", "Invalid", "must be an integer from 1 to 10000"),
        ("spec.resources.gpusPerNode", "Invalid", "must be auto or an integer from 0 to 64"),
    ],
    "storage-in-buckets": [
        ("spec.model.uri", "NotYetSupported", "is not supported in this version"),
        ("spec.dataset.uri", "NotYetSupported", "is not supported in this version"),
        ("spec.storage.workspace", "NotYetSupported", "is not supported in this version"),
        ("spec.storage.cache", "NotYetSupported", "is not supported in this version"),
        ("spec.checkpoints.uri", "NotYetSupported", "is not supported in this version"),
        ("spec.predict.output", "NotYetSupported", "is not supported in this version"),
    ],
    "storage-size-form": [
        ("spec.storage.size", "Invalid", "must be a quantity such as 8, 500m or 64Gi"),
    ],
    "storage-size": [
        ("spec.storage.storageClassName", "Invalid", "must be a name of lowercase letters, digits, - and . that"),
        ("spec.storage.size", "Invalid", "is less than 1Mi: a number without a unit counts bytes"),
    ],
    "template-labels": [
        ("spec.template.labels", "Invalid", "must not use the prefixes finetune.dev/, training"),
        ("spec.template.annotations", "Invalid", "must not use the prefixes finetune.dev/, training"),
        ('spec.template.labels["a b"]', "Invalid", "a label key is an optional DNS name and /, and a name of"),
        ("spec.template.labels.tier", "Invalid", "a label value has at most 63 letters, digits, -, _ and .,"),
        ("spec.template.nodeSelector.gpu", "Invalid", "a label value has at most 63 letters, digits, -, _ and .,"),
    ],
    "template-names": [
        ("spec.template.serviceAccountName", "Invalid", "must be a name of lowercase letters, digits, - and . that"),
        (
            "spec.template.imagePullSecrets[2].name",
            "Invalid",
            "must be a name of lowercase letters, digits, - and . that",
        ),
    ],
    "template-no-objects": [
        ("spec.template.tolerations[0]", "Invalid", "must be an object of at most 256 fields"),
        ("spec.template.env[0]", "Invalid", "must be an object of at most 256 fields"),
        ("spec.template.volumes[0]", "Invalid", "must be an object of at most 256 fields"),
        ("spec.template.securityContext", "Invalid", "must be an object of at most 256 fields"),
    ],
    "template-odds": [
        ('spec.template.annotations["a b"]', "Invalid", "a label key is an optional DNS name and /, and a name of"),
        (
            'spec.template.annotations["container.apparmor.security.beta.kubernetes.io/trainer"]',
            "Forbidden",
            "would weaken the pod's isolation, or attach it to another",
        ),
        (
            'spec.template.annotations["sidecar.istio.io/inject"]',
            "Forbidden",
            'leave it out, or set it to "false"',
        ),
        ("spec.template.tolerations[0].value", "Invalid", "a label value has at most 63 letters, digits, -, _ and .,"),
        ("spec.template.tolerations[1].operater", "Unknown", "did you mean operator?"),
        (
            "spec.template.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].values[0]",
            "Invalid",
            "a label value has at most 63 letters, digits, -, _ and .,",
        ),
        (
            "spec.template.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey",
            "Invalid",
            "a label key is an optional DNS name and /, and a name of",
        ),
        ("spec.template.env[0].name", "Forbidden", "controls which code runs in the image"),
        ("spec.template.env[1].value", "Forbidden", "MY_PASSWORD is the name of a credential, which a job must"),
        (
            "spec.template.volumeMounts[0].mountPath",
            "Forbidden",
            "overlaps /usr, which holds code and settings of the image",
        ),
        ("spec.template.volumeMounts[1].subPathExpr", "Invalid", "is not allowed together with subPath"),
        (
            "spec.template.securityContext.seccompProfile",
            "Invalid",
            "localhostProfile is required for type Localhost, and only",
        ),
        ("spec.template.securityContext.appArmorProfile.localhostProfile", "Forbidden", "must not contain .."),
    ],
    "token-in-plain-text": [
        ("spec.model.uri", "Forbidden", "looks like a Hub token, which a job must not contain"),
        ("spec.template.env[0].value", "Forbidden", "looks like a Hub token, which a job must not contain"),
    ],
    "toleration-forms": [
        ("spec.template.tolerations[0].operater", "Unknown", "did you mean operator?"),
        ("spec.template.tolerations[1].operator", "Invalid", "must be Exists if there is no key"),
        ("spec.template.tolerations[2].value", "Invalid", "is not allowed with operator Exists"),
        ("spec.template.tolerations[3].tolerationSeconds", "Invalid", "needs effect NoExecute"),
        ("spec.template.tolerations[4].operator", "NotSupported", "must be one of Exists, Equal"),
        ("spec.template.tolerations[5].key", "Invalid", "a label key is an optional DNS name and /, and a name of"),
    ],
    "too-many-processes": [
        ("spec.resources.processesPerNode", "Invalid", "must not exceed spec.resources.gpusPerNode: each GPU"),
    ],
    "training-arguments": [
        ("spec.training.arguments.learning_rate", "Forbidden", "is set by spec.training.learningRate"),
        ("spec.training.arguments.adam_beta", "Unknown", "Did you mean adam_beta2?"),
        ("spec.training.arguments.adam_beta2", "Invalid", "write numbers and booleans without quotes"),
        ("spec.training.arguments.ddp_backend", "Forbidden", "has no effect: the trainer handles this itself"),
        ("spec.training.arguments.report_to", "Invalid", "must be one or a list of tensorboard, mlflow, wandb"),
        ("spec.training.arguments.train_sampling_strategy", "Invalid", "must be one of random, group_by_length"),
    ],
    "unknown-field": [
        ("spec.training.learning_rate", "Unknown", "did you mean learningRate?"),
        ("spec.resources.gpuPerNode", "Unknown", "did you mean gpusPerNode?"),
    ],
    "volume-sizes": [
        (
            "spec.template.volumes[0].emptyDir.sizeLimit",
            "Invalid",
            "is less than 1Mi: a number without a unit counts bytes",
        ),
    ],
    "volume-forms": [
        ("spec.template.volumes[0].emtyDir", "Unknown", "did you mean emptyDir?"),
        ("spec.template.volumes[1]", "Invalid", "takes exactly one of configMap, csi, downwardAPI, emptyD"),
        ("spec.template.volumes[2]", "Invalid", "takes exactly one of configMap, csi, downwardAPI, emptyD"),
        ("spec.template.volumes[3].configMap.name", "Required", "is required"),
        ("spec.template.volumes[3].configMap.nam", "Unknown", "did you mean name?"),
        (
            "spec.template.volumes[4].persistentVolumeClaim.claimName",
            "Invalid",
            "must be a name of lowercase letters, digits, - and . that",
        ),
        ("spec.template.volumes[5].emptyDir.sizeLimit", "Invalid", "must be a quantity such as 8, 500m or 64Gi"),
        ("spec.template.volumes[8].name", "Invalid", "must be a name of lowercase letters, digits and - that"),
        ("spec.template.volumes[7].name", "Duplicate", "is a duplicate"),
    ],
    "volume-host-path": [
        (
            "spec.template.volumes[0].hostPath",
            "Forbidden",
            "is a volume type that PodSecurity restricted does not allow",
        ),
        ("spec.template.volumes[1].nfs", "Forbidden", "is a volume type that PodSecurity restricted does not allow"),
    ],
    "volume-progress-token": [
        (
            "spec.template.volumes[0].projected.sources[0].serviceAccountToken.audience",
            "Forbidden",
            "is reserved for the operator's own tokens",
        ),
    ],
    "volume-reserved": [
        ("spec.template.volumes[0].name", "Forbidden", "is reserved for a volume of the operator"),
        ("spec.template.volumes[1].name", "Forbidden", "is reserved for a volume of the operator"),
        ("spec.template.volumes[2].name", "Forbidden", "is reserved for a volume of the operator"),
        ("spec.template.volumes[3].name", "Forbidden", "is reserved for a volume of the operator"),
    ],
    "wrong-types": [
        ("spec.training.epochs", "Invalid", "without quotes"),
        ("spec.training.microBatchSize", "Invalid", "must be auto or an integer of at least 1"),
        ("spec.training.scheduler", "NotSupported", "write cosine"),
        ("spec.training.seed", "Invalid", "must be an integer of at least 0"),
        ("spec.training.earlyStopping", "Invalid", "must be an object with the fields metric, patience"),
        ("spec.resources.processesPerNode", "Invalid", "must be auto or an integer from 1 to 1024"),
        ("spec.resources.memory", "Invalid", "must be a quantity such as 8, 500m or 64Gi"),
        ("spec.resources.sharedMemory", "Invalid", "must be auto or a quantity such as 8, 500m or 64Gi"),
        ("spec.evaluation.metrics", "Invalid", "must be auto or a list of 1 to 32 items, each text of 1"),
    ],
    "yaml-alias-bomb": [
        ("", "NotSupported", "aliases must not make up nearly all of a document"),
    ],
    "other-files": [
        ("spec.dataset.uri", "Invalid", "save the rows as .csv (UTF-8), .jsonl or .parquet, and name that file"),
        ("spec.predict.dataset.uri", "Invalid", ".zip files cannot be read"),
    ],
    "split-forms": [
        ("spec.dataset.splits.train", "Invalid", "write train[:80%], and train[80%:] for the split that gets the rest"),
        ("spec.dataset.splits.validation", "Invalid", "write train[90%:], and train[:90%] for spec.dataset.splits.t"),
        ("spec.dataset.splits.test", "Invalid", "is neither the name of a split nor a slice such as"),
        ("spec.predict.dataset.splits.train", "Invalid", "write train"),
        ("spec.predict.dataset.splits.validation", "Invalid", "is a fraction of rows, and a split of files is a file"),
        ("spec.predict.dataset.splits.test", "Invalid", "is a fraction of rows, and a split of files is a file"),
    ],
    "yaml-bad-indent": [
        ("", "Syntax", "check that fields of one object start in the same column"),
    ],
    "yaml-duplicate-key": [
        ("spec.training.epochs", "Duplicate", "a field may be set once; it is already set on line 9"),
    ],
    "yaml-tab": [
        ("", "Syntax", "indent with spaces: line 6 begins with a tab"),
        ("spec.model", "Required", "write it with uri"),
        ("spec.training", "Required", "write `training: {}`"),
    ],
    "zero-stage-with-ddp": [
        ("spec.parallelism.zeroStage", "Invalid", "is a DeepSpeed setting and needs spec.parallelism.strate"),
        ("spec.parallelism.deepspeedConfig", "Invalid", "needs spec.parallelism.strategy deepspeed"),
        ("spec.parallelism.offload", "Invalid", "needs spec.parallelism.strategy deepspeed or fsdp"),
    ],
}


def problems_of(path: Path, settings: Settings = LOCAL_SETTINGS) -> list[Problem]:
    documents, problems = read_documents(path.read_text(encoding="utf-8"))
    return problems + [found for document in documents for found in validate_job(document.value, settings)[1]]


def job(**spec: Any) -> dict[str, Any]:
    whole = {
        "task": "text-classification",
        "model": {"uri": "hf://a/b"},
        "dataset": {"uri": "hf://c/d"},
        "training": {},
        **spec,
    }
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "a"},
        "spec": {name: value for name, value in whole.items() if value is not ...},
    }


def found(value: Any, settings: Settings = LOCAL_SETTINGS) -> list[tuple[str, str]]:
    return [(problem.path, problem.reason) for problem in validate_job(value, settings)[1]]


def test_job_files_are_many_and_begin_with_a_comment() -> None:
    assert len(GOOD) >= 25
    assert sorted(BAD) == sorted(path.stem for path in (JOBS / "bad").glob("*.yaml"))
    assert len(BAD) >= 65
    files = [*(JOBS / "good").glob("*.yaml"), *(JOBS / "bad").glob("*.yaml")]
    assert [file.name for file in files if not file.read_text(encoding="utf-8").startswith("# ")] == []


@pytest.mark.parametrize("name", GOOD)
def test_a_good_job_has_no_problem(name: str) -> None:
    assert problems_of(JOBS / "good" / f"{name}.yaml") == []


@each_case("name", BAD)
def test_a_bad_job_has_these_problems_and_no_other(name: str) -> None:
    problems = problems_of(JOBS / "bad" / f"{name}.yaml")
    assert [(problem.path, problem.reason) for problem in problems] == [row[:2] for row in BAD[name]]
    for problem, (_, _, part) in zip(problems, BAD[name], strict=True):
        assert part in f"{problem.rule} | {problem.hint}"


@each_case("name", BAD)
def test_no_message_speaks_the_language_of_a_library_or_repeats_a_token(name: str) -> None:
    for problem in problems_of(JOBS / "bad" / f"{name}.yaml"):
        text = f"{problem.path} {problem.value} {problem.rule} {problem.hint}"
        for phrase in ("Input should", "pydantic", "literal[", "constrained", "valid integer", "hf_abc"):
            assert phrase not in text
        assert problem.rule
        assert problem.hint


def test_a_job_with_a_problem_is_not_returned() -> None:
    assert validate_job(job(), LOCAL_SETTINGS)[0] is not None
    assert validate_job(job(image="X y"), LOCAL_SETTINGS)[0] is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [("", "Invalid")]),
        ([], [("", "Invalid")]),
        ("text", [("", "Invalid")]),
        ({}, [("apiVersion", "Required"), ("kind", "Required"), ("metadata.name", "Required"), ("spec", "Required")]),
        ({**job(), "spec": []}, [("spec", "Invalid")]),
        ({**job(), "spec": {}}, [("spec.task", "Required"), ("spec.model", "Required"), ("spec.training", "Required")]),
        ({**job(), "extra": 1}, [("extra", "Unknown")]),
        ({**job(), "metadata": {"name": "a" * 64}}, [("metadata.name", "Invalid")]),
        ({**job(), "metadata": {"name": "a", "namespace": "a.b"}}, [("metadata.namespace", "Invalid")]),
        (job(predict={"columns": ["a", 1]}), [("spec.predict.columns[1]", "Invalid")]),
        (job(training={"script": {"git": {}}}), [("spec.training.script.git.url", "Required")]),
        (job(evaluation={"gate": {"metric": "f1"}}), [("spec.evaluation.gate", "Invalid")]),
        (
            job(task=5, training={"epochs": -1, "maxSteps": 1}),
            [("spec.task", "Invalid"), ("spec.training.epochs", "Invalid")],
        ),
    ],
)  # fmt: skip
def test_any_json_value_gets_an_answer(value: Any, expected: list[tuple[str, str]]) -> None:
    assert found(value) == expected


STRANGE = ("no such word", "", "auto", -1.5, 2**70, True, [], {}, [1], {"k": None}, [[]], {"auto": 1}, [None])


def kind_of(field: str) -> tuple[str, bool]:
    """Return the form of a field below spec."""
    shape = find(spec_shape(), field.split("."))
    assert shape is not None
    return type(shape.body).__name__, bool(shape.words)


def test_any_value_in_any_field_is_accepted_or_blamed_once_on_that_field(pytestconfig: pytest.Config) -> None:
    for leaf, strange in pairs_of(leaves(spec_shape()), STRANGE, kind_of, pytestconfig.getoption("--everything")):
        value = job()
        target = value["spec"]
        *above, last = leaf.split(".")
        for part in above:
            target = target.setdefault(part, {})
        target[last] = strange
        read, problems = validate_job(value, LOCAL_SETTINGS)
        assert (read is None) == bool(problems), (leaf, strange)
        paths = [problem.path for problem in problems if problem.reason not in ("NotYetSupported", "Required")]
        assert len(set(paths)) == len(paths), (leaf, strange, problems)
        assert "Traceback" not in str(problems), (leaf, strange)
        if any(problem.reason in ("Invalid", "NotSupported", "Unknown") for problem in problems):
            assert any(path.startswith(f"spec.{leaf.split('.')[0]}") for path in paths), (leaf, strange, problems)


def test_a_missing_choice_of_stage_is_reported_with_the_other_faults() -> None:
    assert found(job(training=..., launcher="slurm")) == [
        ("spec.launcher", "NotSupported"),
        ("spec.training", "Required"),
    ]


def test_faulty_field_does_not_hide_contradictions_of_other_fields() -> None:
    assert found(job(training={"learningRate": "fast", "epochs": 3, "maxSteps": 10}, dataset=...)) == [
        ("spec.training.learningRate", "Invalid"),
        ("spec.dataset", "Required"),
        ("spec.training.maxSteps", "Invalid"),
    ]


def test_local_uris_are_refused_in_a_cluster_and_accepted_without_one() -> None:
    value = job(model={"uri": "pkg://a/b"}, dataset={"uri": "file:///c"})
    assert found(value, LOCAL_SETTINGS) == []
    assert found(value, CLUSTER_SETTINGS) == [("spec.model.uri", "Forbidden"), ("spec.dataset.uri", "Forbidden")]


def test_remote_code_needs_a_repository_that_the_settings_allow() -> None:
    value = job(model={"uri": "hf://org/name", "trustRemoteCode": True})
    assert found(value, Settings(trustRemoteCode=("org/*",))) == []
    assert found(value, Settings(trustRemoteCode=("other/*",))) == [("spec.model.trustRemoteCode", "Forbidden")]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}, True),
        ({"apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "x-"}}, True),
        ({"kind": "ConfigMap", "metadata": {"name": "x"}}, False),
        ({"apiVersion": "v1", "metadata": {"name": "x"}}, False),
        ({"apiVersion": "v1", "kind": "ConfigMap"}, False),
        ({"apiVersion": "finetune.dev/v1beta1", "kind": "FineTuneJob", "metadata": {"name": "x"}}, False),
        ({"apiVersion": "finetune.dev/v1alpha1", "kind": "FinetuneJob", "metadata": {"name": "x"}}, False),
        ([], False),
    ],
)
def test_only_a_whole_object_of_another_project_is_ignored(value: Any, expected: bool) -> None:
    assert (foreign(value) is not None) is expected


def test_value_is_shown_next_to_an_invalid_required_field() -> None:
    _, problems = validate_job(job(model={"uri": "org/name", "revison": "main"}), LOCAL_SETTINGS)
    assert [(problem.path, problem.value) for problem in problems] == [
        ("spec.model.uri", '"org/name"'),
        ("spec.model.revison", '"main"'),
    ]


def test_an_object_that_is_written_as_one_value_is_explained() -> None:
    _, problems = validate_job(job(model="hf://org/name", training=True), LOCAL_SETTINGS)
    assert [(problem.path, problem.hint) for problem in problems] == [
        ("spec.model", "write {uri: hf://org/name}"),
        ("spec.training", "write {}, which takes the defaults"),
    ]


def test_hint_for_a_missing_field_lists_its_values() -> None:
    value = job()
    value["spec"] = {"training": {}, "dataset": {"uri": "hf://org/rows"}}
    _, problems = validate_job(value, LOCAL_SETTINGS)
    assert [(problem.path, problem.hint) for problem in problems] == [
        (
            "spec.task",
            "write one of text-classification, token-classification, question-answering, text-generation, "
            "preference-tuning, summarization, translation, masked-lm",
        ),
        ("spec.model", "write it with uri below it, e.g. {uri: hf://org/name}"),
    ]


def test_types_of_training_arguments_are_named_as_in_yaml() -> None:
    value = job(training={"arguments": {"adam_beta2": "high", "dataloader_pin_memory": 3, "optim_args": 1}})
    _, problems = validate_job(value, LOCAL_SETTINGS)
    assert [problem.rule for problem in problems] == ["must be a number", "must be true or false", "must be text"]
