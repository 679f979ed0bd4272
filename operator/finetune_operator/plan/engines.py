"""Engines of prepare and predict: one pod, the pods of an Indexed Job, or Spark.

The choice makes no difference to the result.
"""

from __future__ import annotations

from dataclasses import replace

from finetune_contract.choices import Stage
from finetune_operator.plan.types.draft import Draft
from finetune_operator.spec.launcher_rows import launcher_of
from finetune_operator.spec.problems import PathPart


def choose_engine(draft: Draft) -> Draft:
    """Choose the engine of prepare, which tokenises."""
    asked, workers = draft.spec.preparation.engine, draft.spec.preparation.workers
    path = ("preparation", "engine")
    match asked:
        case "auto":
            return draft
        case "spark" if draft.local:
            return replace(draft, engine="spark")
        case "job" | "spark" if draft.script is not None:
            return draft.refusing(
                path,
                asked,
                "the rows on which a program's model is evaluated are prepared by the stage that evaluates, in one pod",
                "set it to auto",
                "NotSupported",
            )
        case "job" if draft.local:
            return draft.because(
                f"preparation by {workers} process{'es' if workers > 1 else ''} of this machine: there is no cluster "
                "here; in one, pods would do it"
            )
        case "job":
            return replace(draft, engine="job").because(
                "preparation by 1 pod, as asked"
                if workers == 1
                else f"preparation by {workers} pods, as asked: one reads and checks the rows, all tokenise shards of "
                "them; they write to one claim, which the nodes have to share"
            )
        case "spark":
            return _prepared_by_spark(draft)


def _prepared_by_spark(draft: Draft) -> Draft:
    path = ("preparation", "engine")
    draft = _spark_granted(draft, Stage.PREPARE, path, "set it to job or auto", over=draft.inputs.facts.prepared)
    workers = draft.spec.preparation.workers
    return replace(draft, engine="spark").because(
        f"preparation by Spark's driver and {workers} executor{'s' if workers > 1 else ''}, as asked; they write to "
        "one claim, which the nodes have to share"
    )


def choose_predict_engine(draft: Draft) -> Draft:
    """Choose the engine of predict, once the number of workers is known."""
    asked = draft.spec.predict
    if asked is None or Stage.PREDICT not in draft.stages or asked.engine != "spark" or draft.local:
        return draft  # without a cluster one process predicts; choose_workers gives the reason
    path, instead = ("predict", "engine"), "leave it out"
    if draft.script is not None:
        return draft.refusing(
            path,
            asked.engine,
            "the rows for a program's model are prepared by the stage that predicts, in one pod",
            instead,
            "NotSupported",
        )
    draft = _spark_granted(draft, Stage.PREDICT, path, instead, over=draft.inputs.facts.predicted)
    if draft.inference.predict_workers == 1:
        draft = draft.with_inference(predict_workers=2).because(
            "prediction by 2 pods after all: Spark needs an executor"
        )
    executors = draft.inference.predict_workers - 1
    return draft.with_inference(predict_engine="spark").because(
        f"the pods that predict are Spark's driver and {executors} executor{'s' if executors > 1 else ''}, as asked"
    )


def _spark_granted(draft: Draft, stage: Stage, path: tuple[PathPart, ...], instead: str, *, over: bool) -> Draft:
    """Refuse a SparkApplication if the cluster or the settings lack its requirements and its stage is not `over`."""
    row = launcher_of(stage, engine="spark")
    if not (row.name in draft.inputs.facts.served or over):
        draft = draft.refusing(
            path,
            "spark",
            f"the cluster has to serve {row.served_as}",
            f"install {row.installed_by}, or {instead}",
            "NotSupported",
        )
    granted = draft.settings.spark.image is not None and draft.settings.spark.service_account_name is not None
    if not (granted or over):
        draft = draft.refusing(
            path,
            "spark",
            "the operator's settings have to name an image with Spark, and an account for its driver",
            f"have an administrator set spark.image and spark.serviceAccountName (docs/data.md), or {instead}",
            "Forbidden",
        )
    return draft
