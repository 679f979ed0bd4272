"""The FineTuneJob resource: spec and status, field by field. Import its names from here.

This package is the one source of the API. From it come the CRD, the JSON schema for editors, the documentation tables
and the messages of `finetune validate`. It holds no behaviour: defaults that need a decision (a micro-batch, a number
of epochs) are taken by the plan, and are `auto` or absent here.

Descriptions are written for `kubectl explain`: meaning, unit, default, and what leaving the field out does.
"""

from finetune_operator.spec.types.field_types import (
    API_VERSION,
    CATEGORY,
    CURRENCY_PATTERN,
    DATA_KEY_PATTERN,
    DNS_LABEL_PATTERN,
    DNS_SUBDOMAIN_PATTERN,
    ENV_PATTERN,
    FOLDER_PATTERN,
    GIT_REF_PATTERN,
    GROUP,
    HTTPS_PATTERN,
    HYPERPARAMETER_PATTERN,
    IMAGE_PATTERN,
    KIND,
    MANAGED_BY_PATTERN,
    MAX_INT,
    PATTERN_DESCRIPTIONS,
    PLURAL,
    QUANTITY_MARK,
    QUANTITY_PATTERN,
    RELATIVE_PATTERN,
    RETIRED_MARK,
    SHORT_NAME,
    SINGULAR,
    URI_PATTERN,
    VERSION,
    Auto,
    Count,
    DnsLabel,
    FreeObject,
    Image,
    MapText,
    NonNegative,
    ObjectName,
    Quantity,
    Scheme,
    SpecModel,
    StatusModel,
    StrategyChoice,
    Text,
    Uri,
)
from finetune_operator.spec.types.job_object import FineTuneJob, ObjectMeta
from finetune_operator.spec.types.job_spec import FineTuneJobSpec
from finetune_operator.spec.types.job_status import (
    MOST_NOTE,
    ArtifactsStatus,
    CommunicationStatus,
    Condition,
    ConditionType,
    CostStatus,
    FailureStatus,
    FineTuneJobStatus,
    Phase,
    ProgressStatus,
    SpotStatus,
)
from finetune_operator.spec.types.spec_data import (
    AdapterSpec,
    ColumnsSpec,
    DatasetSpec,
    ModelSpec,
    PreparationSpec,
    SplitsSpec,
)
from finetune_operator.spec.types.spec_parallelism import OffloadSpec, ParallelismSpec, PipelineSpec
from finetune_operator.spec.types.spec_pods import RunPolicySpec, TemplateSpec
from finetune_operator.spec.types.spec_resources import (
    AcceleratorSpec,
    CheckpointEverySpec,
    CheckpointsSpec,
    ElasticSpec,
    ResourcesSpec,
    SecretKeySpec,
    SecretSpec,
    SecretsSpec,
    SpotSpec,
    StorageSpec,
)
from finetune_operator.spec.types.spec_results import (
    EndpointSpec,
    EvaluationSpec,
    GateSpec,
    GenerationSpec,
    IdleSpec,
    PredictSpec,
    PreferenceSpec,
    ServedAdapterSpec,
    TrafficSpec,
)
from finetune_operator.spec.types.spec_training import EarlyStoppingSpec, GitSpec, ScriptSpec, TrainingSpec
from finetune_operator.spec.types.status_endpoint import CanaryStatus, EndpointStatus, RevisionStatus
from finetune_operator.spec.types.status_plan import (
    AdaptationStatus,
    ComparisonStatus,
    EstimateStatus,
    InferenceStatus,
    MeasuredStatus,
    PlanCheckStatus,
    PlanStatus,
)
from finetune_operator.spec.types.status_stages import Capacity, ChildReference, StageStatus, WaitingFor
