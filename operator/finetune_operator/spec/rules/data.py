"""Rules on data: rows, splits, locations, generated text."""

from __future__ import annotations

import re
from collections.abc import Callable

from finetune_contract.choices import GPU_RUNGS, RUNG_TASKS, TEXT_RUNGS, VLLM_TASKS, WRITING_TASKS
from finetune_operator.spec.problems import any_of
from finetune_operator.spec.rules.column_rules import columns_cel, leak_advice
from finetune_operator.spec.rules.rule import Rule, is_one_of
from finetune_operator.spec.types import DNS_SUBDOMAIN_PATTERN, FineTuneJobSpec


def _predictions_advice(spec: FineTuneJobSpec) -> str:
    """Return the output with a supported ending, at a writable location."""
    output = "" if spec.predict is None or spec.predict.output is None else spec.predict.output
    scheme, _, rest = output.partition("://")
    named = re.sub(r"\.(?:csv|tsv|json|txt|arrow|xlsx?)$", "", rest.rstrip("/")) or "predictions"
    if scheme not in ("file", "pvc"):
        return f"name it pvc://CLAIM/{named.rpartition('/')[2]}.jsonl, or leave it out to write to the workspace"
    return f"write {scheme}://{named}.jsonl, or the same with .parquet, or with / for a folder"


_OTHER_FORMAT = {"jsonl": "parquet", "parquet": "jsonl"}


def _format_advice(spec: FineTuneJobSpec) -> str:
    requested = "jsonl" if spec.predict is None or spec.predict.format is None else spec.predict.format
    return f"leave it out or write {_OTHER_FORMAT[requested]}, or give spec.predict.output the extension .{requested}"


def _beams_advice(spec: FineTuneJobSpec) -> str:
    if spec.generation.top_p < 1:
        return "leave it out: spec.generation.topP applies to sampling"
    return "leave it out to sample, or leave spec.generation.temperature out for beam search"


def _hub_only_rule(path: str, given: str, uri: str) -> Rule:
    return Rule(
        name=f"{path}-needs-hub",
        path=path,
        cel=f"!({given}) || self.{uri}.startsWith('hf://')",
        text=f"applies to the Hub only: spec.{uri} must begin with hf://",
        hint="leave it out, or name a Hub repository",
    )


def _claim_advice(uri: str) -> str:
    """Return the URI that claim and path with another separator mean, or where the name belongs."""
    found = re.fullmatch(r"pvc://+([a-z0-9](?:[a-z0-9-]*[a-z0-9])?)[:/]+([\w./-]*)", uri)
    if found is not None and _names_a_claim(meant := f"pvc://{found[1]}/{found[2]}".rstrip("/")):
        return f"write {meant}"
    return "write the claim's name after pvc://: lowercase letters, digits and -"


def _claim_rule(path: str, given: str, read: Callable[[FineTuneJobSpec], str | None]) -> Rule:
    """Return the rule that a `pvc://` URI names a claim of the job's namespace and a path in it."""
    return Rule(
        name=f"{path}-names-a-claim",
        path=path,
        cel=f"!({given}) || !self.{path}.startsWith('pvc://') || "
        f"(self.{path}.matches('{_CLAIM_PATTERN}') && !self.{path}.matches('{_PARENT_STEP}'))",
        text="must be pvc://claim or pvc://claim/path, with a claim of the job's namespace and no .. in the path",
        hint="write the claim's name after pvc://: lowercase letters, digits and -",
        advice=lambda spec: _claim_advice(read(spec) or ""),
    )


def _adapter_uris(spec: FineTuneJobSpec) -> list[str]:
    return [] if spec.endpoint is None else [adapter.uri for adapter in spec.endpoint.adapters]


_CLAIM_PATTERN = rf"^pvc://{DNS_SUBDOMAIN_PATTERN.strip('^$')}(/.*)?$".replace("\\", "\\\\")
"""Pattern as CEL text, where a backslash is written twice."""
_PARENT_STEP = "/[.][.](/|$)"


