"""Every rule that concerns several fields of one object, once: as CEL for the API server, as Python for the rest.

The API server refuses with the CEL at once; `finetune validate` and the operator check the Python, which can also
do arithmetic for the way out. A test holds the two against each other on a real API server. A rule without CEL
concerns a field of no fixed type (`auto` or a list), which CEL cannot look at; what the schema itself can say in
its place is in `schema`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import gcd
from typing import Any, Literal

from pydantic import JsonValue
from pydantic.alias_generators import to_snake

from finetune_contract.choices import WRITING_TASKS, PipelineSchedule, StrategyName, Task
from finetune_contract.combinations import CONSTRAINTS, FIELDS, Choices, Constraint, Term, Value
from finetune_contract.metrics import GREATEST, LEAST, LOSS, LOWER_IS_BETTER, METRICS, metrics_of, stopping_metrics_of
from finetune_operator.api.problems import describe_value
from finetune_operator.api.quantities import parse_quantity
from finetune_operator.api.shapes import Number, Shape, find, spec_shape
from finetune_operator.api.types import (
    DNS_SUBDOMAIN_PATTERN,
    AdapterSpec,
    CheckpointEverySpec,
    ColumnsSpec,
    FineTuneJobSpec,
    GateSpec,
    GenerationSpec,
    ParallelismSpec,
    PipelineSpec,
    PreferenceSpec,
    ScriptSpec,
)
from finetune_operator.launchers.rows import SUPPORTED

Holds = Callable[[FineTuneJobSpec], bool]

COLUMN_TASKS: Mapping[str, tuple[Task, ...]] = {
    "text": ("text-classification", "text-generation", "masked-lm"),
    "textPair": ("text-classification",),
    "label": ("text-classification",),
    "tokens": ("token-classification",),
    "tags": ("token-classification",),
    "question": ("question-answering",),
    "context": ("question-answering",),
    "answers": ("question-answering",),
    "source": ("text-generation", "summarization", "translation"),
    "target": ("text-generation", "summarization", "translation"),
    "messages": ("text-generation",),
    "prompt": ("preference-tuning",),
    "chosen": ("preference-tuning",),
    "rejected": ("preference-tuning",),
}
"""Column role -> tasks that read it. A column that no stage reads would be accepted and ignored."""

RESERVED_PREFIXES = (
    "finetune.dev/",
    *dict.fromkeys(prefix for each in SUPPORTED for prefix in each.reserved.label_prefixes),
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/component",
)
"""Of labels and annotations by which operators find their pods."""
MUTABLE = {"runPolicy": ("suspend", "ttlSecondsAfterFinished"), "endpoint": ()}
"""What may change after the first stage has started: named fields of a block, or (empty) the whole block."""


@dataclass(frozen=True)
class Rule:
    """One rule on `spec`."""

    name: str
    path: str
    """Field to blame, from `spec`."""
    cel: str | None
    """True when the rule holds; `self` is spec, after defaults. None: see the module's docstring."""
    holds: Holds
    text: str
    """The rule as a sentence without its full stop."""
    way_out: str
    advice: Callable[[FineTuneJobSpec], str] | None = None
    """A way out with the job's own numbers, where arithmetic helps."""
    reads: tuple[str, ...] = ()
    """Fields that the Python reads; left out where the CEL names them."""
    schema: Mapping[str, JsonValue] = field(default_factory=dict)
    """Schema keywords at `path` that say as much of the rule as can be said."""
    schema_around: Mapping[str, JsonValue] = field(default_factory=dict)
    """Schema keywords of the object around the field, where CEL cannot look into the field."""

    @property
    def fields_read(self) -> tuple[str, ...]:
        """Paths from `spec` that decide whether the rule holds."""
        return self.reads or tuple(
            dict.fromkeys(re.findall(r"self\.([A-Za-z.]*[A-Za-z])(?![A-Za-z(])", self.cel or ""))
        )


TARGETS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "text-classification": (("text", "label"), ("textPair", "label")),
    "token-classification": (("tokens", "tags"),),
    "question-answering": (("question", "answers"), ("context", "answers")),
    "preference-tuning": (("prompt", "chosen"), ("prompt", "rejected"), ("chosen", "rejected")),
    "summarization": (("source", "target"),),
    "translation": (("source", "target"),),
}
"""Task -> pairs of roles that one column cannot have both: what is read, and what is to be found out from it."""


def asked_strategy(parallelism: ParallelismSpec) -> StrategyName | None:
    """The strategy that the spec fixes, by name or by a ZeRO stage, as only DeepSpeed has them; None: it is free."""
    if parallelism.strategy != "auto":
        return parallelism.strategy
    return None if parallelism.zero_stage == "auto" else "deepspeed"


def certain_processes(spec: FineTuneJobSpec) -> int | None:
    """Processes on each node, where the node has no say in it: as asked, one a GPU, and on a CPU one where nothing is
    spread; None: the plan decides.
    """
    asked, gpus = spec.resources.processes_per_node, spec.resources.gpus_per_node
    if asked != "auto":
        return asked
    if gpus == "auto":
        return None
    alone = spec.parallelism.replica_ranks == 1 and asked_strategy(spec.parallelism) in (None, "single")
    return gpus or (1 if alone else None)


def least_processes(spec: FineTuneJobSpec) -> int:
    """Fewest processes a node that, over all nodes, are whole groups that read the same rows."""
    return spec.parallelism.replica_ranks // gcd(spec.parallelism.replica_ranks, spec.resources.nodes)


