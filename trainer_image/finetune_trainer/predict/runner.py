"""Answers for a whole split, in batches bounded by padded tokens."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from finetune_contract.choices import Device, InferencePrecision, Stage
from finetune_contract.inference_settings import CPU_BATCH_TOKENS, Evaluation, Generation, Prediction
from finetune_contract.layout import COMPLETION_MARKER, FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.distributed import refuse_missing_gpu
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import ProgressSink
from finetune_trainer.core.uris import Uri, local_path
from finetune_trainer.data.batches import inference_batches
from finetune_trainer.data.prepared import PreparedData, PreparedSplit
from finetune_trainer.devices.pass_memory import row_too_long
from finetune_trainer.models.loading import load_tokenizer, pinned, resolve_model
from finetune_trainer.predict.backends.backend_protocol import Substitute, TextGenerator
from finetune_trainer.predict.backends.continuous_batches import SlotGenerator
from finetune_trainer.predict.longest_texts import whole_texts
from finetune_trainer.predict.pod_processes import (
    ALL_BATCHES,
    BatchShard,
    is_placed,
    placement,
    places,
    refuse_host_memory,
)
from finetune_trainer.predict.tensor_group import WHOLE_MODEL, Answering, ProbedWay, WholeModel, held_share
from finetune_trainer.report.measured_facts import model_without_weights
from finetune_trainer.tasks.task_protocol import Answer, Feature, Head, TaskParts, Writer, labels_of
from finetune_trainer.tasks.task_registry import task_of
from finetune_trainer.tasks.writing import TOKENS, generated_tokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

REFUSED = "refused"
"""Key of an answer without a text: the reason and the message."""


@dataclass(frozen=True)
class Means:
    """Device, batch size and precision of a stage; the defaults apply if the job has no settings for it."""

    device: Device = "cpu"
    batch_tokens: int = CPU_BATCH_TOKENS
    """Padded tokens of a batch."""
    precision: InferencePrecision = "fp32"
    devices: int = 1
    """GPUs that hold the model's layers; results do not depend on it."""
    tensor: int = 1
    """Processes that split each layer of the model; sums in other orders round otherwise."""

    @classmethod
    def of(cls, settings: Evaluation | Prediction | None) -> Means:
        """Return the settings of the job."""
        if settings is None:
            return cls()
        return cls(
            settings.device, settings.batch_tokens, settings.precision, settings.devices_per_process, settings.tensor
        )

    @property
    def entry(self) -> dict[str, str]:
        """Entry in a stage's result: none for fp32. The key `precision` would collide with the metric."""
        return {} if self.precision == "fp32" else {"computed_in": self.precision}


def model_to_use(
    job: TrainerJob,
    paths: JobPaths,
    prepared: PreparedData,
    precision: InferencePrecision,
    devices: int = 1,
    group: WholeModel = WHOLE_MODEL,
) -> PreTrainedModel:
    """Return the model that the job trained, or `model.uri` if it trains nothing; in `precision`, with its layers on
    `devices` GPUs if they are several, or the slice of this process if it belongs to a `group`.

    StageError MODEL `ModelNotTrained` if training has not ended with a model, `LabelsChanged` if the model was trained
    for other labels than those of the prepared data.
    """
    model, name = used_model(job, paths, precision, devices, group)
    model.config.update(shown_by_rows(job, paths))
    labels = task_of(job).head.model_labels(model.config)
    if labels != labels_of(prepared.facts):
        raise StageError(
            FailureClass.MODEL,
            "LabelsChanged",
            f"{name} has the labels {', '.join(labels.names if labels else ())}, but the prepared data have the "
            f"labels {', '.join(prepared.facts.labels)}.",
            "Run the stages prepare and train again.",
        )
    return model


def shown_by_rows(job: TrainerJob, paths: JobPaths) -> dict[str, Any]:
    """Return fields of the config of `model.uri` that the prepared rows decide, see `Head.shown`; none if the job
    trains, as training decides them, or if nothing is prepared.
    """
    if job.training is not None or not (paths.prepared / COMPLETION_MARKER).is_file():
        return {}
    return task_of(job).head.shown(PreparedData.open(paths).facts)


def used_model(
    job: TrainerJob,
    paths: JobPaths,
    precision: InferencePrecision,
    devices: int = 1,
    group: WholeModel = WHOLE_MODEL,
) -> tuple[PreTrainedModel, str]:
    """Return the model of `model_to_use` with any labels, and its name."""
    head = task_of(job).head
    if job.training is None:
        name, arguments = resolve_model(job.model.uri, job.model.revision, job.model.trust_remote_code)
    else:
        if not (paths.state / "train.json").is_file() or not (paths.model / "config.json").is_file():
            raise StageError(
                FailureClass.MODEL,
                "ModelNotTrained",
                f"{paths.model} holds no trained model.",
                "Run the stage train first.",
            )
        name = str(paths.model)
        arguments = {"trust_remote_code": job.model.trust_remote_code, "local_files_only": True}
    return _loaded(head, job, name, arguments, precision, devices, group), name


