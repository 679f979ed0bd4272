"""Rules on data: rows, splits, locations, generated text."""

from __future__ import annotations

import re

from finetune_operator.spec.rules.column_rules import columns_differ, leak_advice
from finetune_operator.spec.rules.rule import Rule, chosen_cel, value_of
from finetune_operator.spec.types import DNS_SUBDOMAIN_PATTERN, FineTuneJobSpec


def _predictions_advice(spec: FineTuneJobSpec) -> str:
    """Return the output with a supported ending, at a writable location."""
    scheme, _, rest = str(value_of(spec, "predict.output")).partition("://")
    named = re.sub(r"\.(?:csv|tsv|json|txt|arrow|xlsx?)$", "", rest.rstrip("/")) or "predictions"
    if scheme not in ("file", "pvc"):
        return f"name it pvc://CLAIM/{named.rpartition('/')[2]}.jsonl, or leave it out to write to the workspace"
    return f"write {scheme}://{named}.jsonl, or the same with .parquet, or with / for a folder"


def _hub_only_rule(path: str, uri: str) -> Rule:
    return Rule(
        f"{path}-needs-hub",
        path,
        f"!({chosen_cel(path)}) || self.{uri}.startsWith('hf://')",
        f"applies to the Hub only: spec.{uri} must begin with hf://",
        "leave it out, or name a Hub repository",
    )


_CLAIM = rf"^pvc://{DNS_SUBDOMAIN_PATTERN.strip('^$')}(/.*)?$".replace("\\", "\\\\")
"""Pattern as CEL text, where a backslash is written twice."""
_PARENT_STEP = "/[.][.](/|$)"
_CLAIM_HINT = "write the claim's name after pvc://: lowercase letters, digits and -"


def _names_a_claim(uri: str) -> str:
    """Return CEL: if the URI begins with `pvc://`, it names a claim of the job's namespace and a path in it."""
    return f"!{uri}.startsWith('pvc://') || ({uri}.matches('{_CLAIM}') && !{uri}.matches('{_PARENT_STEP}'))"


def _claim_rule(path: str) -> Rule:
    return Rule(
        f"{path}-names-a-claim",
        path,
        f"!({chosen_cel(path)}) || {_names_a_claim(f'self.{path}')}",
        "must be pvc://claim or pvc://claim/path, with a claim of the job's namespace and no .. in the path",
        _CLAIM_HINT,
    )


SOMETHING_TO_DO = Rule(
    "something-to-do",
    "training",
    "has(self.training) || has(self.evaluation) || has(self.predict) || has(self.endpoint)",
    "at least one of spec.training, spec.evaluation and spec.predict is needed",
    "write `training: {}` to train with the defaults",
)

RULES: tuple[Rule, ...] = (
    SOMETHING_TO_DO,
    Rule(
        "stages-need-dataset",
        "dataset",
        "has(self.dataset) || (!has(self.training) && !has(self.evaluation))",
        "is required for training and evaluation",
        "set spec.dataset.uri, such as hf://ORG/NAME, or leave out spec.training and spec.evaluation",
    ),
    Rule(
        "predict-needs-dataset",
        "predict.dataset",
        "!has(self.predict) || has(self.dataset) || has(self.predict.dataset)",
        "is required without spec.dataset, whose test or validation split would be predicted",
        "set spec.predict.dataset.uri or spec.dataset.uri",
    ),
    Rule(
        "windows-overlap-in-part",
        "preparation.stride",
        "!has(self.preparation.stride) || !has(self.preparation.maxLength)"
        " || 2 * self.preparation.stride <= self.preparation.maxLength",
        "must be at most half of spec.preparation.maxLength",
        "make it smaller, or leave it out",
    ),
    Rule(
        "predictions-have-a-format",
        "predict.output",
        f"!({chosen_cel('predict.output')}) || self.predict.output.endsWith('.jsonl')"
        " || self.predict.output.endsWith('.parquet') || self.predict.output.endsWith('/')",
        "must end in .jsonl or .parquet, which also sets the format, or in / for a folder of parts",
        "add .jsonl, .parquet or /",
        advice=_predictions_advice,
    ),
    Rule(
        "predictions-have-one-format",
        "predict.format",
        f"!({chosen_cel('predict.format')}) || !has(self.predict.output)"
        " || !self.predict.output.endsWith(self.predict.format == 'jsonl' ? '.parquet' : '.jsonl')",
        "differs from the extension of spec.predict.output, which sets the format of a file",
        "leave it out, or change the extension of spec.predict.output",
    ),
    Rule(
        "spark-has-executors",
        "predict.workers",
        f"!({chosen_cel('predict.engine', 'spark')})"
        " || type(self.predict.workers) != int || int(self.predict.workers) > 1",
        "leaves no executor: with spec.predict.engine spark, the driver is one of the workers",
        "set it to auto or at least 2, or leave spec.predict.engine out",
    ),
    Rule(
        "vllm-needs-a-server",
        "predict.server",
        f"!({chosen_cel('predict.optimization', 'vllm')}) || has(self.predict.server)",
        "is required with spec.predict.optimization vllm",
        "write the URL of an OpenAI-compatible server, such as http://vllm.team.svc:8000",
    ),
    Rule(
        "texts-need-references",
        "predict.metricTolerance",
        f"!({chosen_cel('predict.metricTolerance')})"
        " || !(has(self.predict.server) || self.predict.optimization == 'vllm')"
        " || !has(self.dataset) || !has(self.dataset.columns.text)",
        "compares generated texts with references, and rows of spec.dataset.columns.text have none",
        "use columns source and target, or messages; or spec.predict.tolerance, the share of equal texts",
    ),
    Rule(
        "kserve-runtime-reads-a-claim",
        "model.uri",
        f"!({chosen_cel('endpoint.kserveRuntime')}) || has(self.training) || self.model.uri.startsWith('pvc://')",
        "must be in a claim (pvc://) with spec.endpoint.kserveRuntime, or be trained by the job",
        "use pvc://",
    ),
    _hub_only_rule("model.revision", "model.uri"),
    _hub_only_rule("dataset.config", "dataset.uri"),
    _hub_only_rule("predict.dataset.config", "predict.dataset.uri"),
    *map(_claim_rule, ("model.uri", "dataset.uri", "predict.dataset.uri", "predict.output")),
    *map(_claim_rule, ("storage.workspace", "storage.cache")),
    Rule(
        "only-own-claims-are-deleted",
        "storage.retain",
        f"!({chosen_cel('storage.retain', 'delete')}) || !has(self.storage.workspace)",
        "deletes only a claim that the operator creates, and spec.storage.workspace names another one, which is kept",
        "leave it out, or leave out spec.storage.workspace",
    ),
    Rule(
        "endpoint.adapters-name-claims",
        "endpoint.adapters",
        f"!({chosen_cel('endpoint.adapters')}) || self.endpoint.adapters.all(each, {_names_a_claim('each.uri')})",
        "must have uris such as pvc://claim/path, with a claim of the job's namespace and no .. in the path",
        _CLAIM_HINT,
        reads=("endpoint.adapters",),
    ),
    Rule(
        "columns-differ",
        "dataset.columns",
        columns_differ(),
        "uses the same column as input and as target",
        "name two columns",
        advice=leak_advice,
        reads=("task", "dataset"),
    ),
)
