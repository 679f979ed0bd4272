"""Registry of tasks by name. A task's module is imported only when a job has that task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from finetune_contract.choices import Task
from finetune_contract.trainer_job import Preference, TrainerJob
from finetune_trainer.tasks.task_protocol import TaskParts


def task_of(job: TrainerJob) -> TaskParts:
    """Return the job's task, with the job's settings for it."""
    labels, separator = (job.dataset.labels, job.dataset.label_separator) if job.dataset is not None else ({}, None)
    chat = job.preparation.chat_template == "always"
    return task_parts(job.task, job.preference, label_names=labels, label_separator=separator, chat=chat)


def task_parts(
    task: Task,
    preference: Preference | None = None,
    label_names: Mapping[str, str] | None = None,
    label_separator: str | None = None,
    *,
    chat: bool = False,
) -> TaskParts:
    """Return the parts of `task`. Settings are needed only where they change the result."""
    if task == "text-classification":
        from finetune_trainer.tasks.text_classification import text_classification

        return text_classification(label_names or {}, label_separator)
    if task == "token-classification":
        from finetune_trainer.tasks.token_classification import token_classification

        return token_classification()
    if task == "question-answering":
        from finetune_trainer.tasks.question_answering import question_answering

        return question_answering()
    if task == "masked-lm":
        from finetune_trainer.tasks.masked_lm import masked_lm

        return masked_lm()
    if task == "summarization" or task == "translation":
        from finetune_trainer.tasks.text_to_text import summarization, translation

        return summarization() if task == "summarization" else translation()
    if task == "text-generation":
        from finetune_trainer.tasks.text_generation import text_generation

        return text_generation(chat=chat)
    if task == "preference-tuning":
        from finetune_trainer.tasks.preference_tuning import preference_tuning

        return preference_tuning(preference or Preference())
    assert_never(task)