def weights_version(job: TrainerJob, paths: JobPaths) -> object:
    """Identify the weights without reading them: files on this machine by their sizes and times."""
    uri = Uri.parse(job.model.uri, "model.uri")
    folder = paths.model if job.trains else local_path(uri) if uri.scheme == "file" else None
    if folder is None:
        return [job.model.uri, job.model.revision]
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    return [[str(path.relative_to(folder)), (at := path.stat()).st_size, at.st_mtime_ns] for path in files]


def reference_model(
    job: TrainerJob,
    head: Head,
    precision: InferencePrecision,
    devices: int = 1,
    group: WholeModel = WHOLE_MODEL,
) -> PreTrainedModel:
    """Return the model that the job started from, like `model_to_use`; StageError CONFIG if it trains none."""
    if job.training is None:
        raise StageError(
            FailureClass.CONFIG,
            "NothingToCompare",
            f"Evaluation of {job.task} compares the model with the one before training, and this job has not trained "
            "it.",
            "Leave evaluation out.",
        )
    began_with, _ = pinned(job)
    name, arguments = resolve_model(began_with.model.uri, began_with.model.revision, job.model.trust_remote_code)
    return _loaded(head, began_with, name, arguments, precision, devices, group)


def _loaded(
    head: Head,
    job: TrainerJob,
    name: str,
    arguments: Mapping[str, Any],
    precision: InferencePrecision,
    devices: int,
    group: WholeModel,
) -> PreTrainedModel:
    from finetune_trainer.devices.device_units import TORCH_TYPES

    if devices > 1:
        refuse_missing_gpu(index=devices - 1)  # the last one

    def load(further: Mapping[str, Any]) -> PreTrainedModel:
        return head.load_model(job, name, {**arguments, **placement(devices), **further}, TORCH_TYPES[precision])

    model = group.loaded(lambda: model_without_weights(job), load)
    if group.size > 1:
        held = 100 * held_share(model)
        log.info("%d processes share %s: this one has %.0f %% of its weights.", group.size, name, held)
    if devices > 1:
        refuse_host_memory(model)
        log.info("The layers of %s are on %d GPUs.", name, len(places(model)))
    if precision != "fp32":
        log.info("%s computes in %s.", name, precision)
    return model


def answers_of(
    stage: Stage,
    job: TrainerJob,
    model: PreTrainedModel,
    split: PreparedSplit,
    *,
    device: Device,
    batch_tokens: int,
    progress: ProgressSink,
    tokenizer: PreTrainedTokenizerBase | None = None,
    forward: Substitute | None = None,
    seed: int | None = None,
    settled: bool = False,
    share: BatchShard = ALL_BATCHES,
    budgets: Sequence[int] = (),
    halves: bool = True,
) -> list[Answer]:
    """Return one answer for each feature of the split, in order, empty for those outside of `share`; the answer of each
    row's last feature has the text that the model writes. StageError STRATEGY_NOT_IN_EFFECT `DeviceMissing` without the
    GPU that `device` requires. The other processes of the group of `share` have to call `follow`.

    `batch_tokens` bounds the padded tokens of a batch, as do the `budgets` of `fitted_budgets` for a model that several
    processes hold; batches that exceed the GPU's memory are halved until they fit, except those of such a model and
    without `halves`, where torch.OutOfMemoryError is raised. A single row that does not fit is StageError
    OUT_OF_MEMORY. The model keeps its dtype; `progress` counts features, twice if they are both judged and written to,
    and gets the tokens of the texts so far as `generated_tokens`. `seed` starts the sampling; None: the job's.
    `tokenizer`: the job's, if the caller has loaded it. `forward`: forward pass that replaces the model's, except for
    writing.
    `settled`: True if the model is on `device` and in evaluation mode; walking through its modules takes longer than a
    small model takes for a row.
    """
    import torch

    was_training = model.training
    if not settled:
        settle(model, device)
    result: list[Answer] = [{}] * len(split.position)
    rounds = _rounds(stage, job, model, split, budgets or [batch_tokens] * 2, tokenizer, forward)
    total = sum(len(wanted) for _, batches in rounds for wanted in batches)
    rounds = [(answering, share.of(batches)) for answering, batches in rounds]
    own, done, written = sum(len(wanted) for _, batches in rounds for wanted in batches), 0, 0
    group, seed_here = share.group, partial(_seed, device=device)
    halves = halves and group.size == 1  # other processes of a group wait in the middle of a pass

    def report(ended: int, tokens: int) -> None:  # rows of the present call that ended, and their tokens
        figures = {TOKENS: float(written + tokens)} if written + tokens else {}
        progress.update(round((done + ended) * total / own), total, **figures)

    if isinstance(forward, SlotGenerator):
        forward.ended = report
    try:
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            begin = job.seed if seed is None else seed

            def seeded(first: int = 0) -> None:
                group.seed(begin + first)
                seed_here(begin + first)

            seeded()
            # The answers to a batch of an evaluation do not depend on the batches before, which others may have.
            before = (lambda wanted: seeded(int(wanted[0]))) if stage == Stage.EVALUATE else None
            for number, (answering, batches) in enumerate(rounds):
                led = group.led(answering, number)
                for wanted, answers in _answered_batches(led, batches, split, before, halves=halves):
                    for at, answer in zip(wanted, answers, strict=True):
                        result[at] = {**result[at], **answer}
                    done, written = done + len(wanted), written + generated_tokens(answers)
                    report(0, 0)
    finally:
        if was_training:
            model.train()
    return result


