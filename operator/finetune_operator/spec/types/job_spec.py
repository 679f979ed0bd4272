"""The spec of a FineTuneJob."""

from typing import Annotated, Literal

from pydantic import Field

from finetune_contract.choices import Task
from finetune_operator.spec.launcher_rows import TRAINING, TrainingLauncher, unsupported_note
from finetune_operator.spec.types.field_types import Image, SpecModel, Supported
from finetune_operator.spec.types.spec_data import DatasetSpec, ModelSpec, PreparationSpec
from finetune_operator.spec.types.spec_parallelism import ParallelismSpec
from finetune_operator.spec.types.spec_pods import RunPolicySpec, TemplateSpec
from finetune_operator.spec.types.spec_resources import (
    CheckpointsSpec,
    ResourcesSpec,
    SecretsSpec,
    SpotSpec,
    StorageSpec,
)
from finetune_operator.spec.types.spec_results import (
    EndpointSpec,
    EvaluationSpec,
    GenerationSpec,
    PredictSpec,
    PreferenceSpec,
    TrafficSpec,
)
from finetune_operator.spec.types.spec_training import ScriptSpec, TrainingSpec


class FineTuneJobSpec(SpecModel):
    """Desired job."""

    task: Task = Field(description="Task that the model is fine-tuned for. Required.")
    model: ModelSpec = Field(description="Model to start from. Required.")
    dataset: DatasetSpec | None = Field(
        default=None, description="Rows to train and evaluate on. Required if the job trains."
    )
    preparation: PreparationSpec = Field(
        default=PreparationSpec.model_construct(),
        description="Conversion of rows to tokens. If unset, the defaults apply.",
    )
    training: TrainingSpec | None = Field(
        default=None,
        description="Training of the model; {} trains with the defaults. If unset, the job does not train.",
    )
    parallelism: ParallelismSpec = Field(
        default=ParallelismSpec.model_construct(),
        description="Distribution of the model over devices. If unset, the plan chooses it.",
    )
    resources: ResourcesSpec = Field(
        default=ResourcesSpec.model_construct(),
        description="Nodes and devices of the job. Defaults to one node without GPUs.",
    )
    launcher: Annotated[Literal["auto", TrainingLauncher], Supported(values=("auto", *TRAINING))] = Field(
        default="auto",
        description="Kind of object that runs the training pods. Defaults to auto: the first kind that the cluster "
        "serves, else plain Jobs." + unsupported_note("not supported yet"),
    )
    storage: StorageSpec = Field(
        default=StorageSpec.model_construct(),
        description="Storage of results and caches. If unset, the operator creates a claim for the job.",
    )
    checkpoints: CheckpointsSpec = Field(
        default=CheckpointsSpec.model_construct(),
        description="Interval and retention of checkpoints. Defaults to one per epoch and every 10 minutes, of which 3"
        " are retained.",
    )
    spot: SpotSpec = Field(
        default=SpotSpec.model_construct(), description="Training on spot nodes. If unset, the job trains on any nodes."
    )
    evaluation: EvaluationSpec | None = Field(
        default=None,
        description="Evaluation on held-out rows; {} takes the defaults. If unset, a job that trains is evaluated with"
        " the defaults.",
    )
    predict: PredictSpec | None = Field(
        default=None, description="Batch inference; {} takes the defaults. If unset, the job does not predict."
    )
    generation: GenerationSpec = Field(
        default=GenerationSpec.model_construct(),
        description="Decoding for text-generation, preference-tuning, summarization and translation. If unset, the "
        "defaults apply.",
    )
    preference: PreferenceSpec = Field(
        default=PreferenceSpec.model_construct(),
        description="Direct preference optimization, for preference-tuning. If unset, the defaults apply.",
    )
    endpoint: EndpointSpec | None = Field(
        default=None,
        description="Server for the model. It can be added, changed and removed while the job exists. If unset, the "
        "model is not served.",
    )
    secrets: SecretsSpec = Field(
        default=SecretsSpec.model_construct(), description="References to Secrets. If unset, the job uses none."
    )
    template: TemplateSpec = Field(
        default=TemplateSpec.model_construct(),
        description="Pod-level settings, merged into every pod of the job. If unset, none are merged.",
    )
    image: Image | None = Field(default=None, description="Trainer image. Defaults to that of the operator's settings.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None,
        description="Pull policy of the image. Defaults to that of the operator's settings, else to Kubernetes' "
        "default.",
    )
    run_policy: RunPolicySpec = Field(
        default=RunPolicySpec.model_construct(),
        description="Suspension, deadlines, restarts and clean-up of the job. If unset, the defaults apply.",
    )

    @property
    def script(self) -> ScriptSpec | None:
        """The user's own program that trains, in place of the built-in loop."""
        return None if self.training is None else self.training.script

    @property
    def routed_traffic(self) -> TrafficSpec | None:
        """The endpoint's traffic if a Gateway leads requests to it, by an HTTPRoute."""
        traffic = None if self.endpoint is None else self.endpoint.traffic
        return None if traffic is None or traffic.gateway is None else traffic
