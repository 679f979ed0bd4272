"""Create the complete plan from a job, facts and settings, with reasons and assumptions.

`plan` is pure: the same values give the same plan, on a laptop and in the operator. Requests are met exactly or refused
with all their problems; nothing is replaced silently. The phases are in the order in which decisions depend on each
other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

from finetune_contract.arguments import allows_tf32, compiles
from finetune_contract.choices import Precision, Stage, Task
from finetune_contract.facts import DeviceFacts
from finetune_contract.trainer_job import (
    Columns,
    DataSource,
    EarlyStopping,
    Evaluation,
    Gate,
    Generation,
    ModelSource,
    Prediction,
    Preference,
    Preparation,
    Splits,
    TrainerJob,
    Training,
)
from finetune_operator.api.copied import settle
from finetune_operator.api.notices import notices
from finetune_operator.api.problems import Problem
from finetune_operator.api.quantities import human_bytes, parse_quantity
from finetune_operator.api.settings import Settings
from finetune_operator.api.types import DatasetSpec, FineTuneJob, FineTuneJobSpec
from finetune_operator.planning.adapter_sizes import choose_adapter
from finetune_operator.planning.alternatives import Alternative, alternatives
from finetune_operator.planning.assumed_facts import (
    assumed_device,
    assumed_hardware,
    assumed_model,
    is_well_known,
    node_description,
)
from finetune_operator.planning.asynchronous_saving import choose_saving
from finetune_operator.planning.capacity import choose_capacity
from finetune_operator.planning.combination_checks import check_rules
from finetune_operator.planning.cost import cost_problems, estimate_training
from finetune_operator.planning.devices import find_gpu, has_fp8, mig_memory, mig_product, scales_fp16
from finetune_operator.planning.draft import Draft, Lengths, decided
from finetune_operator.planning.endpoint_plan import choose_servers, serving_order
from finetune_operator.planning.engines import choose_engine, choose_predict_engine
from finetune_operator.planning.gpu_nodes import gpu_resource
from finetune_operator.planning.inference import (
    check_inference,
    choose_inference,
    choose_optimization,
    choose_processes,
    choose_workers,
    inference_tokens,
)
from finetune_operator.planning.learned import correction_reasons
from finetune_operator.planning.model_parallel_plan import check_model_parallel
from finetune_operator.planning.network_choice import choose_network
from finetune_operator.planning.placement import check_place, choose_launcher, choose_world
from finetune_operator.planning.plan_types import Adaptation, Estimate, Facts, JobPlan, PlanRefused
from finetune_operator.planning.planned_devices import weakest, with_planned_device, with_sufficient_memory
from finetune_operator.planning.schedule import choose_checkpoints, choose_steps
from finetune_operator.planning.script import SCRIPT, choose_script, script_order
from finetune_operator.planning.sequence_plan import check_sequence
from finetune_operator.planning.strategy import choose_strategy

Phase: TypeAlias = Callable[[Draft], Draft]

NOT_ADAPTED = Adaptation()
"""Adaptation of the first attempt: none."""


def plan(
    job: FineTuneJob,
    facts: Facts,
    settings: Settings,
    adaptation: Adaptation = NOT_ADAPTED,
    *,
    as_known: bool = False,
) -> JobPlan:
    """Plan `job`, with the adaptation to earlier attempts that ran out of memory.

    A job that does not fit, but may once prepare has measured the model and the rows, gets a provisional plan; with
    `as_known` it is refused. In a cluster a job that does not fit an unknown GPU is planned for a larger one, as the
    training measures its GPU. Raise PlanRefused with all problems of the first group of phases that found any.
    """
    draft = _begin(job, facts, settings, adaptation, as_known)
    try:
        return _plan(draft)
    except PlanRefused:
        larger = None if as_known or facts.local else with_sufficient_memory(draft, _fits)
        if larger is None:
            raise
    return _plan(larger)


def _fits(draft: Draft) -> bool:
    try:
        _plan(draft)
    except PlanRefused:
        return False
    return True


def _plan(draft: Draft) -> JobPlan:
    first = (
        choose_stages,
        choose_engine,
        choose_inference,
        choose_workers,
        choose_predict_engine,
        choose_processes,
        choose_optimization,
        choose_servers,
        check_place,
        check_lengths,
    )
    draft = _walk(draft, *first, choose_packing, choose_launcher)
    if draft.script is not None:
        draft = _walk(draft, choose_world, choose_network, check_rules, choose_script, choose_capacity, check_inference)
    elif draft.loops:
        draft = with_planned_device(_walk_training(draft), draft, _walk_training)
    else:
        draft = _walk(draft, check_rules, check_inference)
    return _finish(draft)


def other_forms(job: FineTuneJob, facts: Facts, settings: Settings) -> tuple[Alternative, ...]:
    """Return the planned form of a job's training and all others that the job leaves open; none for a job without the
    built-in loop. PlanRefused.
    """
    made = plan(job, facts, settings, as_known=True)
    training = made.trainer.training
    if training is None:
        return ()
    formed = formed_draft(job, facts, settings, scaled=training.precision == "fp16")
    chosen = replace(formed, strategy=training.strategy, batch=training.batch, memory=made.memory)
    return alternatives(replace(chosen, checkpoints=training.checkpoints))


def formed_draft(job: FineTuneJob, facts: Facts, settings: Settings, scaled: bool = True) -> Draft:
    """Return the draft of a training with all that its strategy depends on; `scaled`: `auto` may choose fp16.

    PlanRefused.
    """
    draft = _begin(job, facts, settings, NOT_ADAPTED, as_known=True)
    first = (choose_stages, choose_packing, choose_launcher, choose_world, choose_network, choose_precision)
    return _formed(_walk(replace(draft, scaled=scaled), *first))


def misfits(job: FineTuneJob, facts: Facts, settings: Settings) -> tuple[Problem, ...]:
    """Return the problems, by the known facts, of a job planned provisionally because prepare measures first."""
    try:
        plan(job, facts, settings, as_known=True)
    except PlanRefused as refused:
        return refused.problems
    return ()


def _walk_training(draft: Draft) -> Draft:
    """Run the phases of the built-in loop. If `auto` chose fp16 and nothing compatible with it fits, retry with fp32,
    with which layers can be split.
    """
    begun = _walk(draft, choose_world, choose_network, choose_precision)
    try:
        return _walk(_formed(begun), choose_strategy, choose_saving, check_inference)
    except PlanRefused:
        if begun.precision != "fp16" or draft.training.precision != "auto":
            raise
    return _walk_training(replace(draft, scaled=False))


def _formed(draft: Draft) -> Draft:
    """Return a draft with a world and a precision with all that its strategy depends on."""
    formed = _walk(draft, check_rules, choose_adapter, choose_steps)
    return _walk(formed, check_model_parallel, check_sequence, choose_checkpoints, choose_capacity)


def _walk(draft: Draft, *phases: Phase) -> Draft:
    for phase in phases:
        draft = phase(draft)
    if draft.problems:
        raise PlanRefused(draft.problems)
    return draft


# ---------------------------------------------------------------------------------------------------------------- facts


def _begin(job: FineTuneJob, facts: Facts, settings: Settings, adaptation: Adaptation, as_known: bool) -> Draft:
    """Return a draft with assumptions for all missing facts, and with copied settings replaced by our fields."""
    reasons = notices(job.spec)
    job = job.model_copy(update={"spec": settle(job.spec).spec})
    assumptions: list[str] = []
    model = facts.model
    if model is None:
        model, sentence = assumed_model(job.spec.model.uri, job.spec.task)
        assumptions.append(sentence)
    hardware = facts.hardware
    resources = job.spec.resources
    cores = None if resources.cpu is None else parse_quantity(resources.cpu)
    node_memory = None if resources.memory is None else parse_quantity(resources.memory)
    if hardware is None:
        gpus = 0 if resources.gpus_per_node == "auto" else resources.gpus_per_node
        device, sentences = _device_of(job.spec, facts, settings) if gpus else (None, [])
        hardware, sentence = assumed_hardware(gpus, device, cores, node_memory, measured=bool(facts.devices))
        assumptions += [sentence, *sentences]
    else:
        # A pod gets its requests, and no more than the node has.
        limited = {
            "cpu_cores": hardware.cpu_cores if cores is None else min(hardware.cpu_cores, max(1, int(cores))),
            "memory_bytes": hardware.memory_bytes
            if node_memory is None
            else min(hardware.memory_bytes, max(1, int(node_memory))),
        }
        hardware = hardware.model_copy(update=limited)
        if hardware.gpus_per_node and hardware.gpu is None:
            device, sentences = _device_of(job.spec, facts, settings)
            hardware = hardware.model_copy(update={"gpu": device})
            assumptions += sentences
        if hardware.assumed:
            assumptions.append(
                f"hardware: the node was not measured, or only in part; {node_description(hardware)} are taken"
            )
    draft = Draft(
        job=job,
        local=facts.local,
        served=facts.served,
        kserve=facts.kserve,
        custom_metrics=facts.custom_metrics,
        runtime_there=facts.runtime_there,
        prepared=facts.prepared,
        predicted=facts.predicted,
        settings=settings,
        adaptation=adaptation,
        hardware=hardware,
        device_source=_device_source(facts, hardware.gpu),
        hardware_known=facts.hardware is not None,
        model=model,
        model_known=facts.model is not None or is_well_known(job.spec.model.uri),
        model_revision=facts.model_revision or job.spec.model.revision,
        nodes_network=None if facts.nodes is None else facts.nodes.network,
        as_known=as_known,
        data=facts.data,
        lengths=Lengths(longest=1, typical=1.0),
        learned=facts.learned,
        reasons=reasons,
        assumptions=tuple(assumptions),
    )
    return _with_lengths(draft)


def _device_source(facts: Facts, gpu: DeviceFacts | None) -> Literal["known", "assumed", "measured"]:
    if gpu is None or (facts.hardware is not None and facts.hardware.gpu is not None):
        return "known"
    if facts.devices:
        return "measured"
    return "assumed" if gpu.assumed else "known"


def _device_of(spec: FineTuneJobSpec, facts: Facts, settings: Settings) -> tuple[DeviceFacts, list[str]]:
    """Return the GPU of unmeasured nodes, by earlier attempts, by their labels or by the job and the tables, and
    sentences with the assumptions.
    """
    measured, nodes = weakest(facts.devices), facts.nodes
    if measured is not None:
        several = "" if len(facts.devices) == 1 else f", the weakest of {len(facts.devices)} kinds"
        units = "with bf16" if measured.bf16 else "without bf16"
        has = f"{measured.product} with {human_bytes(measured.memory_bytes)}, {units}"
        return measured, [f"hardware: {has}{several}: measured by an earlier attempt"]
    if nodes is not None and nodes.gpu is not None:
        return nodes.gpu, [f"hardware: {nodes.words}"]
    accelerator = spec.resources.accelerator
    memory = None if accelerator.memory is None else int(parse_quantity(accelerator.memory))
    resource = gpu_resource(spec, settings.defaults)
    product = mig_product(accelerator.product, resource)
    device, sentence = assumed_device(product, memory or mig_memory(resource), settings.hardware)
    sources = [] if nodes is None else [f"hardware: {nodes.words}"]
    return device, sources + ([] if sentence is None else [sentence])


def _with_lengths(draft: Draft) -> Draft:
    """Set the lengths of the prepared rows; before prepare, every row counts as being as long as the limit."""
    split = draft.train_split
    limit = draft.length_limit
    # A row with two answers is two sequences, each with the prompt.
    sequences = 2 if draft.compares else 1
    if split is not None and split.rows and split.longest:
        # Rows are measured as a whole: neither of two sequences is known to be shorter than the limit.
        longest = split.longest if sequences == 1 else min(split.longest, limit)
        typical = max(1.0, split.tokens / split.rows / sequences)
        return replace(draft, lengths=Lengths(longest, typical, sequences))
    draft = replace(draft, lengths=Lengths(limit, float(limit), sequences))
    if not draft.loops or split is not None:
        return draft
    each = "every row is" if sequences == 1 else f"the {sequences} sequences of every row are"
    most = "the most it can have" if sequences == 1 else "the most they can have"
    return draft.assuming(f"lengths: nothing is prepared yet; {each} taken to have {limit} tokens, {most}")


# --------------------------------------------------------------------------------------------------------------- phases


def choose_stages(draft: Draft) -> Draft:
    """Choose the stages that the job needs, in order."""
    spec = draft.spec
    stages: list[Stage] = []
    predicts = spec.predict is not None
    if spec.training is not None or spec.evaluation is not None or predicts:
        stages.append(Stage.PREPARE)
    if spec.training is not None:
        stages.append(Stage.TRAIN)
    # The model of a user's own program may not be measurable: evaluate it only on request.
    if draft.loops or spec.evaluation is not None:
        stages.append(Stage.EVALUATE)
    if predicts:
        stages.append(Stage.PREDICT)
    if spec.endpoint is not None and not draft.local:
        stages.append(Stage.SERVE)
    if spec.endpoint is not None and not stages:
        hint = "apply the job to a cluster, or add spec.evaluation"
        return draft.refusing(("endpoint",), None, "without a cluster nothing is served", hint, "NotSupported")
    if spec.endpoint is not None and draft.local:
        draft = draft.because("spec.endpoint: without a cluster nothing is served")
    return replace(draft, stages=tuple(stages)).because(
        f"stages {' -> '.join(stage.value for stage in stages)}: what the job asks for and what that needs"
    )


def check_lengths(draft: Draft) -> Draft:
    """Refuse rows longer than the model's positions, if the model is known; otherwise the trainer does."""
    asked, limit = draft.spec.preparation.max_length, draft.model.max_positions
    if not draft.model_known or asked is None or limit is None or asked <= limit:
        return draft
    return draft.refusing(
        ("preparation", "maxLength"),
        asked,
        f"the model holds at most {limit} tokens",
        f"set it to {limit} or less, or leave it out",
    )


