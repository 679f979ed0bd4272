"""Notices about an accepted job: settings copied from other tools, and values that look like slips.

None of them stops a job. `finetune validate`, `plan` and `run` print the sentences, the API server returns them as
warnings, and they are the first reasons of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from pydantic import JsonValue

from finetune_contract.choices import OptimizerName, Task
from finetune_contract.metrics import GREATEST, metrics_of
from finetune_operator.spec.checks.copied_settings import settle
from finetune_operator.spec.checks.destinations import destinations, may_be_reached
from finetune_operator.spec.fields.field_values import value_at
from finetune_operator.spec.quantities import parse_quantity
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Network
from finetune_operator.spec.types import RETIRED_MARK, EndpointSpec, EvaluationSpec, FineTuneJobSpec, TrafficSpec

HIGH_RATES: Mapping[OptimizerName, float] = {"adamw": 0.01, "adafactor": 0.1, "sgd": 1.0}
"""Learning rates above which fine-tuning diverges. AdamW moves each weight by about the rate in a step: published
rates are 1e-5 to 5e-5 for all weights (Devlin et al., 2018, appendix A.3) and 1e-4 to 2e-3 for adapters (Hu et al.,
2021, appendix D). Adafactor's relative steps are 1e-2 (Shazeer and Stern, 2018). Plain SGD is scaled by gradients,
which are clipped to a norm of 1.
"""

UNUSUAL: Mapping[str, tuple[float, str]] = {
    "training.globalBatchSize": (
        4096,
        "rows per step are unusually many for fine-tuning (usual: 16 to 1,024; default: 32); a train split with fewer "
        "rows is refused",
    ),
    "training.epochs": (
        100,
        "epochs are unusually many for fine-tuning (usual: 1 to 10; default: 3), and the model memorizes the rows; "
        "spec.training.earlyStopping stops training that no longer improves",
    ),
    "training.weightDecay": (0.5, "is unusually high (usual: 0 to 0.1): weights decay towards 0"),
    "training.labelSmoothing": (0.5, "is unusually high (usual: 0 to 0.1): wrong classes get most of the target"),
    "model.adapter.rank": (
        256, "is unusually large for an adapter (usual: 8 to 64; default: 16) and saves little memory"
    ),
    "model.adapter.dropout": (0.5, "drops most of an adapter's input (usual: 0 to 0.1)"),
    "resources.cpu": (256, "cores per pod are more than most machines have; the unit m means thousandths of a core"),
}  # fmt: skip
"""Field -> the largest value without a notice, and the description of larger ones. Rows of a step: 16 and 32 (Devlin et
al., 2018), 64 (Touvron et al., Llama 2, 2023, instructions), 128 (Raffel et al., T5, 2020), 1,024 (Ouyang et al.,
2022). Epochs: 2 to 4 (Devlin et al.), 100 at most (Gururangan et al., 2020, on small corpora). Ranks: 1 to 64 (Hu et
al., 2021), 256 (Biderman et al., 2024). Weight decay: 0.01 (Devlin et al.), 0.1 (Touvron et al.).
"""
LOW_RATE = 1e-8
"""Learning rate below which no bf16 or fp32 weight changes; the lowest published are 1e-7."""
_LONG_WARMUP = 0.5
"""Fraction of all steps above which a warm-up takes most of the training; published ones are 0.03 to 0.1."""
ENCODERS = ("bert", "electra", "longformer", "mpnet", "minilm")
"""Parts of names of models without a decoder; BERT also covers RoBERTa, DeBERTa, DistilBERT and ModernBERT."""
WRITING: Mapping[Task, str] = {
    "text-generation": "gpt2 or Qwen/Qwen2.5-0.5B",
    "preference-tuning": "Qwen/Qwen2.5-0.5B-Instruct",
    "summarization": "google-t5/t5-small",
    "translation": "google-t5/t5-small",
}
"""Tasks with written answers -> small models that can write them."""
RETIRED: Mapping[str, tuple[str, str]] = {
    f"{block}.{info.alias}": (name, info.description.removeprefix(RETIRED_MARK).removesuffix("."))
    for block, model in (("endpoint", EndpointSpec), ("endpoint.traffic", TrafficSpec))
    for name, info in model.model_fields.items()
    if info.description is not None and info.description.startswith(RETIRED_MARK)
}
"""Fields without effect, which the schema keeps so that stored jobs and manifests stay valid -> name in the model, and
what to use, as the description says.
"""
MOST_NOTICES = 20
"""Maximum number of notices for one job; they go into an object's status, and nobody reads more."""


