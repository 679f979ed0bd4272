"""The spec of a FineTuneJob."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from finetune_contract.choices import Task
from finetune_operator.api.types.field_types import Image, SpecModel
from finetune_operator.api.types.spec_data import DatasetSpec, ModelSpec, PreparationSpec
from finetune_operator.api.types.spec_parallelism import ParallelismSpec
from finetune_operator.api.types.spec_pods import RunPolicySpec, TemplateSpec
from finetune_operator.api.types.spec_resources import (
    CheckpointsSpec,
    ResourcesSpec,
    SecretsSpec,
    SpotSpec,
    StorageSpec,
)
from finetune_operator.api.types.spec_results import (
    EndpointSpec,
    EvaluationSpec,
    GenerationSpec,
    PredictSpec,
    PreferenceSpec,
)
from finetune_operator.api.types.spec_training import ScriptSpec, TrainingSpec
from finetune_operator.launchers.launcher_rows import TrainingLauncher, to_come


class FineTuneJobSpec(SpecModel):
    """Desired job."""

    task: Task = Field(description="What the model learns. Required.")
    model: ModelSpec = Field(description="The model to start from. Required.")
    dataset: DatasetSpec | None = Field(
        default=None, description="Rows to train and evaluate on. Required when something trains."
    )
    preparation: PreparationSpec = Field(
        default=PreparationSpec(), description="How rows become tokens. Left out: the defaults."
    )
    training: TrainingSpec | None = Field(
        default=None, description="How to train; {} takes the defaults. Left out: nothing is trained."
    )
    parallelism: ParallelismSpec = Field(
        default=ParallelismSpec(), description="How the model is spread over devices. Left out: auto."
    )
    resources: ResourcesSpec = Field(
        default=ResourcesSpec(), description="What the job takes. Left out: one node, CPU only."
    )
    launcher: Literal["auto", TrainingLauncher] = Field(
        default="auto",
        description="What runs the training's pods. Default auto: what the cluster serves, else plain Jobs."
        + to_come("not supported yet"),
    )
    storage: StorageSpec = Field(
        default=StorageSpec(), description="Where results lie. Left out: a claim made for the job."
    )
    checkpoints: CheckpointsSpec = Field(
        default=CheckpointsSpec(), description="Saved states. Left out: once an epoch and every 10 minutes, 3 kept."
    )
    spot: SpotSpec = Field(default=SpotSpec(), description="Spot capacity. Left out: ordinary nodes.")
    evaluation: EvaluationSpec | None = Field(
        default=None,
        description="Quality on held-out rows; {} takes the defaults. Left out: evaluated when something trains.",
    )
    predict: PredictSpec | None = Field(
        default=None, description="Batch inference; {} takes the defaults. Left out: none."
    )
    generation: GenerationSpec = Field(
        default=GenerationSpec(),
        description="How the model writes, for text-generation, preference-tuning, summarization and translation. "
        "Left out: the defaults.",
    )
    preference: PreferenceSpec = Field(
        default=PreferenceSpec(),
        description="How preferences are learnt, for preference-tuning. Left out: the defaults.",
    )
    endpoint: EndpointSpec | None = Field(
        default=None,
        description="A server for the model, which may come, change and go while the job is there. Left out: none.",
    )
    secrets: SecretsSpec = Field(default=SecretsSpec(), description="References to Secrets. Left out: none.")
    template: TemplateSpec = Field(default=TemplateSpec(), description="Pod-level settings. Left out: none of yours.")
    image: Image | None = Field(default=None, description="Trainer image. Left out: the operator's own.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When the image is pulled. Left out: Kubernetes' default."
    )
    run_policy: RunPolicySpec = Field(default=RunPolicySpec(), description="The job's life. Left out: the defaults.")

    @property
    def script(self) -> ScriptSpec | None:
        """The user's own program that trains, in place of the built-in loop."""
        return None if self.training is None else self.training.script