def choose_packing(draft: Draft) -> Draft:
    """Choose whether rows share sequences. By default plain text is packed, as its row borders mean little, but prompts
    and conversations are not: there a step is a number of rows. Rows divided among processes are not packed either:
    they are long, and a pack needs an undivided mask of tokens x tokens, while a single row needs none.
    """
    asked, task = draft.spec.preparation.packing, draft.spec.task
    if not draft.loops or asked == "never":
        return draft
    if task != "text-generation":
        return draft
    given = draft.spec.dataset.columns.model_dump(exclude_none=True) if draft.spec.dataset else {}
    if asked == "auto" and given.keys() & _INSTEAD_OF_TEXT:
        return draft
    degree = draft.spec.parallelism.sequence
    if asked == "auto" and degree > 1:
        return draft.because(
            f"rows are not packed: each of the {degree} processes that they are divided among would need a mask of all "
            "tokens of a pack for each of them"
        )
    what = "as asked" if asked == "always" else "rows are plain text"
    return replace(draft, packing=True).because(
        f"rows are packed into sequences of maxLength tokens, which globalBatchSize counts: {what}"
    )


def _splits_layers(spec: FineTuneJobSpec) -> bool:
    """Return whether the job requests tensor or pipeline parallelism, which have no loss scaling for fp16."""
    return spec.parallelism.tensor > 1 or spec.parallelism.pipeline.degree > 1


