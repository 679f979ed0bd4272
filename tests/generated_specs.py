"""Specs of FineTuneJobs as hypothesis makes them: most are good or nearly so, and their texts are hostile.

What a field takes comes from the API's own shapes; where a form alone would hardly ever make a good value (URIs,
Kubernetes' own objects), values are listed here.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from finetune_operator.api.shapes import (
    Anything,
    Boolean,
    Fields,
    Items,
    Map,
    Number,
    Scalars,
    Shape,
    Text,
    leaves,
    spec_shape,
)
from finetune_operator.api.support import ROWS
from finetune_operator.launchers.launcher_rows import TRAINING

NASTY = (
    "{{ job }}", "{% raw %}", "$(HOME)", "$$(HOME)", "${PATH}", "`id`", "it's", '"hi"', "a\nb", "a\r\nb",
    "\ttab", "# x", "- item", "--- ", "key: value", "&a *a", "!!python/object", "null", "true", "1e3", "0x10", "~",
    "%s", "\u2028", "\u0085", "\U0001f917 Gesicht", "日本語", "\x7f", "\\n", "</script>", "' or 1=1 --", "a\x00b",
)  # fmt: skip
texts = st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda text: text != "auto"
)
"""Names that users choose: any text but `auto`, so that a stray `auto` can be told from one of theirs."""

_URIS = st.sampled_from(
    [
        *["hf://org/model", "hf://microsoft/deberta-v3-base", "pvc://models/bert", "pvc://data"] * 5,
        "s3://b/x",
        "file:///x",
    ]
)
_CLAIMS = st.sampled_from(["pvc://results", "pvc://results/team/a", "s3://bucket"])
_QUANTITIES = st.sampled_from(["1", "4", "500m", "8Gi", "64Gi", "512Mi", "1500M"])
_NAMES = st.sampled_from(["a", "team-a", "some.name", "x1"])
_ENV = st.fixed_dictionaries({"name": st.sampled_from(["MY_FLAG", "HTTP_PROXY", "RANK", "A"]), "value": texts})
_VOLUME = st.sampled_from(
    [
        {"name": "extra", "emptyDir": {}},
        {"name": "extra", "configMap": {"name": "files"}},
        {"name": "host", "hostPath": {"path": "/"}},
        {"name": "workspace", "emptyDir": {}},
    ]
)

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "task": st.sampled_from(["text-classification"] * 9 + ["translation"]),
    "model.uri": _URIS,
    "dataset.uri": _URIS,
    "predict.dataset.uri": _URIS,
    "predict.output": _CLAIMS | st.sampled_from(["pvc://results/out.jsonl", "pvc://other/p.parquet"]),
    "storage.workspace": _CLAIMS,
    "storage.cache": _CLAIMS,
    "checkpoints.uri": _CLAIMS,
    "checkpoints.every": st.sampled_from(["auto", {"steps": 5}, {"minutes": 2.5}, {"steps": 5, "minutes": 1}]),
    "training.globalBatchSize": st.sampled_from([8, 16, 32, 64, 96, 256, 7]),
    "training.microBatchSize": st.sampled_from(["auto", 1, 2, 4, 8, 3]),
    "training.arguments": st.sampled_from([{}, {"adam_beta1": 0.8}, {"tf32": True}, {"lerning_rate": 1}]),
    "training.warmupSteps": st.sampled_from([0, 0.1, 10, 2.5]),
    "parallelism.deepspeedConfig": st.sampled_from([{}, {"gradient_clipping": 1.0}, {"zero_optimisation": {}}]),
    "parallelism.tensor": st.sampled_from([1, 1, 1, 2]),
    "parallelism.sequence": st.sampled_from([1, 1, 1, 2]),
    "parallelism.pipeline.degree": st.sampled_from([1, 1, 1, 2]),
    "resources.nodes": st.sampled_from([1, 1, 2, 3, 8]),
    "resources.gpusPerNode": st.sampled_from([0, 0, 1, 2, 8, "auto"]),
    "resources.processesPerNode": st.sampled_from(["auto", "auto", 1, 2, 8]),
    "resources.cpu": _QUANTITIES,
    "resources.memory": st.sampled_from(["16Gi", "64Gi", "512Mi"]),
    "resources.accelerator.memory": st.sampled_from(["80Gi", "16Gi"]),
    "resources.elastic": st.just({"minNodes": 1, "maxNodes": 2}),
    "launcher": st.sampled_from(["auto", *TRAINING, "trainjob"]),
    "endpoint": st.just({}),
    "spot.enabled": st.sampled_from([False, False, True]),
    "secrets.hubToken": st.sampled_from([{"name": "hub"}, {"name": "hub", "key": "t"}]),
    "secrets.storage": st.just({"name": "keys"}),
    "checkpoints.signingKey": st.sampled_from([{"name": "signing"}, {"name": "signing", "key": "k"}]),
    "template.labels": st.dictionaries(st.sampled_from(["team", "a.b/x", "finetune.dev/job"]), _NAMES, max_size=2),
    "template.annotations": st.dictionaries(st.sampled_from(["note", "example.com/x"]), texts, max_size=2),
    "template.nodeSelector": st.dictionaries(st.sampled_from(["zone", "example.com/x"]), _NAMES, max_size=2),
    "template.tolerations": st.lists(st.sampled_from([{"operator": "Exists"}, {"effekt": "x"}]), max_size=1),
    "template.affinity": st.sampled_from([{}, {"podAntiAffinity": {}}]),
    "template.env": st.lists(_ENV, max_size=2),
    "template.volumes": st.lists(_VOLUME, max_size=1),
    "template.volumeMounts": st.lists(st.just({"name": "extra", "mountPath": "/extra"}), max_size=1),
    "template.securityContext": st.sampled_from([{}, {"fsGroup": 2000}, {"runAsUser": 0}]),
    "image": st.sampled_from(["example.com/trainer:1", "trainer@sha256:" + "0" * 64]),
    "runPolicy.queue": st.sampled_from(["team"]),
    "runPolicy.managedBy": st.sampled_from(["example.com/other", "finetune.dev/operator"]),
    "evaluation": st.sampled_from([{}, {"gate": {"metric": "accuracy", "minimum": 0.5}}, {"metrics": ["f1"]}]),
    "predict": st.just({}),
    "training": st.just({}),
}  # fmt: skip


def _strategy(path: str, shape: Shape) -> st.SearchStrategy[Any]:
    if path in VALUES:
        return VALUES[path]
    words = [st.sampled_from(shape.words)] if shape.words else []
    body = [] if shape.body is None else [_body(path, shape.body)]
    return st.one_of(*words, *body)


def _body(path: str, body: Any) -> st.SearchStrategy[Any]:
    match body:
        case Text(quantity=True):
            return _QUANTITIES
        case Text(pattern=None):
            return texts
        case Text():
            return _NAMES
        case Number(integer=True, minimum=minimum, above=above):
            low = int(minimum or 0) + above
            return st.integers(low, low + 100)
        case Number(minimum=minimum, maximum=maximum, above=above, below=below):
            return st.floats(
                minimum or 0, min(maximum or 10, 10), exclude_min=above, exclude_max=below, allow_subnormal=False
            )
        case Boolean():
            return st.booleans()
        case Items(item=item):
            return st.lists(_strategy(f"{path}[]", item), min_size=1, max_size=3, unique_by=repr)
        case Map(value=value):
            return st.dictionaries(texts, _strategy(f"{path}{{}}", value), max_size=2)
        case Scalars() | Anything():
            return texts | st.integers() | st.booleans()
        case Fields(fields=fields):
            return st.fixed_dictionaries({}, optional={n: _strategy(f"{path}.{n}", s) for n, s in fields.items()})
        case _:
            raise TypeError(f"no values for {path}: {body}")


_MISSING = tuple(row.path for row in ROWS if not row.values and not row.schemes)
"""Fields without behaviour: a spec that sets one is refused, so that most specs should not."""
LEAVES = {path: _strategy(path, shape) for path, shape in leaves(spec_shape()).items()}


_OTHER_COLUMNS = ("tokens", "tags", "question", "context", "answers", "source", "target", "messages")
_SELDOM = (
    *_MISSING,
    *(f"{block}.columns.{name}" for block in ("dataset", "predict.dataset") for name in _OTHER_COLUMNS),
    "evaluation.gate", "resources.elastic", "resources.accelerator", "training.script", "task", "parallelism.offload",
)  # fmt: skip
_usual = st.sampled_from(sorted(path for path in LEAVES if not path.startswith(_SELDOM)))


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """A spec with up to eight fields beside the required ones."""
    spec: dict[str, Any] = {"task": draw(LEAVES["task"]), "model": {"uri": draw(LEAVES["model.uri"])}}
    spec["dataset"] = {"uri": draw(LEAVES["dataset.uri"])}
    if draw(st.integers(0, 5)):
        spec["training"] = {}
    else:
        spec["evaluation"] = {}
    for path in draw(st.lists(_usual | _usual | _usual | st.sampled_from(sorted(LEAVES)), max_size=8, unique=True)):
        _put(spec, path.split("."), draw(LEAVES[path]))
    if isinstance(predict := spec.get("predict"), dict) and isinstance(rows := predict.get("dataset"), dict):
        rows.setdefault("uri", "hf://org/rows")
    return spec


def _put(spec: dict[str, Any], parts: list[str], value: Any) -> None:
    *above, last = parts
    for part in above:
        inner = spec.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        spec = inner
    if not (isinstance(spec.get(last), dict) and value == {}):
        spec[last] = value