def _names_a_claim(uri: str | None) -> bool:
    if uri is None or not uri.startswith("pvc://"):
        return True
    claim, _, path = uri.removeprefix("pvc://").partition("/")
    return re.fullmatch(DNS_SUBDOMAIN_PATTERN, claim) is not None and ".." not in path.split("/") and "\n" not in path


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
        "training-needs-dataset",
        "dataset",
        "!has(self.training) || has(self.dataset)",
        "is required for training",
        "set spec.dataset.uri, such as hf://ORG/NAME, or leave out spec.training",
    ),
    Rule(
        "evaluation-needs-dataset",
        "dataset",
        "!has(self.evaluation) || has(self.training) || has(self.dataset)",
        "is required for evaluation",
        "set spec.dataset.uri, or leave out spec.evaluation",
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
        advice=lambda spec: f"set it to {(spec.preparation.max_length or 0) // 2} or less, or leave it out",
    ),
    Rule(
        "generation-is-of-tasks-that-write",
        "generation",
        f"{is_one_of(WRITING_TASKS)} || (self.generation.maxNewTokens == 128"
        " && self.generation.numBeams == 1 && self.generation.temperature == 0.0 && self.generation.topP == 1.0)",
        f"applies to {', '.join(WRITING_TASKS)} only",
        "leave spec.generation out",
    ),
    Rule(
        "beams-do-not-draw",
        "generation.numBeams",
        "self.generation.numBeams == 1 || self.generation.temperature == 0.0",
        "enables beam search, which excludes sampling with spec.generation.temperature above 0",
        "leave spec.generation.numBeams out to sample, or spec.generation.temperature for beam search",
        advice=_beams_advice,
    ),
    Rule(
        "top-p-is-drawn-from",
        "generation.topP",
        "self.generation.topP == 1.0 || self.generation.temperature > 0.0",
        "has no effect while spec.generation.temperature is 0, which disables sampling",
        "set spec.generation.temperature to 1.0 to sample, or leave it out",
    ),
    Rule(
        "predictions-have-a-format",
        "predict.output",
        "!has(self.predict) || !has(self.predict.output) || self.predict.output.endsWith('.jsonl')"
        " || self.predict.output.endsWith('.parquet') || self.predict.output.endsWith('/')",
        "must end in .jsonl or .parquet, which also sets the format, or in / for a folder of parts",
        "add .jsonl, .parquet or /",
        advice=_predictions_advice,
    ),
    Rule(
        "predictions-have-one-format",
        "predict.format",
        "!has(self.predict) || !has(self.predict.format) || !has(self.predict.output)"
        " || !self.predict.output.endsWith(self.predict.format == 'jsonl' ? '.parquet' : '.jsonl')",
        "differs from the extension of spec.predict.output, which sets the format of a file",
        "leave it out",
        advice=_format_advice,
    ),
    Rule(
        "spark-has-executors",
        "predict.workers",
        "!has(self.predict) || self.predict.engine != 'spark' || type(self.predict.workers) != int"
        " || int(self.predict.workers) > 1",
        "leaves no executor: with spec.predict.engine spark, the driver is one of the workers",
        "set it to auto or at least 2, or leave spec.predict.engine out",
    ),
    Rule(
        "no-rungs-for-texts",
        "predict.optimization",
        f"!has(self.predict) || self.predict.optimization in {['auto', 'none', *TEXT_RUNGS]}"
        f" || {is_one_of(RUNG_TASKS)}",
        f"applies to {', '.join(RUNG_TASKS)} only",
        "leave it out",
    ),
    Rule(
        "vllm-writes-texts",
        "predict.optimization",
        f"!has(self.predict) || self.predict.optimization != 'vllm' || {is_one_of(VLLM_TASKS)}",
        f"vllm applies to {', '.join(VLLM_TASKS)} only",
        "leave it out",
    ),
    Rule(
        "vllm-needs-a-server",
        "predict.server",
        "!has(self.predict) || self.predict.optimization != 'vllm' || has(self.predict.server)",
        "is needed with spec.predict.optimization vllm",
        "write the URL of an OpenAI-compatible server, such as http://vllm.team.svc:8000",
    ),
    Rule(
        "server-is-for-vllm",
        "predict.server",
        "!has(self.predict) || !has(self.predict.server) || self.predict.optimization in ['auto', 'vllm']",
        "has no effect unless spec.predict.optimization is vllm or auto",
        "leave it out, or set spec.predict.optimization to vllm",
    ),
    Rule(
        "vllm-has-no-beams",
        "generation.numBeams",
        "!has(self.predict) || self.predict.optimization != 'vllm' || self.generation.numBeams == 1",
        "must be 1 with spec.predict.optimization vllm, which has no beam search",
        "leave it out, or set spec.predict.optimization to none",
    ),
    Rule(
        "slots-write-texts",
        "predict.optimization",
        f"!has(self.predict) || self.predict.optimization != 'continuous-batching' || {is_one_of(VLLM_TASKS)}",
        f"continuous-batching applies to {', '.join(VLLM_TASKS)} only",
        "leave it out",
    ),
    Rule(
        "slots-have-no-beams",
        "generation.numBeams",
        "!has(self.predict) || self.predict.optimization != 'continuous-batching' || self.generation.numBeams == 1",
        "must be 1 with spec.predict.optimization continuous-batching, which has no beam search",
        "leave it out, or set spec.predict.optimization to none",
    ),
    Rule(
        "slots-do-not-sample",
        "generation.temperature",
        "!has(self.predict) || self.predict.optimization != 'continuous-batching'"
        " || self.generation.temperature == 0.0",
        "must be 0 with spec.predict.optimization continuous-batching, which does not sample",
        "leave it out, or set spec.predict.optimization to none",
    ),
    Rule(
        "texts-need-references",
        "predict.metricTolerance",
        "!has(self.predict) || !has(self.predict.metricTolerance)"
        " || !(has(self.predict.server) || self.predict.optimization == 'vllm')"
        " || !has(self.dataset) || !has(self.dataset.columns.text)",
        "compares generated texts with references, and rows of spec.dataset.columns.text have none",
        "use columns source and target, or messages; or spec.predict.tolerance, the share of equal texts",
    ),
    Rule(
        "no-cpu-rungs-on-gpus",
        "predict.optimization",
        f"!has(self.predict) || self.predict.optimization in {['auto', *TEXT_RUNGS, *GPU_RUNGS]}"
        " || type(self.resources.gpusPerNode) != int || int(self.resources.gpusPerNode) == 0",
        "is for CPUs, and spec.resources.gpusPerNode requests GPUs",
        f"leave it out, use {any_of(GPU_RUNGS)}, or set spec.resources.gpusPerNode to 0",
    ),
    Rule(
        "tolerance-is-measured",
        "predict.tolerance",
        "!has(self.predict) || !has(self.predict.tolerance) || self.predict.optimization != 'none'",
        "has no effect while spec.predict.optimization is none",
        "leave one of the two out",
    ),
    Rule(
        "metric-tolerance-is-measured",
        "predict.metricTolerance",
        "!has(self.predict) || !has(self.predict.metricTolerance) || self.predict.optimization != 'none'",
        "has no effect while spec.predict.optimization is none",
        "leave one of the two out",
    ),
    Rule(
        "metric-tolerance-needs-labels",
        "predict.metricTolerance",
        "!has(self.predict) || !has(self.predict.metricTolerance) || has(self.dataset)",
        "needs rows with labels, and spec.dataset is not set",
        "set spec.dataset, or leave it out",
    ),
    _hub_only_rule("model.revision", "self.model.revision != 'main'", "model.uri"),
    _hub_only_rule("dataset.config", "has(self.dataset) && has(self.dataset.config)", "dataset.uri"),
    _hub_only_rule(
        "predict.dataset.config",
        "has(self.predict) && has(self.predict.dataset) && has(self.predict.dataset.config)",
        "predict.dataset.uri",
    ),
    _claim_rule("model.uri", "true", lambda spec: spec.model.uri),
    _claim_rule("dataset.uri", "has(self.dataset)", lambda spec: spec.dataset.uri if spec.dataset else None),
    _claim_rule(
        "predict.dataset.uri",
        "has(self.predict) && has(self.predict.dataset)",
        lambda spec: spec.predict.dataset.uri if spec.predict and spec.predict.dataset else None,
    ),
    _claim_rule(
        "predict.output",
        "has(self.predict) && has(self.predict.output)",
        lambda spec: spec.predict.output if spec.predict else None,
    ),
    Rule(
        name="endpoint.adapters-name-claims",
        path="endpoint.adapters",
        cel="!has(self.endpoint) || !has(self.endpoint.adapters) || self.endpoint.adapters.all(each, "
        f"!each.uri.startsWith('pvc://') || (each.uri.matches('{_CLAIM_PATTERN}') "
        f"&& !each.uri.matches('{_PARENT_STEP}')))",
        text="must have uris such as pvc://claim/path, with a claim of the job's namespace and no .. in the path",
        hint="write the claim's name after pvc://: lowercase letters, digits and -",
        advice=lambda spec: _claim_advice(next((uri for uri in _adapter_uris(spec) if not _names_a_claim(uri)), "")),
        reads=("endpoint.adapters",),
    ),
    _claim_rule("storage.workspace", "has(self.storage.workspace)", lambda spec: spec.storage.workspace),
    _claim_rule("storage.cache", "has(self.storage.cache)", lambda spec: spec.storage.cache),
    Rule(
        "columns-differ",
        "dataset.columns",
        columns_cel(),
        "uses the same column as input and as target",
        "name two columns",
        advice=leak_advice,
        reads=("task", "dataset"),
    ),
)