def choose_precision(draft: Draft) -> Draft:
    """Choose the precision; `auto` takes bf16 if the hardware has units for it, for any model size, else fp16 or fp32.

    Measured on 2 cores with AVX512-BF16, rows of 32 and 128 tokens: bf16 trains a 22M-parameter BERT 1.5 to 1.8 times
    as fast as fp32 and BERT base 1.7 to 1.9 times; on cores without such units it is 2 to 4 times slower.
    """
    asked, hardware, world = draft.training.precision, draft.hardware, draft.world
    if world is None:
        return draft  # The world was refused, and without it the devices are not known.
    on_gpu = world.device == "cuda"
    has_bf16 = decided(hardware.gpu).bf16 if on_gpu else hardware.cpu_bf16
    device = decided(hardware.gpu).product if on_gpu else "the CPU"
    fp8 = has_fp8(decided(hardware.gpu), draft.settings.hardware) if on_gpu else False
    path = ("training", "precision")
    match asked:
        case "auto":
            chosen, why = _automatic_precision(draft, device, has_bf16)
            return _with_tf32(replace(draft, precision=chosen).because(f"precision {chosen}: {why}"))
        case "fp8" if on_gpu and fp8 is False:
            return draft.refusing(
                path,
                asked,
                f"{device} has no units for it, as GPUs have from compute capability 8.9 on",
                "set it to auto, fp32 or bf16",
                "NotSupported",
            )
        case "fp8" if on_gpu:
            compiled = compiles(draft.training.arguments)
            slower = "" if compiled else "; without training.arguments.torch_compile that is slower than bf16"
            has = "has units for it" if fp8 else "is taken to have units for it, which the training checks"
            return replace(draft, precision="fp8").because(
                f"precision fp8: as asked; {device} {has}, and linear layers of the blocks multiply in it, "
                f"with all else in bf16{slower}"
            )
        case "bf16" if on_gpu and not has_bf16:
            return draft.refusing(
                path,
                asked,
                f"{device} does not compute in bf16",
                "set it to fp32" if _splits_layers(draft.spec) else "set it to fp32 or fp16",
                "NotSupported",
            )
        case _:
            slower = (
                "; the CPU has no units for it, so it is slower than fp32" if asked == "bf16" and not has_bf16 else ""
            )
            return _with_tf32(replace(draft, precision=asked).because(f"precision {asked}: as asked{slower}"))