def full_passes(schedule: PipelineSchedule, degree: int, micro_batches: int) -> bool:
    """Whether torch's schedule takes that many micro-batches: the interleaved one deals them out in even rounds."""
    return schedule != "interleaved" or micro_batches % max(1, micro_batches // degree) == 0


def keeps_full(asked: PipelineSpec, accumulation: int) -> bool:
    """Whether a step of that many micro-batches is one or several whole passes."""
    if asked.degree == 1:
        return True
    passed = accumulation if asked.micro_batches == "auto" else asked.micro_batches
    return accumulation % passed == 0 and full_passes(asked.schedule, asked.degree, passed)


def passes_are_whole(asked: PipelineSpec, share: int, micro: Literal["auto"] | int) -> bool:
    """Whether `share` rows of a replica and step make whole passes, in micro-batches of `micro` rows or of any size."""
    sizes = [size for size in range(1, share + 1) if share % size == 0] if micro == "auto" else [micro]
    return any(share % size == 0 and keeps_full(asked, share // size) for size in sizes)


def certain_ranks(spec: FineTuneJobSpec) -> int | None:
    """Data-parallel ranks = nodes x processes / (tensor x pipeline x sequence); None while the plan may choose."""
    processes = certain_processes(spec)
    if spec.resources.elastic is not None or processes is None:
        return None
    parallelism = spec.parallelism
    world = spec.resources.nodes * processes
    model = parallelism.replica_ranks
    return None if world % model else world // model


def nearest_multiples(value: int, unit: int) -> tuple[int, ...]:
    """The multiples of `unit` next to `value`, below and above; both are positive."""
    below = value // unit * unit
    return tuple(multiple for multiple in (below, below + unit) if multiple > 0)


def _batch_unit(spec: FineTuneJobSpec) -> int:
    """The global batch has to be a multiple of this: certain ranks x explicit micro-batch."""
    ranks = certain_ranks(spec) or 1
    micro = spec.training.micro_batch_size if spec.training else "auto"
    return ranks * (1 if micro == "auto" else micro)


def _global_batch_fits(spec: FineTuneJobSpec) -> bool:
    if spec.training is None or spec.training.script is not None:
        return True
    return spec.training.global_batch_size % _batch_unit(spec) == 0


def _global_batch_advice(spec: FineTuneJobSpec) -> str:
    assert spec.training is not None
    unit = _batch_unit(spec)
    near = " or ".join(str(batch) for batch in nearest_multiples(spec.training.global_batch_size, unit))
    ranks, micro = certain_ranks(spec), spec.training.micro_batch_size
    parts = [] if ranks in (None, 1) else [f"{ranks} ranks"]
    parts += [] if micro == "auto" else [f"{micro} row{'s' * (micro > 1)} of a micro-batch"]
    smaller = ""
    share, left = divmod(spec.training.global_batch_size, ranks or 1)
    if micro != "auto" and not left:
        smaller = f"; or set spec.training.microBatchSize to {gcd(share, micro)}"
    return f"use {near}, multiples of {unit} = {' x '.join(parts)}{smaller}"


def _degrees_advice(spec: FineTuneJobSpec) -> str:
    parallelism, world = spec.parallelism, _world(spec) or 0
    size = parallelism.replica_ranks
    degrees = {"tensor": parallelism.tensor, "pipeline.degree": parallelism.pipeline.degree}
    degrees["sequence"] = parallelism.sequence
    product = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    product += f" = {size}" if sum(degree > 1 for degree in degrees.values()) > 1 else ""
    smaller = max((each for each in range(1, size + 1) if world % each == 0), default=1)
    return f"{world} processes are no multiple of {product}; use degrees whose product divides {world}, e.g. {smaller}"


def _columns_differ(spec: FineTuneJobSpec) -> bool:
    return not _leaks(spec)


def _leaks(spec: FineTuneJobSpec) -> tuple[tuple[str, str], ...]:
    """Pairs of roles for which the data set has one column."""
    if spec.dataset is None:
        return ()
    given = spec.dataset.columns.model_dump(by_alias=True, exclude_none=True)
    pairs = TARGETS.get(spec.task, (("source", "target"),) if "source" in given else ())
    names = {role: given.get(role, "" if role == "textPair" else role) for pair in pairs for role in pair}
    return tuple(pair for pair in pairs if names[pair[0]] == names[pair[1]])


def _leak_advice(spec: FineTuneJobSpec) -> str:
    (read, found), *_ = _leaks(spec)
    return f"name two columns: {read} and {found} are one"


def _columns_cel() -> str:
    """CEL of `_columns_differ`."""

    def name(role: str) -> str:
        field = f"self.dataset.columns.{role}"
        return f"(has({field}) ? {field} : '{'' if role == 'textPair' else role}')"

    tasks = [
        f"self.task != '{task}' || ({' && '.join(f'{name(one)} != {name(other)}' for one, other in pairs)})"
        for task, pairs in TARGETS.items()
    ]
    written = (
        f"self.task != 'text-generation' || !has(self.dataset.columns.source) || {name('source')} != {name('target')}"
    )
    return f"!has(self.dataset) || ({' && '.join(f'({each})' for each in (*tasks, written))})"


def _set_argument(spec: FineTuneJobSpec, *names: str) -> bool:
    """Whether the loop gets one of these arguments with a value other than nothing."""
    return _loops(spec) and any(bool(spec.training and spec.training.arguments.get(name)) for name in names)


def _idle_sections(spec: FineTuneJobSpec) -> tuple[tuple[str, str], ...]:
    """Sections of `deepspeedConfig` that say how to offload what stays on the device, with the field that moves it."""
    zero, offload = spec.parallelism.deepspeed_config.get("zero_optimization"), spec.parallelism.offload
    keys = zero if isinstance(zero, dict) else {}
    return tuple(
        (section, name)
        for section, name, where in (
            ("offload_optimizer", "optimizer", offload.optimizer),
            ("offload_param", "parameters", offload.parameters),
        )
        if isinstance(inner := keys.get(section), dict) and "device" not in inner and where == "none"
    )


def _idle_advice(spec: FineTuneJobSpec) -> str:
    (section, name), *_ = _idle_sections(spec)
    whole = f"spec.parallelism.deepspeedConfig.zero_optimization.{section}"
    return f"set spec.parallelism.offload.{name} to cpu, or leave {whole} out"


def _replicas_on_cpu(spec: FineTuneJobSpec) -> int | None:
    """Data-parallel ranks where replicas of several processes run on CPUs, as few of them as make whole ones."""
    resources = spec.resources
    if resources.gpus_per_node != 0 or resources.processes_per_node != "auto" or spec.parallelism.replica_ranks == 1:
        return None
    return resources.nodes * least_processes(spec) // spec.parallelism.replica_ranks


def _replicas_divide(spec: FineTuneJobSpec) -> bool:
    ranks = _replicas_on_cpu(spec)
    if ranks is None or not _loops(spec) or spec.training is None:
        return True
    micro = spec.training.micro_batch_size
    return spec.training.global_batch_size % (ranks * (1 if micro == "auto" else micro)) == 0


def _replicas_advice(spec: FineTuneJobSpec) -> str:
    assert spec.training is not None
    ranks, micro = _replicas_on_cpu(spec) or 1, spec.training.micro_batch_size
    unit = ranks * (1 if micro == "auto" else micro)
    near = " or ".join(str(batch) for batch in nearest_multiples(spec.training.global_batch_size, unit))
    return f"use {near}, multiples of {unit}"


def _passes_fit(spec: FineTuneJobSpec) -> bool:
    """Whether a step is whole passes of the pipeline, where the ranks are certain and divide it."""
    ranks = certain_ranks(spec) or _replicas_on_cpu(spec)
    if not _loops(spec) or spec.training is None or ranks is None or spec.parallelism.pipeline.degree == 1:
        return True
    total = spec.training.global_batch_size
    if total % ranks or not _global_batch_fits(spec) or not _replicas_divide(spec):
        return True  # another rule tells
    return passes_are_whole(spec.parallelism.pipeline, total // ranks, spec.training.micro_batch_size)


def _passes_advice(spec: FineTuneJobSpec) -> str:
    assert spec.training is not None
    micro, ranks = spec.training.micro_batch_size, certain_ranks(spec) or _replicas_on_cpu(spec) or 1
    share = spec.training.global_batch_size // ranks
    passed = share if micro == "auto" else max(1, share // micro)
    whole = ", a multiple of the degree" if spec.parallelism.pipeline.schedule == "interleaved" else ""
    return f"set it to auto or to a divisor of {passed}, the micro-batches of a replica's step{whole}"


HPZ = "zero_hpz_partition_size"
QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")
"""ZeRO++ (Wang et al., 2023): shards of the parameters a second time inside each node, and 8-bit communication."""


def zero_plus_plus(parallelism: ParallelismSpec) -> tuple[str, ...]:
    """The keys of ZeRO++ that `deepspeedConfig` sets."""
    keys = parallelism.deepspeed_config.get("zero_optimization")
    if not isinstance(keys, dict):
        return ()
    return tuple(key for key in QUANTIZED if keys.get(key)) + ((HPZ,) if secondary_shards(parallelism) > 1 else ())


def secondary_shards(parallelism: ParallelismSpec) -> int:
    """Processes over which parameters are divided a second time; 1: they are not."""
    keys = parallelism.deepspeed_config.get("zero_optimization")
    found = keys.get(HPZ, 1) if isinstance(keys, dict) else 1
    return found if isinstance(found, int) and found > 0 else 1


def _zero_plus_plus_fault(spec: FineTuneJobSpec) -> str | None:
    """The way out of keys of ZeRO++ that DeepSpeed would not obey."""
    above = "spec.parallelism.deepspeedConfig.zero_optimization"
    processes = certain_processes(spec)
    for key in zero_plus_plus(spec.parallelism):
        if spec.parallelism.zero_stage != 3:
            return f"set spec.parallelism.zeroStage to 3, or leave {above}.{key} out"
        if key in QUANTIZED and spec.resources.gpus_per_node == 0:
            return f"leave {above}.{key} out, or set spec.resources.gpusPerNode"
        if key == HPZ and processes is not None and secondary_shards(spec.parallelism) != processes:
            return f"set {above}.{key} to {processes}, or leave {above}.{key} out"
    return None


def _every_is_one(spec: FineTuneJobSpec) -> bool:
    every = spec.checkpoints.every
    return not isinstance(every, CheckpointEverySpec) or (every.steps is None) != (every.minutes is None)


def _gate(spec: FineTuneJobSpec) -> GateSpec | None:
    return spec.evaluation.gate if spec.evaluation else None


def _gate_of(spec: FineTuneJobSpec) -> GateSpec:
    """Return the gate of a job that breaks a rule on it."""
    gate = _gate(spec)
    assert gate is not None
    return gate


def _gate_holds(holds: Callable[[GateSpec], bool]) -> Holds:
    """A job without a gate keeps every rule on gates."""
    return lambda spec: (gate := _gate(spec)) is None or holds(gate)


def _watched(spec: FineTuneJobSpec) -> str | None:
    """The metric that early stopping watches."""
    stopping = spec.training.early_stopping if spec.training else None
    return None if stopping is None else stopping.metric


def _strange_metrics(spec: FineTuneJobSpec) -> tuple[str, ...]:
    """Names in spec.evaluation.metrics that the task does not have."""
    if spec.evaluation is None or spec.evaluation.metrics == "auto":
        return ()
    return tuple(name for name in spec.evaluation.metrics if name not in metrics_of(spec.task))


_OTHER_METRIC_NAMES: Mapping[str, str] = {
    "acc": "accuracy", "em": "exact_match", "exact": "exact_match", "ppl": "perplexity", "sacrebleu": "bleu",
    "f": "f1", "fscore": "f1", "f_score": "f1", "sensitivity": "recall", "rouge": "rougeL", "r_l": "rougeL",
    "rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL", "pearsonr": "pearson", "spearman": "spearmanr",
    "r_squared": "r2", "mean_squared_error": "mse", "mean_absolute_error": "mae", "chrf++": "chrf",
}  # fmt: skip
"""What people call metrics that have another name with Hugging Face's `evaluate`."""


def _near(name: str, known: Sequence[str]) -> str | None:
    """Return the metric that a name means which the task does not have: `eval_accuracy`, `f1_macro` and the like."""
    names = {each.lower(): each for each in known}
    words = name.lower().removeprefix("eval_").replace("-", "_")
    words = _OTHER_METRIC_NAMES.get(words, words)
    candidates = [words, *re.split(r"[_/@ ]", words), *get_close_matches(words, names, n=1)]
    return next((names[each] for each in candidates if each in names), None)


def _metric_advice(name: str, task: Task, known: Sequence[str]) -> str:
    near = _near(name, known)
    meant = "" if near is None else f"did you mean {near}? "
    return f"{meant}{task} has {', '.join(known)}"


def _predictions_advice(spec: FineTuneJobSpec) -> str:
    """The output with an ending that is a format, at a place that can be written."""
    output = "" if spec.predict is None or spec.predict.output is None else spec.predict.output
    scheme, _, rest = output.partition("://")
    named = re.sub(r"\.(?:csv|tsv|json|txt|arrow|xlsx?)$", "", rest.rstrip("/")) or "predictions"
    if scheme not in ("file", "pvc"):
        return f"name it pvc://CLAIM/{named.rpartition('/')[2]}.jsonl, or leave it out: it is in the workspace then"
    return f"write {scheme}://{named}.jsonl, or the same with .parquet"


def _gate_metric_advice(gate: GateSpec, task: Task) -> str:
    """The metric that a gate means, and what its minimum has to be then."""
    advice = _metric_advice(gate.metric, task, metrics_of(task))
    near = _near(gate.metric, metrics_of(task))
    most = None if near is None else GREATEST.get(near)
    if most == 1 and gate.minimum is not None and 1 < gate.minimum <= 100:
        return f"{advice}; {near} is at most 1, so that minimum is {gate.minimum / 100:g}"
    percent = [name for name in metrics_of(task) if GREATEST.get(name) == 100]
    return f"{advice}; {' and '.join(percent)} go to 100" if percent and near is None else advice


def _metrics_advice(spec: FineTuneJobSpec) -> str:
    known = metrics_of(spec.task)
    found = {name: _near(name, known) for name in _strange_metrics(spec)}
    shown = {name: describe_value(name, limit=40).replace('"', "'") for name in found}
    edits = [
        f"leave {shown[name]} out" if near is None else f"write {near} for {shown[name]}"
        for name, near in found.items()
    ]
    return f"{', '.join(edits)}; {spec.task} has {', '.join(known)}"


def _limit_advice(gate: GateSpec) -> str:
    """Which of the two limits the metric takes."""
    right, other = ("maximum", "minimum") if gate.metric in LOWER_IS_BETTER else ("minimum", "maximum")
    better = "lower" if right == "maximum" else "higher"
    return f"{gate.metric} is better when {better}: " + (
        f"set {right}" if gate.minimum is None else f"leave spec.evaluation.gate.{other} out"
    )


def _minimum_advice(gate: GateSpec) -> str:
    """Of a share in per cent, the share."""
    most = GREATEST[gate.metric]
    assert gate.minimum is not None
    if most == 1 and gate.minimum <= 100:
        return f"did you mean {gate.minimum / 100:g}? {gate.metric} is at most 1"
    return f"{gate.metric} is at most {most:g}"


def _gate_is_measured(spec: FineTuneJobSpec) -> bool:
    evaluation = spec.evaluation
    if evaluation is None or evaluation.gate is None or evaluation.metrics == "auto":
        return True
    return evaluation.gate.metric in (*evaluation.metrics, LOSS)


def _one_process_per_gpu(spec: FineTuneJobSpec) -> bool:
    processes, gpus = spec.resources.processes_per_node, spec.resources.gpus_per_node
    return processes == "auto" or gpus == "auto" or gpus == 0 or processes <= gpus


def _world(spec: FineTuneJobSpec) -> int | None:
    processes = certain_processes(spec)
    return None if processes is None else processes * spec.resources.nodes


def _offloads(spec: FineTuneJobSpec) -> bool:
    return (spec.parallelism.offload.optimizer, spec.parallelism.offload.parameters) != ("none", "none")


def _loops(spec: FineTuneJobSpec) -> bool:
    return spec.training is not None and spec.script is None


def _placement_is_kept(spec: FineTuneJobSpec) -> bool:
    letters = spec.parallelism.placement
    return letters in ("cluster", "spread") or len(set(letters)) == len(letters)


def _placement_names_all(spec: FineTuneJobSpec) -> bool:
    letters, parallelism = spec.parallelism.placement, spec.parallelism
    if letters in ("cluster", "spread"):
        return True
    return (parallelism.tensor == 1 or "T" in letters) and (parallelism.pipeline.degree == 1 or "P" in letters)


def _elastic_holds(test: Callable[[int, int, int], bool]) -> Holds:
    def holds(spec: FineTuneJobSpec) -> bool:
        elastic = spec.resources.elastic
        return elastic is None or test(elastic.min_nodes, spec.resources.nodes, elastic.max_nodes)

    return holds


def _is_one_of(tasks: tuple[Task, ...]) -> str:
    """CEL: the job's task is one of these."""
    return f"self.task in [{', '.join(repr(task) for task in tasks)}]"


_HIGHER_IS_BETTER = frozenset(name for task in METRICS for name in metrics_of(task)) - LOWER_IS_BETTER


def _words(names: Iterable[str]) -> str:
    """CEL: a list of text."""
    return f"[{', '.join(repr(name) for name in sorted(names))}]"


def _metric_cel(path: str, names_of: Callable[[Task], Sequence[str]]) -> str:
    """CEL: `path`.metric is one that the task has, where there is such a block."""
    block, _ = path.split(".")
    by_task = " && ".join(
        f"(self.task != '{task}' || self.{path}.metric in {_words(names_of(task))})" for task in METRICS
    )
    return f"!has(self.{block}) || !has(self.{path}) || ({by_task})"


def _gate_cel(limit: str, holds: str) -> str:
    """CEL: where the gate has that limit, it holds."""
    gate = "self.evaluation.gate"
    return f"!has(self.evaluation) || !has({gate}) || !has({gate}.{limit}) || {holds}"


def _limit_cel(limit: str, compared: str, bounds: Mapping[str, float]) -> str:
    """CEL: the limit is one that its metric can reach."""
    gate = "self.evaluation.gate"
    by_bound = " && ".join(
        f"(!({gate}.metric in {_words(name for name in bounds if bounds[name] == bound)})"
        f" || {gate}.{limit} {compared} {bound})"
        for bound in sorted(set(bounds.values()))
    )
    return _gate_cel(limit, f"({by_bound})")


def _columns_read(task: Task) -> str:
    return ", ".join(column for column, tasks in COLUMN_TASKS.items() if task in tasks)


def _column_rule(column: str, tasks: tuple[Task, ...], block: str) -> Rule:
    """A column is given only to a task that reads it; `block` is `dataset` or `predict.dataset`."""

    def holds(spec: FineTuneJobSpec) -> bool:
        predicted = spec.predict.dataset if spec.predict else None
        dataset = spec.dataset if block == "dataset" else predicted
        given = dataset is not None and dataset.columns.model_dump(by_alias=True)[column] is not None
        return not given or spec.task in tasks

    present = "has(self.predict) && has(self.predict.dataset)" if block != "dataset" else "has(self.dataset)"
    return Rule(
        name=f"{block}-{column}-is-read",
        path=f"{block}.columns.{column}",
        cel=f"!({present} && has(self.{block}.columns.{column})) || {_is_one_of(tasks)}",
        holds=holds,
        text=f"is read by {', '.join(tasks)} only",
        way_out=f"leave it out, or set spec.task to {' or '.join(tasks)}",
        advice=lambda spec: (
            f"leave it out, or set spec.task to {' or '.join(tasks)}; {spec.task} reads {_columns_read(spec.task)}"
        ),
    )


_FORMS = {"text": ("text",), "source": ("source", "target"), "messages": ("messages",)}
"""Columns of text-generation by the form of its rows; a data set has one form, `text` where it names none."""


def _forms(columns: ColumnsSpec) -> tuple[str, ...]:
    given = columns.model_dump(exclude_none=True)
    return tuple(form for form, roles in _FORMS.items() if given.keys() & set(roles))


def _form_rule(block: str) -> Rule:
    """Rows of text-generation have one form, and those to predict that of the rows that are trained on."""

    def holds(spec: FineTuneJobSpec) -> bool:
        if spec.task != "text-generation":
            return True
        own = spec.dataset if block == "dataset" else spec.predict.dataset if spec.predict else None
        named = () if own is None else _forms(own.columns)
        learnt = named if spec.dataset is None or block == "dataset" else _forms(spec.dataset.columns) or ("text",)
        return len(named) < 2 and set(named) <= set(learnt)

    def advice(spec: FineTuneJobSpec) -> str:
        own = spec.dataset if block == "dataset" else spec.predict.dataset if spec.predict else None
        named = () if own is None else _forms(own.columns)
        if len(named) == 1 and spec.dataset is not None:
            return f"name {' and '.join(_FORMS[(*_forms(spec.dataset.columns), 'text')[0]])} here, or leave it out"
        if own is not None and named == ("text", "source") and own.columns.source is None:
            return "rename text to source, or leave target out to learn all of the text"
        return f"keep {', or '.join(' and '.join(_FORMS[form]) for form in named)}, and leave the rest out"

    def cel(block: str, form: str) -> str:
        return "(" + " || ".join(f"has(self.{block}.columns.{role})" for role in _FORMS[form]) + ")"

    named = f"[{', '.join(cel(block, form) for form in _FORMS)}].filter(named, named).size()"
    checked = f"{named} < 2"
    if block != "dataset":
        plain = f"({cel('dataset', 'text')} || (!{cel('dataset', 'source')} && !{cel('dataset', 'messages')}))"
        learnt = {form: cel("dataset", form) for form in _FORMS} | {"text": plain}
        same = " && ".join(f"(!{cel(block, form)} || {learnt[form]})" for form in _FORMS)
        checked += f" && (!has(self.dataset) || ({same}))"
    present = "has(self.predict) && has(self.predict.dataset)" if block != "dataset" else "has(self.dataset)"
    return Rule(
        name=f"{block}-rows-have-one-form",
        path=f"{block}.columns",
        cel=f"self.task != 'text-generation' || !({present}) || ({checked})",
        holds=holds,
        text="mixes forms of rows; text-generation reads text, or source and target, or messages"
        + ("" if block == "dataset" else ", here the same as in spec.dataset"),
        way_out="name the columns of one form",
        advice=advice,
        reads=("task", *dict.fromkeys(("dataset", block))),
    )


def _labels_rule(block: str) -> Rule:
    """Names of labels are given only to a task that has such labels; `block` is `dataset` or `predict.dataset`."""

    def holds(spec: FineTuneJobSpec) -> bool:
        predicted = spec.predict.dataset if spec.predict else None
        dataset = spec.dataset if block == "dataset" else predicted
        return dataset is None or not dataset.labels or spec.task == "text-classification"

    present = "has(self.predict) && has(self.predict.dataset)" if block != "dataset" else "has(self.dataset)"
    named = f"{present} && has(self.{block}.labels) && size(self.{block}.labels) > 0"
    return Rule(
        name=f"{block}-labels-are-read",
        path=f"{block}.labels",
        cel=f"!({named}) || self.task == 'text-classification'",
        holds=holds,
        text="is read by text-classification only",
        way_out="leave it out, or set spec.task to text-classification",
    )


def _hub_only_rule(path: str, given: str, uri: str, holds: Holds) -> Rule:
    return Rule(
        name=f"{path}-needs-hub",
        path=path,
        cel=f"!({given}) || self.{uri}.startsWith('hf://')",
        holds=holds,
        text=f"has a meaning on the Hub only, so that spec.{uri} has to be hf://",
        way_out="leave it out, or name a Hub repository",
    )


def _reserved_rule(block: Literal["labels", "annotations"]) -> Rule:
    """Keys by which operators find their pods."""
    begins = " || ".join(f"key.startsWith('{prefix}')" for prefix in RESERVED_PREFIXES)

    def holds(spec: FineTuneJobSpec) -> bool:
        keys = spec.template.labels if block == "labels" else spec.template.annotations
        return not any(key.startswith(RESERVED_PREFIXES) for key in keys)

    return Rule(
        name=f"template-{block}-are-the-users",
        path=f"template.{block}",
        cel=f"!has(self.template.{block}) || !self.template.{block}.exists(key, {begins})",
        holds=holds,
        text=f"cannot have keys that begin with {', '.join(RESERVED_PREFIXES)}: operators find their pods by them",
        way_out="choose another prefix",
    )


def _claim_rule(path: str, given: str, read: Callable[[FineTuneJobSpec], str | None]) -> Rule:
    """A `pvc://` URI names a claim of the job's namespace and a place in it."""
    return Rule(
        name=f"{path}-names-a-claim",
        path=path,
        cel=f"!({given}) || !self.{path}.startsWith('pvc://') || "
        f"(self.{path}.matches('{_CLAIM_PATTERN}') && !self.{path}.matches('{_LEADS_OUT}'))",
        holds=lambda spec: _names_a_claim(read(spec)),
        text="has to be pvc://claim or pvc://claim/path: a claim of the job's namespace, and a path without ..",
        way_out="write the claim's name after pvc://: small letters, digits and -",
    )


_LOOP_ONLY = (
    *("training.epochs", "training.maxSteps", "training.globalBatchSize", "training.microBatchSize"),
    *("training.learningRate", "training.scheduler", "training.warmupSteps", "training.weightDecay"),
    *("training.maxGradNorm", "training.optimizer", "training.seed", "training.labelSmoothing"),
    *("training.earlyStopping", "training.precision", "training.arguments"),
    *("parallelism.strategy", "parallelism.zeroStage", "parallelism.offload.activations", "parallelism.tensor"),
    *("parallelism.pipeline.degree", "parallelism.pipeline.microBatches", "parallelism.pipeline.schedule"),
    *("parallelism.sequence", "parallelism.activationCheckpointing", "parallelism.placement"),
    *("checkpoints.every", "checkpoints.keep", "checkpoints.onPreemption", "checkpoints.uri", "checkpoints.signingKey"),
    *("model.adapter.method", "preference.beta"),
)
"""What the built-in loop alone obeys: beside a script these would be accepted and ignored. What needs one of them is
refused by a rule of its own.
"""
_INFERENCE_ONLY = ("preparation.engine", "preparation.maxLength", "preparation.workers")
"""Beside a script, what says something about the rows of evaluate and predict only."""


def _script_rule(path: str, *, inference: bool = False) -> Rule:
    """A field that is left at its default beside a script (`inference`: unless rows are evaluated or predicted)."""
    parts = path.split(".")
    shape = find(spec_shape(), parts)
    assert shape is not None, path
    default = shape.default

    def holds(spec: FineTuneJobSpec) -> bool:
        if spec.script is None:
            return True
        if inference and (spec.evaluation is not None or spec.predict is not None):
            return True
        value: object = spec
        for part in parts:
            value = getattr(value, to_snake(part))
        return value == default

    free = "!has(self.training) || !has(self.training.script)"
    free += " || has(self.evaluation) || has(self.predict)" if inference else ""
    kept = f"!has(self.{path})" if default is None else f"self.{path} == {_cel(shape)}"
    goes_on = path.startswith("training.")
    text = "is what the built-in loop obeys, and spec.training.script takes its place"
    return Rule(
        name=f"script-ignores-{path}",
        path=path,
        # Objects without declared fields, and fields of no fixed type, are beyond CEL.
        cel=None if path in ("training.arguments", "checkpoints.every") else f"{free} || {kept}",
        holds=holds,
        text=f"{text}, with nothing to evaluate or predict" if inference else text,
        way_out="leave it out" + (", or give it to the program by training.script.hyperparameters" * goes_on),
        reads=(path, "training.script", *(("evaluation", "predict") if inference else ())),
    )


def _cel(shape: Shape) -> str:
    """A field's default as CEL writes it: 0 is no value of a number that may have a fraction."""
    value = shape.default
    if isinstance(shape.body, Number) and not shape.body.integer and isinstance(value, int):
        value = float(value)
    return f"'{value}'" if isinstance(value, str) else json.dumps(value)


def _stays_inside(path: str, read: Callable[[ScriptSpec], str | None]) -> Rule:
    """A path below the repository."""

    def holds(spec: FineTuneJobSpec) -> bool:
        return spec.script is None or ".." not in (read(spec.script) or "").split("/")

    given = "".join(
        f" && has(self.{each})" for each in ("training.script", *((path,) if path.endswith("path") else ()))
    )
    return Rule(
        name=f"{path}-stays-inside",
        path=path,
        cel=f"!(has(self.training){given}) || !self.{path}.matches('(^|/)[.][.](/|$)')",
        holds=holds,
        text="may not lead out of the repository",
        way_out="write it without ..",
    )


SIZES: Mapping[str, tuple[str, str]] = {
    "resources.memory": ("64Mi", "16Gi"),
    "resources.sharedMemory": ("1Mi", "8Gi"),
    "resources.accelerator.memory": ("1Gi", "80Gi"),
    "storage.size": ("1Mi", "100Gi"),
}
"""Field -> the least that can be meant, and a usual value. An interpreter that has imported torch takes 200 MiB."""
MOST_CORES = 2048
"""Above the largest machines of the clouds, which have 1,920."""


def _size_of(spec: FineTuneJobSpec, path: str) -> str | None:
    value: object = spec
    for part in path.split("."):
        value = getattr(value, to_snake(part), None)
    return value if isinstance(value, str) and value != "auto" else None


def _size_rule(path: str, least: str, usual: str) -> Rule:
    """A size that is too small to be meant: its unit was forgotten, or is `m`, a thousandth."""

    def advice(spec: FineTuneJobSpec) -> str:
        found = re.fullmatch(r"0*([1-9][0-9]*)(m?)", _size_of(spec, path) or "")
        if found is None:
            return f"write a size such as {usual}"
        units = ("Mi", "Gi") if found[2] or int(found[1]) >= 1024 else ("Gi",)
        meant = (f"{found[1]}{unit}" for unit in units)
        return f"write {next((each for each in meant if parse_quantity(each) >= parse_quantity(least)), usual)}"

    def holds(spec: FineTuneJobSpec) -> bool:
        size = _size_of(spec, path)
        return size is None or parse_quantity(size) >= parse_quantity(least)

    return Rule(
        name=f"{path}-has-a-unit",
        path=path,
        cel=None,
        holds=holds,
        text=f"is less than {least}: a number without a unit counts bytes",
        way_out=f"write a size such as {usual}",
        advice=advice,
        reads=(path,),
    )


def _cores_advice(spec: FineTuneJobSpec) -> str:
    found = re.fullmatch(r"([0-9]+)", spec.resources.cpu or "")
    return f"write {found[1]}m, which is {int(found[1]) / 1000:g}" if found else "write a number of cores such as 4"


_CLAIM_PATTERN = rf"^pvc://{DNS_SUBDOMAIN_PATTERN.strip('^$')}(/.*)?$".replace("\\", "\\\\")
"""As it stands in a CEL text, where a backslash is written twice."""
_LEADS_OUT = "/[.][.](/|$)"


def _names_a_claim(uri: str | None) -> bool:
    if uri is None or not uri.startswith("pvc://"):
        return True
    claim, _, path = uri.removeprefix("pvc://").partition("/")
    return re.fullmatch(DNS_SUBDOMAIN_PATTERN, claim) is not None and ".." not in path.split("/") and "\n" not in path


_SPREAD = "self.parallelism.tensor * self.parallelism.pipeline.degree"
_MODEL = f"({_SPREAD} * self.parallelism.sequence)"
_PROCESSES = (
    "(type(self.resources.processesPerNode) == int ? int(self.resources.processesPerNode)"
    " : type(self.resources.gpusPerNode) != int ? 0"
    " : int(self.resources.gpusPerNode) > 0 ? int(self.resources.gpusPerNode)"
    f" : {_MODEL} == 1 && self.parallelism.strategy in ['auto', 'single'] && type(self.parallelism.zeroStage) != int"
    " ? 1 : 0)"
)
"""CEL of `certain_processes`; 0: the plan decides."""
_WORLD = f"self.resources.nodes * {_PROCESSES}"
_WORLD_FIELDS = (
    "resources.nodes",
    "resources.processesPerNode",
    "resources.gpusPerNode",
    "parallelism.strategy",
    "parallelism.zeroStage",
    "resources.elastic",
    "parallelism.tensor",
    "parallelism.pipeline.degree",
    "parallelism.sequence",
)
"""What the number of data-parallel ranks follows from."""
_WORLD_UNKNOWN = f"has(self.resources.elastic) || {_PROCESSES} == 0"
_MICRO = "self.training.microBatchSize"
_NO_ADAPTER = AdapterSpec()
_NO_LOOP = "!has(self.training) || has(self.training.script)"


# -------------------------------------------------------------------------------------------------- what goes together


def choices_of(spec: FineTuneJobSpec) -> Choices:
    """Return the choices that the spec makes; what it leaves to the plan or to the node stays open."""
    training, parallelism, resources = spec.training, spec.parallelism, spec.resources
    arguments = training.arguments if training is not None and _loops(spec) else {}
    gpus = resources.gpus_per_node
    return Choices(
        task=spec.task if _loops(spec) else None,
        packing=_unless_auto(spec.preparation.packing),
        adapter=spec.model.adapter.method,
        precision=None if training is None else _unless_auto(training.precision),
        optimizer=None if training is None else training.optimizer,
        torch_compile=bool(arguments.get("torch_compile")),
        liger=bool(arguments.get("use_liger_kernel")),
        strategy=_unless_auto(parallelism.strategy),
        zero_stage=_unless_auto(parallelism.zero_stage),
        sharding=parallelism.sharding,
        offload_optimizer=parallelism.offload.optimizer,
        offload_parameters=parallelism.offload.parameters,
        offload_activations=parallelism.offload.activations,
        checkpointing=_unless_auto(parallelism.activation_checkpointing),
        tensor=parallelism.tensor,
        pipeline=parallelism.pipeline.degree,
        sequence=parallelism.sequence,
        deepspeed_config=bool(parallelism.deepspeed_config),
        device=None if gpus == "auto" else "cuda" if gpus else "cpu",
        nodes=resources.nodes,
        processes_per_node=certain_processes(spec),
    )


def _unless_auto(value: Any) -> Any:
    return None if value == "auto" else value


_OPEN = "auto"
_TRAINED = "has(self.training) ? self.training.{} : 'auto'"
_CEL: Mapping[str, tuple[str, Value | None]] = {
    "task": ("has(self.training) && !has(self.training.script) ? self.task : 'auto'", _OPEN),
    "packing": ("self.preparation.packing", _OPEN),
    "adapter": ("self.model.adapter.method", None),
    "precision": (_TRAINED.format("precision"), _OPEN),
    "optimizer": (_TRAINED.format("optimizer"), _OPEN),
    "strategy": ("self.parallelism.strategy", _OPEN),
    "zero_stage": ("type(self.parallelism.zeroStage) == int ? int(self.parallelism.zeroStage) : -1", -1),
    "sharding": ("self.parallelism.sharding", None),
    "offload": ("self.parallelism.offload.optimizer + '+' + self.parallelism.offload.parameters", None),
    "offload_optimizer": ("self.parallelism.offload.optimizer", None),
    "offload_parameters": ("self.parallelism.offload.parameters", None),
    "offload_activations": ("self.parallelism.offload.activations", None),
    "checkpointing": ("self.parallelism.activationCheckpointing", _OPEN),
    "tensor": ("self.parallelism.tensor", None),
    "pipeline": ("self.parallelism.pipeline.degree", None),
    "model_ranks": (_SPREAD, None),
    "sequence": ("self.parallelism.sequence", None),
    "device": (
        "type(self.resources.gpusPerNode) != int ? 'auto' : int(self.resources.gpusPerNode) == 0 ? 'cpu' : 'cuda'",
        _OPEN,
    ),
    "nodes": ("self.resources.nodes", None),
    "processes_per_node": (_PROCESSES, 0),
}
"""Choice -> CEL of its value, and the value that stands for an open choice (None: it always has one). Keys of objects
without declared fields are beyond CEL.
"""
_SCHEMA_AROUND: Mapping[str, Mapping[str, JsonValue]] = {
    "deepspeed-config-needs-deepspeed": {
        "anyOf": [
            {"properties": {"strategy": {"enum": ["deepspeed"]}}},
            {"properties": {"deepspeedConfig": {"maxProperties": 0}}},
        ]
    },
}
"""Constraint -> keywords that say it where CEL cannot."""


def _table_rule(constraint: Constraint) -> Rule:
    """A row of the table as a rule on `spec`."""
    choices = [term.choice for term in (*constraint.when, *constraint.needs)]
    fields = [field for choice in choices for field in FIELDS[choice]]
    if "processes_per_node" in choices:
        fields += _WORLD_FIELDS
    return Rule(
        name=constraint.name,
        path=constraint.field,
        cel=_constraint_cel(constraint) if _CEL.keys() >= set(choices) else None,
        holds=lambda spec: constraint.holds(choices_of(spec)),
        text=constraint.rule,
        way_out=constraint.hint,
        reads=tuple(dict.fromkeys(fields)),
        schema_around=_SCHEMA_AROUND.get(constraint.name, {}),
    )


def _constraint_cel(constraint: Constraint) -> str:
    """CEL of `Constraint.holds`."""
    when = " && ".join(_term_cel(term, when_open=False) for term in constraint.when)
    needs = " && ".join(_term_cel(term, when_open=not term.chosen) for term in constraint.needs)
    return f"!({when}) || ({needs})"


def _term_cel(term: Term, *, when_open: bool) -> str:
    """CEL of whether the choice has a value that `term` asks for; `when_open`: what an open choice gives."""
    value, open_value = _CEL[term.choice]
    values = list(term.values)
    if open_value is not None and when_open != term.excluded:
        values.insert(0, open_value)
    value = f"({value})" if " " in value else value
    if len(values) == 1:
        return f"{value} {'!=' if term.excluded else '=='} {values[0]!r}"
    return f"!({value} in {values})" if term.excluded else f"{value} in {values}"


RULES: tuple[Rule, ...] = (
    Rule(
        "something-to-do",
        "training",
        "has(self.training) || has(self.evaluation) || has(self.predict) || has(self.endpoint)",
        lambda spec: any(part is not None for part in (spec.training, spec.evaluation, spec.predict, spec.endpoint)),
        "at least one of spec.training, spec.evaluation and spec.predict is needed",
        "write `training: {}` to train with the defaults",
    ),
    Rule(
        "training-needs-dataset",
        "dataset",
        "!has(self.training) || has(self.dataset)",
        lambda spec: spec.training is None or spec.dataset is not None,
        "is required when something trains",
        "set spec.dataset.uri, or leave out spec.training",
    ),
    Rule(
        "evaluation-needs-dataset",
        "dataset",
        "!has(self.evaluation) || has(self.training) || has(self.dataset)",
        lambda spec: spec.evaluation is None or spec.training is not None or spec.dataset is not None,
        "is required when something is evaluated",
        "set spec.dataset.uri, or leave out spec.evaluation",
    ),
    Rule(
        "predict-needs-dataset",
        "predict.dataset",
        "!has(self.predict) || has(self.dataset) || has(self.predict.dataset)",
        lambda spec: spec.predict is None or spec.dataset is not None or spec.predict.dataset is not None,
        "is required when there is no spec.dataset whose test or validation split could be predicted",
        "set spec.predict.dataset.uri or spec.dataset.uri",
    ),
    Rule(
        "adapter-is-trained",
        "model.adapter.method",
        "self.model.adapter.method == 'none' || has(self.training)",
        lambda spec: spec.model.adapter.method == "none" or spec.training is not None,
        "is about the training, and nothing is trained",
        "leave spec.model.adapter out, or write `training: {}`",
    ),
    Rule(
        "adapter-settings-need-a-method",
        "model.adapter",
        f"self.model.adapter.method != 'none' || (self.model.adapter.rank == {_NO_ADAPTER.rank}"
        f" && self.model.adapter.alpha == {_NO_ADAPTER.alpha} && self.model.adapter.dropout == {_NO_ADAPTER.dropout})",
        lambda spec: (
            spec.model.adapter.method != "none"
            or spec.model.adapter.model_copy(update={"target_modules": "auto"}) == _NO_ADAPTER
        ),
        "has a rank, an alpha or a dropout, which say nothing while its method is none",
        "set spec.model.adapter.method to lora, qlora or dora, or leave spec.model.adapter out",
    ),
    Rule(
        "adapter-targets-need-a-method",
        "model.adapter.targetModules",
        None,
        lambda spec: spec.model.adapter.method != "none" or spec.model.adapter.target_modules == "auto",
        "names layers to adapt, and spec.model.adapter.method is none",
        "set spec.model.adapter.method to lora, qlora or dora, or leave it out",
        reads=("model.adapter.method", "model.adapter.targetModules"),
    ),
    Rule(
        "epochs-or-steps",
        "training.maxSteps",
        "!has(self.training) || !has(self.training.epochs) || !has(self.training.maxSteps)",
        lambda spec: spec.training is None or spec.training.epochs is None or spec.training.max_steps is None,
        "takes the place of spec.training.epochs, so that only one of them can be given",
        "remove one of the two",
    ),
    Rule(
        "global-batch-divides",
        "training.globalBatchSize",
        # The arithmetic of _batch_unit, in two steps because CEL has no local variables.
        f"{_NO_LOOP} || self.training.globalBatchSize % "
        f"((({_WORLD_UNKNOWN}) || ({_WORLD}) % {_MODEL} != 0 ? 1 : ({_WORLD}) / {_MODEL})"
        f" * (type({_MICRO}) == int ? int({_MICRO}) : 1)) == 0",
        _global_batch_fits,
        "is kept exactly, so it has to be a multiple of the data-parallel ranks x spec.training.microBatchSize",
        "change it or spec.training.microBatchSize",
        advice=_global_batch_advice,
        reads=("training", *_WORLD_FIELDS),
    ),
    Rule(
        "warmup-needs-scheduler",
        "training.warmupSteps",
        "!has(self.training) || self.training.warmupSteps == 0.0 || self.training.scheduler != 'constant'",
        lambda spec: spec.training is None or spec.training.warmup_steps == 0 or spec.training.scheduler != "constant",
        "has no effect with the scheduler constant",
        "set spec.training.scheduler to constant_with_warmup, or leave spec.training.warmupSteps out",
    ),
    *(_script_rule(path) for path in _LOOP_ONLY),
    *(_script_rule(path, inference=True) for path in _INFERENCE_ONLY),
    _stays_inside("training.script.git.path", lambda script: script.git.path),
    _stays_inside("training.script.entryPoint", lambda script: script.entry_point),
    *(_table_rule(constraint) for constraint in CONSTRAINTS),
    Rule(
        "model-parallel-divides-world",
        "resources.processesPerNode",
        f"{_WORLD_UNKNOWN} || ({_WORLD}) % {_MODEL} == 0",
        lambda spec: spec.resources.elastic is not None or (_world(spec) or 0) % spec.parallelism.replica_ranks == 0,
        "times spec.resources.nodes has to be a multiple of tensor x pipeline x sequence in spec.parallelism",
        "change the degrees, the nodes or the processes",
        advice=_degrees_advice,
        reads=_WORLD_FIELDS,
    ),
    Rule(
        "pipeline-settings-need-a-degree",
        "parallelism.pipeline",
        f"{_NO_LOOP} || self.parallelism.pipeline.degree > 1 || (self.parallelism.pipeline.schedule == '1f1b'"
        " && type(self.parallelism.pipeline.microBatches) != int)",
        lambda spec: (
            not _loops(spec)
            or spec.parallelism.pipeline.degree > 1
            or (
                spec.parallelism.pipeline.schedule == "1f1b"
                and not isinstance(spec.parallelism.pipeline.micro_batches, int)
            )
        ),
        "has a schedule or microBatches and a degree of 1, which is no pipeline",
        "set degree to 2 or more, or leave schedule and microBatches out",
        reads=(
            "parallelism.pipeline.degree",
            "parallelism.pipeline.schedule",
            "parallelism.pipeline.microBatches",
            "training.script",
        ),
    ),
    Rule(
        "placement-places-something",
        "parallelism.placement",
        f"{_NO_LOOP} || self.parallelism.placement == 'cluster' || ({_SPREAD}) > 1",
        lambda spec: not _loops(spec) or spec.parallelism.placement == "cluster" or spec.parallelism.model_ranks > 1,
        "places the ranks of spec.parallelism.tensor and pipeline, and there are none",
        "leave it out, or set tensor or pipeline.degree above 1",
        reads=("parallelism.placement", "parallelism.tensor", "parallelism.pipeline.degree", "training.script"),
    ),
    Rule(
        "placement-names-once",
        "parallelism.placement",
        "!self.parallelism.placement.matches('D.*D|P.*P|T.*T')",
        _placement_is_kept,
        "names a dimension twice",
        "name each of D, P and T once",
    ),
    Rule(
        "placement-names-all",
        "parallelism.placement",
        "self.parallelism.placement in ['cluster', 'spread']"
        " || ((self.parallelism.tensor == 1 || self.parallelism.placement.contains('T'))"
        " && (self.parallelism.pipeline.degree == 1 || self.parallelism.placement.contains('P')))",
        _placement_names_all,
        "has to name T with spec.parallelism.tensor above 1, and P with spec.parallelism.pipeline.degree above 1",
        "name them, e.g. DPT",
        reads=("parallelism.placement", "parallelism.tensor", "parallelism.pipeline.degree"),
    ),
    Rule(
        "one-process-per-gpu",
        "resources.processesPerNode",
        "type(self.resources.processesPerNode) != int || type(self.resources.gpusPerNode) != int"
        " || int(self.resources.gpusPerNode) == 0"
        " || int(self.resources.processesPerNode) <= int(self.resources.gpusPerNode)",
        _one_process_per_gpu,
        "cannot be more than spec.resources.gpusPerNode: a GPU takes one process",
        "set it to auto or to the number of GPUs",
    ),
    Rule(
        "accelerator-needs-gpus",
        "resources.accelerator",
        "(!has(self.resources.accelerator.product) && !has(self.resources.accelerator.memory))"
        " || self.resources.gpusPerNode != 0",
        lambda spec: (
            (spec.resources.accelerator.product is None and spec.resources.accelerator.memory is None)
            or spec.resources.gpus_per_node != 0
        ),
        "has no effect while spec.resources.gpusPerNode is 0",
        "set spec.resources.gpusPerNode, or leave spec.resources.accelerator out",
    ),
    Rule(
        "elastic-bounds-in-order",
        "resources.elastic.maxNodes",
        "!has(self.resources.elastic) || self.resources.elastic.minNodes <= self.resources.elastic.maxNodes",
        _elastic_holds(lambda least, _, most: least <= most),
        "cannot be below spec.resources.elastic.minNodes",
        "exchange the two",
    ),
    Rule(
        "elastic-bounds-hold-nodes",
        "resources.nodes",
        "!has(self.resources.elastic) || self.resources.elastic.minNodes > self.resources.elastic.maxNodes"
        " || (self.resources.elastic.minNodes <= self.resources.nodes"
        " && self.resources.nodes <= self.resources.elastic.maxNodes)",
        _elastic_holds(lambda least, nodes, most: least > most or least <= nodes <= most),
        "has to lie between spec.resources.elastic.minNodes and maxNodes",
        "change it or the bounds",
    ),
    Rule(
        "windows-overlap-in-part",
        "preparation.stride",
        "!has(self.preparation.stride) || !has(self.preparation.maxLength)"
        " || 2 * self.preparation.stride <= self.preparation.maxLength",
        lambda spec: (
            spec.preparation.stride is None
            or spec.preparation.max_length is None
            or 2 * spec.preparation.stride <= spec.preparation.max_length
        ),
        "is more than half of spec.preparation.maxLength, so that windows would bring little new",
        "make it smaller, or leave it out",
    ),
    Rule(
        "generation-is-of-tasks-that-write",
        "generation",
        f"{_is_one_of(WRITING_TASKS)} || (self.generation.maxNewTokens == 128"
        " && self.generation.numBeams == 1 && self.generation.temperature == 0.0 && self.generation.topP == 1.0)",
        lambda spec: spec.task in WRITING_TASKS or spec.generation == GenerationSpec(),
        f"is for {', '.join(WRITING_TASKS)}",
        "leave spec.generation out",
    ),
    Rule(
        "preference-is-of-preference-tuning",
        "preference",
        f"self.task == 'preference-tuning' || self.preference.beta == {PreferenceSpec().beta}",
        lambda spec: spec.task == "preference-tuning" or spec.preference == PreferenceSpec(),
        "is for preference-tuning",
        "leave spec.preference out",
    ),
    Rule(
        "preferences-are-judged-against-the-untrained-model",
        "evaluation",
        "self.task != 'preference-tuning' || !has(self.evaluation)"
        " || (has(self.training) && !has(self.training.script))",
        lambda spec: spec.task != "preference-tuning" or spec.evaluation is None or _loops(spec),
        "compares a model of preference-tuning with what it was before the built-in loop trained it",
        "leave it out, or train by the built-in loop",
    ),
    Rule(
        "beams-do-not-draw",
        "generation.numBeams",
        "self.generation.numBeams == 1 || self.generation.temperature == 0.0",
        lambda spec: spec.generation.num_beams == 1 or spec.generation.temperature == 0,
        "searches for the likeliest text, and spec.generation.temperature above 0 draws one",
        "set one of the two",
    ),
    Rule(
        "top-p-is-drawn-from",
        "generation.topP",
        "self.generation.topP == 1.0 || self.generation.temperature > 0.0",
        lambda spec: spec.generation.top_p == 1 or spec.generation.temperature > 0,
        "has no effect while spec.generation.temperature is 0, for nothing is drawn",
        "set spec.generation.temperature above 0, or leave it out",
    ),
    Rule(
        "checkpoint-interval-is-one",
        "checkpoints.every",
        None,
        _every_is_one,
        "takes exactly one of steps and minutes",
        "leave one of them, or write auto",
        reads=("checkpoints.every",),
        schema={"maxProperties": 1},
    ),
    Rule(
        "spot-is-enabled",
        "spot.enabled",
        "self.spot.enabled || (!has(self.spot.maxRunSeconds) && !has(self.spot.maxWaitSeconds)"
        " && !self.spot.fallbackToOnDemand)",
        lambda spec: (
            spec.spot.enabled
            or (
                spec.spot.max_run_seconds is None
                and spec.spot.max_wait_seconds is None
                and not spec.spot.fallback_to_on_demand
            )
        ),
        "has to be true beside other fields of spec.spot, which say nothing without it",
        "set it to true, or leave spec.spot out",
    ),
    Rule(
        "spot-is-for-training",
        "spot.enabled",
        "!self.spot.enabled || has(self.training)",
        lambda spec: not spec.spot.enabled or spec.training is not None,
        "is about the training, and nothing is trained",
        "leave spec.spot out, or add spec.training",
    ),
    Rule(
        "spot-resumes",
        "checkpoints.resume",
        "!self.spot.enabled || self.checkpoints.resume == 'auto'",
        lambda spec: not spec.spot.enabled or spec.checkpoints.resume == "auto",
        "never would begin the training anew each time a spot node is taken away",
        "set it to auto, or leave spec.spot out",
    ),
    Rule(
        "spot-wait-covers-run",
        "spot.maxWaitSeconds",
        "!has(self.spot.maxRunSeconds) || !has(self.spot.maxWaitSeconds)"
        " || self.spot.maxWaitSeconds >= self.spot.maxRunSeconds",
        lambda spec: (
            spec.spot.max_run_seconds is None
            or spec.spot.max_wait_seconds is None
            or spec.spot.max_wait_seconds >= spec.spot.max_run_seconds
        ),
        "includes the run, so it cannot be below spec.spot.maxRunSeconds",
        "make it longer",
    ),
    Rule(
        "gate-is-measured",
        "evaluation.gate.metric",
        None,
        _gate_is_measured,
        "has to be one of spec.evaluation.metrics",
        "add it there, or set spec.evaluation.metrics to auto",
        reads=("evaluation",),
    ),
    Rule(
        "metrics-are-of-the-task",
        "evaluation.metrics",
        None,
        lambda spec: not _strange_metrics(spec),
        "has to name metrics of spec.task",
        "write auto for all of them",
        advice=_metrics_advice,
        reads=("evaluation", "task"),
    ),
    Rule(
        "gate-metric-is-of-the-task",
        "evaluation.gate.metric",
        _metric_cel("evaluation.gate", metrics_of),
        lambda spec: (gate := _gate(spec)) is None or gate.metric in metrics_of(spec.task),
        "has to be a metric of spec.task, or loss",
        "name one of them",
        advice=lambda spec: _gate_metric_advice(_gate_of(spec), spec.task),
    ),
    Rule(
        "early-stopping-metric-is-measured",
        "training.earlyStopping.metric",
        _metric_cel("training.earlyStopping", stopping_metrics_of),
        lambda spec: (watched := _watched(spec)) is None or watched in stopping_metrics_of(spec.task),
        "has to be measured by spec.task while it trains",
        "watch loss",
        advice=lambda spec: _metric_advice(_watched(spec) or "", spec.task, stopping_metrics_of(spec.task)),
    ),
    Rule(
        "gate-has-one-limit",
        "evaluation.gate",
        "!has(self.evaluation) || !has(self.evaluation.gate)"
        " || has(self.evaluation.gate.minimum) != has(self.evaluation.gate.maximum)",
        _gate_holds(lambda gate: (gate.minimum is None) != (gate.maximum is None)),
        "needs exactly one of minimum and maximum",
        "set minimum for a metric that is better when higher, maximum for one that is better when lower",
        advice=lambda spec: _limit_advice(_gate_of(spec)),
    ),
    Rule(
        "gate-minimum-is-of-what-grows",
        "evaluation.gate.minimum",
        _gate_cel(
            "minimum",
            f"has(self.evaluation.gate.maximum) || !(self.evaluation.gate.metric in {_words(LOWER_IS_BETTER)})",
        ),
        _gate_holds(
            lambda gate: gate.minimum is None or gate.maximum is not None or gate.metric not in LOWER_IS_BETTER
        ),
        "is a least value, and the metric is better when lower",
        "write maximum in its place",
    ),
    Rule(
        "gate-maximum-is-of-what-shrinks",
        "evaluation.gate.maximum",
        _gate_cel(
            "maximum",
            f"has(self.evaluation.gate.minimum) || !(self.evaluation.gate.metric in {_words(_HIGHER_IS_BETTER)})",
        ),
        _gate_holds(
            lambda gate: gate.maximum is None or gate.minimum is not None or gate.metric not in _HIGHER_IS_BETTER
        ),
        "is a greatest value, and the metric is better when higher",
        "write minimum in its place",
    ),
    Rule(
        "gate-minimum-can-be-met",
        "evaluation.gate.minimum",
        _limit_cel("minimum", "<=", GREATEST),
        _gate_holds(lambda gate: gate.minimum is None or gate.minimum <= GREATEST.get(gate.metric, gate.minimum)),
        "is more than the metric can be",
        "lower it",
        advice=lambda spec: _minimum_advice(_gate_of(spec)),
    ),
    Rule(
        "gate-maximum-can-be-met",
        "evaluation.gate.maximum",
        _limit_cel("maximum", ">=", LEAST),
        _gate_holds(lambda gate: gate.maximum is None or gate.maximum >= LEAST.get(gate.metric, gate.maximum)),
        "is less than the metric can be",
        "raise it",
        advice=lambda spec: f"the metric is at least {LEAST[_gate_of(spec).metric]:g}",
    ),
    Rule(
        "predictions-have-a-format",
        "predict.output",
        "!has(self.predict) || !has(self.predict.output) || self.predict.output.endsWith('.jsonl')"
        " || self.predict.output.endsWith('.parquet')",
        lambda spec: (
            spec.predict is None or spec.predict.output is None or spec.predict.output.endswith((".jsonl", ".parquet"))
        ),
        "has to end in .jsonl or .parquet, which also chooses the format",
        "add one of the two endings",
        advice=_predictions_advice,
    ),
    Rule(
        "replicas-within-bounds",
        "endpoint.maxReplicas",
        "!has(self.endpoint) || !has(self.endpoint.maxReplicas) || self.endpoint.maxReplicas >= self.endpoint.replicas",
        lambda spec: (
            spec.endpoint is None
            or spec.endpoint.max_replicas is None
            or spec.endpoint.max_replicas >= spec.endpoint.replicas
        ),
        "cannot be below spec.endpoint.replicas",
        "raise it, or lower spec.endpoint.replicas",
    ),
    _hub_only_rule(
        "model.revision",
        "self.model.revision != 'main'",
        "model.uri",
        lambda spec: spec.model.revision == "main" or spec.model.uri.startswith("hf://"),
    ),
    _hub_only_rule(
        "dataset.config",
        "has(self.dataset) && has(self.dataset.config)",
        "dataset.uri",
        lambda spec: spec.dataset is None or spec.dataset.config is None or spec.dataset.uri.startswith("hf://"),
    ),
    _hub_only_rule(
        "predict.dataset.config",
        "has(self.predict) && has(self.predict.dataset) && has(self.predict.dataset.config)",
        "predict.dataset.uri",
        lambda spec: (
            spec.predict is None
            or spec.predict.dataset is None
            or spec.predict.dataset.config is None
            or spec.predict.dataset.uri.startswith("hf://")
        ),
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
    _claim_rule("storage.workspace", "has(self.storage.workspace)", lambda spec: spec.storage.workspace),
    _claim_rule("storage.cache", "has(self.storage.cache)", lambda spec: spec.storage.cache),
    *(_size_rule(path, least, usual) for path, (least, usual) in SIZES.items()),
    Rule(
        "cpu-counts-cores",
        "resources.cpu",
        None,
        lambda spec: spec.resources.cpu is None or parse_quantity(spec.resources.cpu) <= MOST_CORES,
        f"counts cores, and no machine has more than {MOST_CORES:,}",
        "write a number of cores such as 4, or of thousandths such as 4000m",
        advice=_cores_advice,
        reads=("resources.cpu",),
    ),
    Rule(
        "columns-differ",
        "dataset.columns",
        _columns_cel(),
        _columns_differ,
        "has one column for what is read and for what is learnt from it, so that the answer stands in the question",
        "name two columns",
        advice=_leak_advice,
        reads=("task", "dataset"),
    ),
    Rule(
        "warmup-counts-whole-steps",
        "training.warmupSteps",
        "!has(self.training) || self.training.warmupSteps < 1.0"
        " || self.training.warmupSteps == double(int(self.training.warmupSteps))",
        lambda spec: spec.training is None or spec.training.warmup_steps < 1 or spec.training.warmup_steps % 1 == 0,
        "from 1 on counts whole steps",
        "write a whole number, or a share of all steps below 1",
        advice=lambda spec: f"write {spec.training.warmup_steps:.0f}" if spec.training else "",
    ),
    Rule(
        "replicas-on-cpus-divide-the-batch",
        "training.globalBatchSize",
        None,
        _replicas_divide,
        "is kept exactly, so it has to be a multiple of the replicas x spec.training.microBatchSize",
        "change it or spec.training.microBatchSize",
        advice=_replicas_advice,
        reads=("training", *_WORLD_FIELDS),
    ),
    Rule(
        "pipeline-passes-are-whole",
        "parallelism.pipeline.microBatches",
        None,
        _passes_fit,
        "does not divide the micro-batches of a replica's step into whole passes",
        "set it to auto",
        advice=_passes_advice,
        reads=("training", "parallelism.pipeline", *_WORLD_FIELDS),
    ),
    Rule(
        "zero-plus-plus-is-obeyed",
        "parallelism.deepspeedConfig",
        None,
        lambda spec: _zero_plus_plus_fault(spec) is None,
        "has keys of ZeRO++, which need zeroStage 3, GPUs to quantize on, and shards on the processes of one node",
        "set spec.parallelism.zeroStage to 3, or leave them out",
        advice=lambda spec: _zero_plus_plus_fault(spec) or "",
        reads=("parallelism.deepspeedConfig", *_WORLD_FIELDS),
    ),
    Rule(
        "offload-keys-need-an-offload",
        "parallelism.deepspeedConfig",
        None,
        lambda spec: not _idle_sections(spec),
        "says how to offload what spec.parallelism.offload leaves on the device",
        "set spec.parallelism.offload, or leave its section out",
        advice=_idle_advice,
        reads=("parallelism.deepspeedConfig", "parallelism.offload"),
    ),
    *(_reserved_rule(block) for block in ("labels", "annotations")),
    *(_labels_rule(block) for block in ("dataset", "predict.dataset")),
    *(_form_rule(block) for block in ("dataset", "predict.dataset")),
    *(
        _column_rule(column, tasks, block)
        for block in ("dataset", "predict.dataset")
        for column, tasks in COLUMN_TASKS.items()
    ),
)
"""Order is the order of reporting."""