def follow(
    stage: Stage,
    job: TrainerJob,
    model: PreTrainedModel,
    group: WholeModel,
    *,
    device: Device,
    pad_token_id: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Compute this process's part of the batches of `answers_of` that the first process of the group answers, until it
    ends the group's work. Parameters as there.
    """
    import torch

    settle(model, device)
    rounds = _answerings(stage, job, model, pad_token_id, tokenizer, None)
    ways = [answering for answering, _ in rounds]
    with torch.random.fork_rng(devices=[]):
        group.follow([*ways, *(_longest(job, way) for way in ways)], partial(_seed, device=device))


def fitted_budgets(
    stage: Stage,
    job: TrainerJob,
    model: PreTrainedModel,
    split: PreparedSplit,
    *,
    batch_tokens: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    share: BatchShard = ALL_BATCHES,
) -> list[int]:
    """Return the padded tokens of a batch for each round of `answers_of`: `batch_tokens`, or fewer if the memory of a
    process of the model's group holds no more. The model is on its device; the other processes have to call `follow`.
    """
    group, ways = share.group, probed_ways(stage, job, model, split, tokenizer)
    if group.size == 1:
        return [batch_tokens] * len(ways)
    budgets: list[int] = []
    for way in ways:
        budgets.append(group.fitted(way, batch_tokens))
        if budgets[-1] < batch_tokens:
            log.warning(
                "Batches have at most %s padded tokens, and not %s: more do not fit the memory of the %d processes "
                "that hold the model. %s rows are wider, and each is a batch.",
                f"{budgets[-1]:,}", f"{batch_tokens:,}", group.size, f"{int((way.widths > budgets[-1]).sum()):,}",
            )  # fmt: skip
    # The groups of an evaluation divide the same batches.
    return group.lowest(budgets) if share.count > 1 else budgets


def probed_ways(
    stage: Stage,
    job: TrainerJob,
    model: PreTrainedModel,
    split: PreparedSplit,
    tokenizer: PreTrainedTokenizerBase | None = None,
    forward: Substitute | None = None,
) -> list[ProbedWay]:
    """Return the ways in which `answers_of` answers, with texts of the longest length."""
    rounds, ways = _answerings(stage, job, model, split.data.pad_token_id, tokenizer, forward), []
    for number, (answering, writer) in enumerate(rounds):
        indices, widths = _widths(job, split, writer)
        features = partial(_features_of, split, indices)
        ways.append(ProbedWay(_longest(job, answering), len(rounds) + number, widths, features))
    return ways


def _features_of(split: PreparedSplit, indices: NDArray[np.int64], wanted: NDArray[np.int64]) -> Sequence[Feature]:
    return split.data.features(split.role, indices[wanted])


def _longest(job: TrainerJob, answering: Answering) -> Answering:
    """Return `answering` with texts of the longest length."""

    def answers(features: Sequence[Feature]) -> list[Answer]:
        with whole_texts(job.generation.max_new_tokens):
            return answering(features)

    return answers


def _seed(seed: int, device: Device) -> None:
    """Seed the generators of the CPU and of the device that computes."""
    import torch

    if device == "cpu":
        # `torch.manual_seed` seeds all kinds of devices, and formats a stack for each missing one: 1 ms in sum.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def settle(model: PreTrainedModel, device: Device) -> None:
    """Move the model to `device`, in evaluation mode; StageError `DeviceMissing` without the requested GPU. A model
    with its layers on several GPUs stays there.
    """
    from torch import nn

    if device == "cuda":
        refuse_missing_gpu()
    module = cast(nn.Module, model)  # transformers' own signatures of `to` and `eval` are untyped
    if not is_placed(model):
        module.to(device)
    module.eval()


def _rounds(
    stage: Stage,
    job: TrainerJob,
    model: PreTrainedModel,
    split: PreparedSplit,
    budgets: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    forward: Substitute | None,
) -> list[tuple[Answering, Sequence[NDArray[np.int64]]]]:
    """Return the functions of `_answerings` with their batches. `budgets`: padded tokens of a batch of each."""
    rounds: list[tuple[Answering, Sequence[NDArray[np.int64]]]] = []
    ways = _answerings(stage, job, model, split.data.pad_token_id, tokenizer, forward)
    for (answering, writer), batch_tokens in zip(ways, budgets, strict=False):
        indices, widths = _widths(job, split, writer)
        if writer is not None and isinstance(forward, TextGenerator):
            calls = forward.calls(widths, batch_tokens)
        else:
            calls = inference_batches(widths, batch_tokens=batch_tokens)
        rounds.append((answering, [indices[call] for call in calls]))
    return rounds


def _widths(
    job: TrainerJob, split: PreparedSplit, writer: Writer | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the features that a function of `_answerings` takes, and the padded tokens of each: those that it reads,
    or its prompt and longest text in all beams.
    """
    import numpy as np

    if writer is None:
        widths = task_of(job).encoding.widths(split.data, split.role)
        return np.arange(len(widths)), widths
    indices = writer.chosen(split)
    lengths = split.data.lengths(split.role)[indices]
    return indices, (lengths + job.generation.max_new_tokens) * job.generation.num_beams


def _answerings(
    stage: Stage,
    job: TrainerJob,
    model: PreTrainedModel,
    pad_token_id: int,
    tokenizer: PreTrainedTokenizerBase | None,
    forward: Substitute | None,
) -> list[tuple[Answering, Writer | None]]:
    """Return the ways to answer: a forward pass over all features, unless writing suffices; and writing."""
    task = task_of(job)
    writer = task.writer if task.writer is not None and stage in task.writer.stages else None
    ways: list[tuple[Answering, Writer | None]] = []
    if writer is None or stage == Stage.EVALUATE:
        ways.append((_reading(task, model, forward, pad_token_id), None))
    if writer is not None:
        tokenizer = load_tokenizer(job) if tokenizer is None else tokenizer
        if isinstance(forward, TextGenerator):
            ways.append((partial(_written_by, forward, writer, tokenizer, job.generation), writer))
        else:
            ways.append((partial(writer.write, model, tokenizer, generation=job.generation), writer))
    return ways


def _written_by(
    generator: TextGenerator,
    writer: Writer,
    tokenizer: PreTrainedTokenizerBase,
    generation: Generation,
    features: Sequence[Feature],
) -> list[Answer]:
    """Return generated texts; an answer that the generator refuses has `REFUSED` beside an empty text."""
    import numpy as np

    answers = writer.write(cast(Any, generator), tokenizer, features, generation)
    for at, refusal in generator.refused.items():
        answers[at] = {**answers[at], REFUSED: np.array(refusal)}
    return answers


def _answered_batches(
    answering: Answering,
    batches: Sequence[NDArray[np.int64]],
    split: PreparedSplit,
    begin: Callable[[NDArray[np.int64]], None] | None = None,
    *,
    halves: bool = True,
) -> Iterator[tuple[NDArray[np.int64], list[Answer]]]:
    """Yield each batch with its answers, and call `begin` before each. Batches have about as many padded tokens each,
    so if one does not fit, those after it are halved too, with `halves`: processes that hold one model wait in the
    middle of its pass for each other.
    """
    import numpy as np
    import torch

    waiting = deque(batches)
    while waiting:
        wanted, answers = waiting.popleft(), None
        if begin is not None:
            begin(wanted)
        try:
            answers = answering(split.data.features(split.role, wanted))
        except torch.OutOfMemoryError as error:
            if len(wanted) == 1:
                raise row_too_long(int(split.data.lengths(split.role)[wanted[0]]), error) from error
            if not halves:
                raise
        if answers is not None:
            yield wanted, answers
            continue
        # Only now, after the error, which holds the tensors of the pass, is released.
        torch.cuda.empty_cache()
        log.warning("%d rows at once do not fit the GPU's memory: halving the batch size from here on.", len(wanted))
        smaller = (half for batch in (wanted, *waiting) for half in np.array_split(batch, 2))
        waiting = deque(half for half in smaller if len(half))


def _reading(task: TaskParts, model: PreTrainedModel, forward: Substitute | None, pad_token_id: int) -> Answering:
    """Return a function that does one forward pass over features."""
    from torch import nn

    answers = cast(nn.Module, model if forward is None or isinstance(forward, TextGenerator) else forward)

    def read(features: Sequence[Feature]) -> list[Answer]:
        batch = task.encoding.collate(features, pad_token_id=pad_token_id)
        placed = {name: tensor.to(model.device) for name, tensor in batch.items()}
        return task.scoring.answer(answers, placed, features)

    return read