def _with_tf32(draft: Draft) -> Draft:
    """Add the reason for TF32 to a draft with a precision in fp32, if its GPU is known to have it."""
    gpu = find_gpu(decided(draft.hardware.gpu).product, draft.settings.hardware) if _on_gpu(draft) else None
    if draft.precision != "fp32" or gpu is None or not gpu.tf32_flops:
        return draft
    if not allows_tf32("fp32", draft.training.arguments):
        return draft.because(f"matrix products in plain fp32: training.arguments.tf32 is false; {gpu.name} has TF32")
    return draft.because(
        f"matrix products in TF32, which {gpu.name} has: factors keep 10 bits of their mantissa, all else is in fp32; "
        "training.arguments.tf32: false turns it off"
    )


def _on_gpu(draft: Draft) -> bool:
    return draft.world is not None and draft.world.device == "cuda"


BEYOND_FP16 = ("t5", "mt5", "umt5", "longt5", "gemma", "gemma2", "gemma3", "gemma3_text")
"""Model types that were trained in bf16 and whose activations exceed the range of fp16, so that loss scaling does not
help.
"""


def _automatic_precision(draft: Draft, device: str, has_bf16: bool) -> tuple[Precision, str]:
    """Return the precision for `auto`, and the reason."""
    if has_bf16:
        return "bf16", f"{device} has units for bf16"
    if decided(draft.world).device == "cpu":
        return "fp32", f"{device} has no units for bf16, and emulated it is 2 to 4 times slower"
    if not scales_fp16(decided(draft.hardware.gpu), draft.settings.hardware):
        return "fp32", f"{device} has no units for bf16, and no known ones for fp16"
    if draft.model.model_type in BEYOND_FP16:
        return "fp32", f"{device} has no units for bf16, and {draft.model.model_type} exceeds what fp16 holds"
    tried = check_rules(replace(draft, precision="fp16", problems=())).problems
    if any(problem.path == "spec.training.precision" for problem in tried):
        return "fp32", f"{device} has no units for bf16, and fp16 does not go together with what is asked for"
    if not draft.scaled:
        return "fp32", f"{device} has no units for bf16, and no way to spread the model in fp16 fits"
    return "fp16", f"{device} has units for fp16 and none for bf16; the loss is scaled, so that small gradients stay"