def notices(spec: FineTuneJobSpec, network: Network = CLUSTER_SETTINGS.network_policy) -> tuple[str, ...]:
    """Return sentences without their full stops, each with its field; `network`: that of the cluster's settings."""
    settled = settle(spec)
    more = len(settled.notes) - MOST_NOTICES
    rest = (f"{more} more settings are ignored or mapped to fields",) if more > 0 else ()
    checks = (
        _retired_fields,
        _unusual_values,
        _low_gate_minimum,
        _metrics_outside_task,
        _server_sizes,
        _stopping_by_loss,
        _offline_tracker,
    )
    found = (notice for check in checks for notice in check(settled.spec))
    return (*settled.notes[:MOST_NOTICES], *rest, *found, *_closed_ports(settled.spec, network))


def null_evaluation(document: JsonValue) -> Iterator[str]:
    """Yield the notice about an evaluation that is null, as if that were none."""
    spec = value_at(document, ("spec",))
    trains = isinstance(value_at(spec, ("training",)), dict) and value_at(spec, ("training", "script")) is None
    if trains and isinstance(spec, dict) and "evaluation" in spec and spec["evaluation"] is None:
        yield (
            "spec.evaluation: null takes its defaults, as if it were left out: the built-in training always evaluates "
            "its model, and without a gate any result is a success"
        )


LEAST_SERVER = "1Gi"
"""Memory up to which no server works: 498 MiB of a tiny model's are anonymous and 400 MiB its libraries' files, and
Linux drops the latter and reads them again.
"""


