"""The model that a user's own program has saved, as an input of evaluate and predict."""

from __future__ import annotations

from finetune_contract.data_settings import ModelSource
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError


def job_of_trained_model(job: TrainerJob, paths: JobPaths) -> TrainerJob:
    """Return `job` without training, starting from the saved model; StageError MODEL `ModelNotTrained`."""
    if not (paths.state / "train.json").is_file():
        raise StageError(
            FailureClass.MODEL,
            "ModelNotTrained",
            f"{paths.model} holds no trained model.",
            "Run the stage train first.",
        )
    model = ModelSource(uri=f"file://{paths.model.absolute()}", trust_remote_code=job.model.trust_remote_code)
    return job.model_copy(update={"model": model, "script": None})