# --------------------------------------------------------------------------------------------------------------- finish

_TASK_COLUMNS: dict[Task, tuple[str, ...]] = {
    "text-classification": ("text", "label"),
    "token-classification": ("tokens", "tags"),
    "question-answering": ("question", "context", "answers"),
    "text-generation": ("text",),
    "preference-tuning": ("prompt", "chosen", "rejected"),
    "summarization": ("source", "target"),
    "translation": ("source", "target"),
    "masked-lm": ("text",),
}
"""Columns that a task reads, by their default names."""
_INSTEAD_OF_TEXT = frozenset({"messages", "source", "target"})
"""Columns of rows of text-generation that are not plain text."""
_ANSWERS = frozenset({"label", "tags", "answers", "target", "chosen", "rejected"})
"""Columns with answers; rows to predict have them only if the job names them."""


def predicted_source(spec: FineTuneJobSpec) -> DataSource | None:
    """Return the source of `predict.dataset`. For text-generation, rows have the form of the trained rows, which the
    trainer takes from these if no column is named.
    """
    rows = None if spec.predict is None else spec.predict.dataset
    return None if rows is None else data_source(spec.task, rows, False, spec.dataset is not None)


def data_source(
    task: Task, dataset: DatasetSpec, with_answers: bool = True, has_trained_rows: bool = False
) -> DataSource:
    """Return the trainer's form of a data set, with the task's default names for columns that the job does not name."""
    given = dataset.columns.model_dump(by_alias=False, exclude_none=True)
    names = [name for name in _TASK_COLUMNS[task] if with_answers or name not in _ANSWERS]
    if task == "text-generation" and has_trained_rows and not given:
        names = []
    elif task == "text-generation" and given.keys() & _INSTEAD_OF_TEXT:
        names = ["source", "target"] if "messages" not in given else []
        names = [name for name in names if with_answers or name not in _ANSWERS]
    columns = {name: name for name in names} | given
    splits = dataset.splits
    return DataSource(
        uri=dataset.uri,
        config=dataset.config,
        splits=Splits(train=splits.train, validation=splits.validation, test=splits.test),
        columns=Columns(**columns),
        labels=dict(sorted(dataset.labels.items())),
    )