def _retired_fields(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield fields that have no effect any more."""
    if spec.endpoint is None:
        return
    for path, (name, instead) in RETIRED.items():
        block = spec.endpoint.traffic if path.startswith("endpoint.traffic.") else spec.endpoint
        if getattr(block, name, None) is not None:
            yield f"spec.{path} is retired and has no effect: {instead}"
    traffic = spec.endpoint.traffic
    if traffic is not None and traffic.gateway is None:
        yield (
            "spec.endpoint.traffic has no effect without its gateway: a new revision takes over once its servers "
            "answer; set gateway for a canary"
        )


def _low_gate_minimum(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield a minimum that nearly every model reaches, because it is a fraction of a metric up to 100."""
    gate = spec.evaluation.gate if spec.evaluation else None
    minimum = None if gate is None else gate.minimum
    if gate is not None and minimum is not None and GREATEST.get(gate.metric) == PERCENT and 0 < minimum <= 1:
        yield (
            f"spec.evaluation.gate.minimum: {minimum:g} is met by nearly every model, as {gate.metric} is 0 to "
            f"{PERCENT:g}; write {PERCENT * minimum:g} for {minimum:.0%}"
        )


def _named_metrics(evaluation: EvaluationSpec) -> list[str]:
    """Return the metrics that an evaluation names, that of its gate first."""
    gate, metrics = evaluation.gate, evaluation.metrics
    return [*(() if gate is None else [gate.metric]), *(() if metrics == "auto" else metrics)]


def _metrics_outside_task(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield metrics that only the user's own program can measure: another name for the task's may be meant."""
    evaluation = spec.evaluation
    if spec.script is None or evaluation is None:
        return
    for name in dict.fromkeys(metric for metric in _named_metrics(evaluation) if metric not in metrics_of(spec.task)):
        yield (
            f"spec.evaluation: {name} is not a metric of {spec.task}, so the program has to measure it, and write it "
            "with Trainer.save_metrics"
        )


PERCENT = 100
"""Greatest value of metrics that are no fractions."""


def _server_sizes(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield sizes that servers do not take, or that are too small for any of them."""
    if spec.endpoint is None:
        return
    size = spec.endpoint.resources.memory
    if size is not None and parse_quantity(size) <= parse_quantity(LEAST_SERVER):
        yield (
            f"spec.endpoint.resources.memory: {size} is less than a server takes without its model; leave it out, and "
            "the plan sizes it for the model"
        )
    if spec.training is None and spec.evaluation is None and spec.predict is None:
        for name in ("cpu", "memory"):
            if getattr(spec.resources, name) is not None and getattr(spec.endpoint.resources, name) is None:
                yield (
                    f"spec.resources.{name} has no effect on servers, and this job only serves: "
                    f"spec.endpoint.resources.{name} is that of a server"
                )


def _stopping_by_loss(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield the notice about early stopping by the loss in a job that names the metric of its evaluation."""
    stopping = None if spec.training is None else spec.training.early_stopping
    if stopping is None or spec.evaluation is None or "metric" in stopping.model_fields_set:
        return
    named = _named_metrics(spec.evaluation)
    if named and "loss" not in named:
        yield (
            f"spec.training.earlyStopping has no metric, so training stops by the loss; to stop by {named[0]}, set its "
            f"metric to {named[0]}"
        )


def _offline_tracker(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield the notice about a tracker that sends nothing unless variables are set."""
    named = None if spec.training is None else spec.training.arguments.get("report_to")
    if "wandb" not in (named if isinstance(named, list) else [named]):
        return
    if not any(variable.get("name") == "WANDB_MODE" for variable in spec.template.env):
        yield (
            "spec.training.arguments.report_to: wandb writes offline, to project finetune; to send runs, set "
            "WANDB_MODE to online, WANDB_API_KEY and WANDB_PROJECT in spec.template.env, or in your shell for "
            "`finetune run`"
        )


def _closed_ports(spec: FineTuneJobSpec, network: Network) -> Iterator[str]:
    """Yield servers that the NetworkPolicy keeps the job's pods from: connections to them time out."""
    opened = ", ".join(map(str, network.egress_ports)) or "none"
    for server in islice(destinations(spec), MOST_NOTICES):
        if not may_be_reached(server, network):
            yield (
                f"{server.field}: port {server.port} of {server.host} is closed to the job's pods, and its connections "
                f"would time out (open: {opened}); an administrator can add the host to networkPolicy.urlHosts"
            )


def _unusual_values(spec: FineTuneJobSpec) -> Iterator[str]:
    training = spec.training
    if training is None or spec.script is not None:
        return
    yield from _adapter_without_method(spec)
    name = spec.model.uri.rpartition("/")[2].lower()
    if (
        spec.task in WRITING
        and "2bert" not in name
        and (encoder := next((family for family in ENCODERS if family in name), None)) is not None
    ):
        yield (
            f"spec.model.uri: {spec.model.uri} looks like a {encoder} model, which cannot generate text; "
            f"{spec.task} needs a generative model, such as {WRITING[spec.task]}"
        )
    most = HIGH_RATES[training.optimizer]
    if training.learning_rate > most:
        yield (
            f"spec.training.learningRate: {training.learning_rate:g} is very high for {training.optimizer}: training "
            f"above {most:g} usually diverges; the default is 2e-5"
        )
    if training.learning_rate < LOW_RATE:
        yield (
            f"spec.training.learningRate: {training.learning_rate:g} is so low that weights hardly change; the default "
            "is 2e-5"
        )
    if _LONG_WARMUP < training.warmup_steps < 1:
        yield (
            f"spec.training.warmupSteps: {training.warmup_steps:g} is a large fraction of all steps for a "
            "warm-up (usual: 0.03 to 0.1)"
        )
    if training.max_steps is not None and training.warmup_steps >= training.max_steps:
        yield (
            f"spec.training.warmupSteps: {training.warmup_steps:g} is as long as the run of {training.max_steps} "
            "steps: the learning rate does not reach its peak"
        )
    values = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for path, (most, sentence) in UNUSUAL.items():
        value = value_at(values, tuple(path.split(".")))
        number = float(parse_quantity(value)) if isinstance(value, str) else value
        if isinstance(number, int | float) and number > most:
            yield f"spec.{path}: {number:,g} {sentence}"
    yield from _repeated_splits(spec)


def _repeated_splits(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield splits that are also the training split."""
    splits = spec.dataset.splits if spec.dataset else None
    if splits is None:
        return
    trained = splits.train or "train"
    if splits.validation == trained:
        yield (
            f"spec.dataset.splits.validation: {trained} is also the training split, so validation "
            "measures memorization; leave it out to hold out 5 % of train"
        )
    if splits.test == trained:
        yield (
            f"spec.dataset.splits.test: {trained} is also the training split, so the evaluation measures "
            "memorization; leave it out to evaluate on the validation split"
        )


def _adapter_without_method(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield the notice about an adapter without a method."""
    adapter = spec.model.adapter
    if adapter.method == "none" and adapter.model_fields_set and "method" not in adapter.model_fields_set:
        fp8 = spec.training is not None and spec.training.precision == "fp8"
        yield (
            "spec.model.adapter has no method, so all weights are trained; to train an adapter, set its method to "
            "lora, dora or qlora"
        ) + (
            "; an adapter needs spec.training.precision bf16: fp8 only speeds up the training of all weights"
            if fp8
            else ""
        )
