"""Each stage as one function of the same inputs. The libraries that a stage needs are imported when it runs, not
before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_contract.choices import Stage
from finetune_contract.facts import DataFacts
from finetune_contract.job import TrainerJob
from finetune_contract.layout import JobPaths
from finetune_contract.report import MeasuredFacts
from finetune_trainer.distributed import ProcessWorld
from finetune_trainer.progress import ProgressSink
from finetune_trainer.training.interruption import Interruption

_HISTOGRAM_BUCKETS = 32
"""Of 512 tokens every second one of the prepared data's: four splits of them take half of a report."""


@dataclass(frozen=True)
class StageInput:
    """What a stage works with."""

    job: TrainerJob
    paths: JobPaths
    progress: ProgressSink
    world: ProcessWorld
    deepspeed: Path | None
    interruption: Interruption


@dataclass(frozen=True)
class StageResult:
    """What a stage adds to its report."""

    metrics: Mapping[str, Any]
    artifacts: Mapping[str, str]
    fingerprint: str | None = None
    measured: MeasuredFacts | None = None


def _prepare(given: StageInput) -> StageResult:
    from finetune_trainer.data.prepare import prepare

    facts = prepare(given.job, given.paths, given.progress)
    rows = {role: split.rows for role, split in facts.splits.items()}
    measured = _measured(given.job, facts) if given.job.run is not None else None
    return StageResult({"rows": rows}, {"prepared": given.paths.prepared.name}, facts.fingerprint, measured)


def _measured(job: TrainerJob, data: DataFacts) -> MeasuredFacts:
    """What the operator plans the later stages with. On a laptop the finetune command measures by itself."""
    from finetune_trainer.facts import model_facts

    return MeasuredFacts(model=model_facts(job), data=data.for_planning(_HISTOGRAM_BUCKETS))


def _train(given: StageInput) -> StageResult:
    from finetune_trainer.distributed import check_world, connect, settle_environment
    from finetune_trainer.training.arguments import refuse_bad_arguments

    training = given.job.training
    if training is not None:
        # All that can be refused is refused before seconds go into imports and the model.
        check_world(given.world, training)
        refuse_bad_arguments(training)
        device, threads, strategy = training.world.device, training.world.threads_per_process, training.strategy.name
        settle_environment(os.environ, given.world, device=device, threads=threads, strategy=strategy)
        connect(given.world, device, threads, strategy)
    from finetune_trainer.training.run import read_deepspeed_config, train

    config = read_deepspeed_config(given.deepspeed)
    outcome = train(
        given.job,
        given.paths,
        given.progress,
        world=given.world,
        deepspeed=config,
        interruption=given.interruption,
    )
    return StageResult(outcome.metrics, outcome.artifacts, outcome.fingerprint)


def _evaluate(given: StageInput) -> StageResult:
    from finetune_trainer.inference.evaluate import evaluate

    return StageResult(evaluate(given.job, given.paths, given.progress), {"metrics": given.paths.metrics.name})


def _predict(given: StageInput) -> StageResult:
    from finetune_trainer.inference.predict import predict

    return StageResult(predict(given.job, given.paths, given.progress), {})


STAGES: Mapping[Stage, Callable[[StageInput], StageResult]] = {
    Stage.PREPARE: _prepare,
    Stage.TRAIN: _train,
    Stage.EVALUATE: _evaluate,
    Stage.PREDICT: _predict,
}