def _training(draft: Draft) -> Training:
    asked, steps = draft.training, decided(draft.steps)
    stopping = asked.early_stopping
    return Training(
        max_steps=steps.total,
        steps_per_epoch=steps.per_epoch,
        learning_rate=asked.learning_rate,
        scheduler=asked.scheduler,
        warmup_steps=steps.warmup,
        weight_decay=asked.weight_decay,
        max_grad_norm=asked.max_grad_norm,
        optimizer=asked.optimizer,
        seed=asked.seed,
        label_smoothing=asked.label_smoothing,
        early_stopping=None if stopping is None else EarlyStopping(metric=stopping.metric, patience=stopping.patience),
        adapter=draft.adapter,
        precision=decided(draft.precision),
        strategy=decided(draft.strategy),
        batch=decided(draft.batch),
        world=decided(draft.world),
        checkpoints=decided(draft.checkpoints),
        arguments=asked.arguments,
    )


def _evaluation(draft: Draft) -> Evaluation | None:
    if Stage.EVALUATE not in draft.stages:
        return None
    asked = draft.spec.evaluation
    metrics = None if asked is None or asked.metrics == "auto" else asked.metrics
    gate = None
    if asked is not None and asked.gate is not None:
        gate = Gate(metric=asked.gate.metric, minimum=asked.gate.minimum, maximum=asked.gate.maximum)
    return Evaluation(
        processes=draft.evaluate_processes,
        devices_per_process=draft.inference_devices,
        metrics=metrics,
        gate=gate,
        device=draft.inference_device,
        batch_tokens=inference_tokens(draft),
        precision=draft.inference_precision,
    )


