"""Registry of tasks by name. A task's module is imported only when a job has that task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from finetune_contract.choices import Task
from finetune_contract.trainer_job import Preference, TrainerJob
from finetune_trainer.tasks.task_protocol import TaskModule


def task_of(job: TrainerJob) -> TaskModule:
    """Return the module of the job's task, with the job's settings for it."""
    return task_module(job.task, job.preference, label_names=job.dataset.labels if job.dataset else {})


def task_module(
    task: Task, preference: Preference | None = None, label_names: Mapping[str, str] | None = None
) -> TaskModule:
    """Return the module of `task`. Settings are needed only where they change the result."""
    if task == "text-classification":
        from finetune_trainer.tasks.text_classification import TextClassification

        return TextClassification(label_names or {})
    if task == "token-classification":
        from finetune_trainer.tasks.token_classification import TokenClassification

        return TokenClassification()
    if task == "question-answering":
        from finetune_trainer.tasks.question_answering import QuestionAnswering

        return QuestionAnswering()
    if task == "masked-lm":
        from finetune_trainer.tasks.masked_lm import MaskedLm

        return MaskedLm()
    if task == "summarization" or task == "translation":
        from finetune_trainer.tasks.text_to_text import summarization, translation

        return summarization() if task == "summarization" else translation()
    if task == "text-generation":
        from finetune_trainer.tasks.text_generation import TextGeneration

        return TextGeneration()
    if task == "preference-tuning":
        from finetune_trainer.tasks.preference_tuning import PreferenceTuning

        return PreferenceTuning(preference or Preference())
    assert_never(task)