BAD_ROWS = 0.01
"""Allowed share of unreadable rows: data of many sources have a few, and more of them are a mistake."""


def _prediction(draft: Draft) -> Prediction | None:
    asked = draft.spec.predict
    if asked is None:
        return None
    return Prediction(
        processes=draft.predict_processes,
        devices_per_process=draft.inference_devices,
        dataset=predicted_source(draft.spec),
        output=asked.output,
        columns=asked.columns,
        max_bad_rows=asked.max_bad_rows or 0,
        max_bad_share=BAD_ROWS if asked.max_bad_rows is None else 0.0,
        device=draft.inference_device,
        batch_tokens=inference_tokens(draft),
        precision=draft.inference_precision,
        workers=draft.predict_workers,
        engine=draft.predict_engine,
        format=asked.format,
        id_column=asked.id_column,
        optimization=draft.predict_optimization,
        tolerance=None if draft.predict_optimization == "none" else asked.tolerance,
        metric_tolerance=None if draft.predict_optimization == "none" else asked.metric_tolerance,
    )


def trainer_job(draft: Draft) -> TrainerJob:
    """Return the trainer's job of a finished draft."""
    spec = draft.spec
    job = TrainerJob(
        name=draft.job.name,
        task=spec.task,
        model=ModelSource(
            uri=spec.model.uri,
            revision=draft.model_revision,
            trust_remote_code=spec.model.trust_remote_code,
        ),
        dataset=None if spec.dataset is None else data_source(spec.task, spec.dataset),
        preparation=Preparation(
            max_length=spec.preparation.max_length,
            stride=spec.preparation.stride,
            engine=draft.engine,
            workers=spec.preparation.workers,
            packing=draft.packing,
        ),
        training=_training(draft) if draft.loops else None,
        device=draft.device,
        script=None if draft.script is None else script_order(draft, draft.script),
        evaluation=_evaluation(draft),
        predict=_prediction(draft),
        serving=serving_order(draft),
        generation=Generation(**spec.generation.model_dump()),
        preference=Preference(**spec.preference.model_dump()),
    )
    return job if spec.training is None else job.model_copy(update={"seed": spec.training.seed})


def _no_estimate(draft: Draft) -> str:
    return "nothing is trained" if draft.script is None else "no estimate: what a program of your own does is not known"


def _finish(draft: Draft) -> JobPlan:
    if Stage.EVALUATE in draft.stages or Stage.PREDICT in draft.stages:
        draft = draft.because(
            f"inference batches of {inference_tokens(draft):,} padded tokens: rows of like length together, "
            "as many as fit in that"
        )
    draft = correction_reasons(draft)
    estimate = estimate_training(draft) if draft.loops else Estimate(basis=_no_estimate(draft))
    if problems := cost_problems(draft, estimate):
        raise PlanRefused(problems)
    return JobPlan(
        name=draft.job.name,
        stages=draft.stages,
        launcher=decided(draft.launcher),
        strategy=decided(draft.strategy).label if draft.loops else SCRIPT if draft.script is not None else "none",
        capacity=draft.capacity,
        trainer=trainer_job(draft),
        deepspeed_overrides=draft.spec.parallelism.deepspeed_config,
        memory=draft.memory,
        servers=draft.servers,
        network=draft.network,
        estimate=estimate,
        hardware=draft.hardware,
        model=draft.model,
        data=draft.data,
        reasons=draft.reasons,
        assumptions=draft.assumptions,
    )
