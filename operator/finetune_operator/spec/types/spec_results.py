"""Uses of a trained model: evaluation, generation, prediction and serving."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints

from finetune_contract.choices import ADAPTER_NAME_PATTERN, EndpointBackend, PredictBackend
from finetune_operator.spec.types.field_types import (
    ENDPOINT_NAME_PATTERN,
    GATEWAY_PATTERN,
    HOSTNAME_PATTERN,
    RETIRED_MARK,
    SERVER_PATTERN,
    Auto,
    Count,
    ObjectName,
    Quantity,
    SpecModel,
    Supported,
    Text,
    Uri,
)
from finetune_operator.spec.types.spec_data import DatasetSpec
from finetune_operator.spec.types.spec_resources import SecretKeySpec


class GateSpec(SpecModel):
    """Quality threshold for success."""

    metric: Text = Field(
        description="Metric that decides: loss, or a metric of the task as Hugging Face names it, without eval_. "
        "Required."
    )
    minimum: Annotated[float, Field(ge=-1e9, le=1e9)] | None = Field(
        default=None, description="Minimum value, for a metric where higher is better. Set either minimum or maximum."
    )
    maximum: Annotated[float, Field(ge=-1e9, le=1e9)] | None = Field(
        default=None,
        description="Maximum value, for a metric where lower is better, such as loss or perplexity. Set either minimum"
        " or maximum.",
    )


class EvaluationSpec(SpecModel):
    """Quality on held-out rows."""

    metrics: Auto | Annotated[tuple[Text, ...], Field(min_length=1, max_length=32)] = Field(
        default="auto", description="Names of the metrics. Defaults to auto: the metrics of the task."
    )
    gate: GateSpec | None = Field(
        default=None,
        description="Quality that the model must reach for the job to succeed. If unset, any result is a success.",
    )


class GenerationSpec(SpecModel):
    """Decoding in evaluation and prediction."""

    max_new_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=128, description="Maximum number of tokens per answer. Defaults to 128."
    )
    num_beams: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="Number of beams in beam search. Defaults to 1: greedy search, or sampling."
    )
    temperature: Annotated[float, Field(ge=0, le=100)] = Field(
        default=0.0,
        description="Sampling temperature; higher values give more random tokens. Defaults to 0: no sampling.",
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="Cumulative probability of the most likely tokens to sample from (nucleus sampling). Defaults to "
        "1: all tokens.",
    )


class PreferenceSpec(SpecModel):
    """Direct preference optimization."""

    beta: Annotated[float, Field(gt=0, le=100)] = Field(
        default=0.1,
        description="Strength of the penalty for deviating from the model before training; larger values keep it "
        "closer. Defaults to 0.1.",
    )


class PredictSpec(SpecModel):
    """Batch inference."""

    dataset: DatasetSpec | None = Field(
        default=None,
        description="Rows to predict. Defaults to the test split of dataset, or its validation split if there is no "
        "test split.",
    )
    output: Annotated[Uri | None, Supported(schemes=("file", "pvc"))] = Field(
        default=None,
        description="Location of the predictions: a .jsonl or .parquet file, or a folder of parts, which ends in /; "
        "file://path is relative to the job file's folder. s3://, gs:// and az:// are not supported yet. Defaults"
        " to a file in the workspace.",
    )
    format: Literal["jsonl", "parquet"] | None = Field(
        default=None,
        description="Format of the predictions. Defaults to the extension of output, else to jsonl.",
    )
    workers: Auto | Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Number of pods that share the rows and the workspace, each with a copy of the model, on one GPU "
        "or as many as hold it if the job has any; without a cluster, of processes. auto: at most the GPUs of resources"
        " (or its nodes, without GPUs), and fewer if each would have only a few minutes of work. Defaults to 1, a pod "
        "that uses all GPUs of a node.",
    )
    engine: Literal["job", "spark"] = Field(
        default="job",
        description="Engine that runs the workers; both give the same result. job: a Kubernetes Job; spark: Spark, "
        "with one worker as the driver and the others as executors. Defaults to job.",
    )
    optimization: Auto | PredictBackend = Field(
        default="auto",
        description="Optimization of inference. none: the model as it is; int8: the faster of onnx-int8 and openvino-"
        "int8; bf16, compile, bnb-int8, bnb-nf4 and fp8 also work on one GPU; continuous-batching: "
        "texts in slots that are refilled as texts end; vllm: server generates the texts. An explicit choice that is "
        "not available fails the stage. Defaults to auto: the fastest on a sample of the rows, and none for small jobs"
        ", and on GPUs except for texts.",
    )
    server: Annotated[str, StringConstraints(pattern=SERVER_PATTERN, max_length=512)] | None = Field(
        default=None,
        description="URL of an OpenAI-compatible server with the job's model, such as http://vllm.team.svc:8000, for "
        "optimization vllm, or auto with tolerance. Its bearer token, if any, is the variable OPENAI_API_KEY of "
        "template.env. If unset, the job's own process generates texts.",
    )
    tolerance: Annotated[float, Field(gt=0.5, le=1)] | None = Field(
        default=None,
        description="Share of the sampled rows whose labels must equal those of the plain model, a number. If unset, "
        "auto uses only optimizations that cannot change labels, unless metricTolerance is set.",
    )
    metric_tolerance: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="Maximum loss of a task metric against the plain model, a number; measured on the first 1,000 rows"
        " of the test split, or of validation, which need labels. Generated texts are compared with their references by"
        " ROUGE and exact match, on 64 rows. If unset, metrics are not compared.",
    )
    columns: Annotated[tuple[Text, ...], Field(max_length=64)] = Field(
        default=(), description="Input columns to copy to the output. Defaults to none."
    )
    id_column: Text | None = Field(
        default=None,
        description="Input column that identifies rows; the output has it as id. If unset, there is no id, and rows "
        "are identified by number.",
    )
    max_bad_rows: Annotated[int, Field(ge=0, le=1_000_000_000)] | None = Field(
        default=None,
        description="Number of rows that may fail to be read or predicted before the stage fails. A file next to the "
        "predictions lists each with its reason. Defaults to 1 % of the rows.",
    )


class EndpointResourcesSpec(SpecModel):
    """Requests and limits of one server. Its GPU follows from `resources.gpusPerNode`."""

    cpu: Quantity | None = Field(
        default=None, description="CPU cores. If unset, the plan decides the request, and there is no limit."
    )
    memory: Quantity | None = Field(
        default=None, description="Memory. If unset, the plan decides the request, and there is no limit."
    )


Hostname: TypeAlias = Annotated[str, StringConstraints(pattern=HOSTNAME_PATTERN, min_length=1, max_length=253)]


class TrafficSpec(SpecModel):
    """Requests of a Gateway to the endpoint, of which a new revision can get a share before it takes over."""

    canary_percent: Annotated[int, Field(ge=1, le=50)] | None = Field(
        default=None,
        description="Share of the Gateway's requests that a new revision gets as a canary, in percent. It takes over "
        "once this is unset. Without a gateway it has no effect. If unset, a new revision takes over once it is ready.",
    )
    gateway: Annotated[str, StringConstraints(pattern=GATEWAY_PATTERN, max_length=317)] | None = Field(
        default=None,
        description="Gateway of the Gateway API that leads requests to the endpoint, as NAME or NAMESPACE/NAME. The "
        "operator attaches an HTTPRoute to it. If unset, there is none.",
    )
    hostnames: Annotated[tuple[Hostname, ...], Field(max_length=16)] = Field(
        default=(),
        description="Host names of the requests that the HTTPRoute takes. Defaults to none: those of the Gateway's "
        "listeners.",
    )
    canary_seconds: Annotated[int, Field(ge=1, le=604_800)] | None = Field(
        default=None, description=f"{RETIRED_MARK}a canary takes over once canaryPercent is unset."
    )
    max_error_percent: Annotated[float, Field(ge=0, le=100)] | None = Field(
        default=None, description=f"{RETIRED_MARK}alerts on the servers' metrics find errors of a canary."
    )
    max_latency_ratio: Annotated[float, Field(ge=1, le=1000)] | None = Field(
        default=None, description=f"{RETIRED_MARK}alerts on the servers' metrics find a slow canary."
    )


class IdleSpec(SpecModel):
    """Scaling to zero: servers end while there are no requests, and start with the next one."""

    scale_to_zero_after_seconds: Annotated[int, Field(ge=1, le=86_400)] = Field(
        description="Time without requests in seconds, after which all servers end. Required."
    )


class ServedAdapterSpec(SpecModel):
    """A LoRA adapter of the model, which servers compute beside its weights, without merging it."""

    name: Annotated[str, StringConstraints(pattern=ADAPTER_NAME_PATTERN, min_length=1, max_length=63)] = Field(
        description="Name in requests, in place of the model's. Required."
    )
    uri: Annotated[Uri, Supported(schemes=("file", "pvc"))] = Field(
        description="Folder of the adapter as peft writes it, such as adapter/ of another job's folder. pvc:// names a "
        "claim and a path in it, file:// a path on this machine; other schemes are not supported yet. Required."
    )


class EndpointSpec(SpecModel):
    """A server for the model, which starts once every stage before it has succeeded."""

    name: Annotated[str, StringConstraints(pattern=ENDPOINT_NAME_PATTERN, max_length=54)] | None = Field(
        default=None,
        description="Name in the endpoint's URL, http://NAME-endpoint.NAMESPACE.svc. Defaults to the name of the job.",
    )
    takes_over: ObjectName | None = Field(
        default=None,
        description=f"{RETIRED_MARK}a Service or an HTTPRoute of your own leads requests from one job's "
        "endpoint to another's.",
    )
    runtime: Literal["auto", "deployment", "kserve"] = Field(
        default="auto",
        description="Runtime of the servers: a Deployment, or an InferenceService of KServe. Defaults to auto: KServe "
        "if the cluster serves it and it supports the job's settings, else a Deployment.",
    )
    kserve_runtime: ObjectName | None = Field(
        default=None,
        description="Name of a serving runtime of the cluster for Hugging Face models, such as "
        "kserve-huggingfaceserver, whose vLLM then serves in place of the operator's image. Needs runtime kserve and "
        "optimization vllm. Requests have no token, and the paths of OpenAI's API are below /openai. Defaults to none.",
    )
    replicas: Annotated[int, Field(ge=1, le=1000)] = Field(default=1, description="Number of servers. Defaults to 1.")
    max_replicas: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        default=None, description="Maximum number of servers under load. Defaults to replicas: no autoscaling."
    )
    target_requests_in_flight: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        default=None,
        description="Average number of requests in flight per server, above which servers are added. Needs maxReplicas,"
        " and a cluster that serves the custom metrics API. If unset, servers are added above 70 % of the CPU request.",
    )
    resources: EndpointResourcesSpec = Field(
        default=EndpointResourcesSpec.model_construct(), description="Resources of each server."
    )
    max_latency_milliseconds: Annotated[int, Field(ge=1, le=600_000)] = Field(
        default=100,
        description="Target latency of a request in milliseconds, for which batches are composed. Defaults to 100.",
    )
    max_batch_tokens: Count | None = Field(
        default=None,
        description="Maximum number of padded tokens per batch. If unset, it follows from the device and the model.",
    )
    max_queue: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=256,
        description="Maximum number of queued rows; further requests are answered with 429. Defaults to 256.",
    )
    optimization: Auto | EndpointBackend = Field(
        default="none",
        description="Optimization of inference, as in predict. auto: the fastest; vllm: vLLM's own server on GPUs, for "
        "text-generation and preference-tuning. Defaults to none: the model as it is, with the labels that were "
        "evaluated.",
    )
    tolerance: Annotated[float, Field(gt=0.5, le=1)] | None = Field(
        default=None,
        description="Share of the sampled rows whose labels must equal those of the plain model, a number. If unset, "
        "auto uses only optimizations that cannot change labels.",
    )
    adapters: Annotated[tuple[ServedAdapterSpec, ...], Field(max_length=32)] = Field(
        default=(),
        description="LoRA adapters of model.uri that each server also answers with, by their names. The model is held "
        "once; by itself it answers only if it has the task's head. For jobs without training. Defaults to none.",
    )
    max_adapter_rank: Annotated[int, Field(ge=1, le=512)] | None = Field(
        default=None,
        description="Maximum rank of adapters with optimization vllm, whose servers reserve memory for it. Defaults to "
        "64.",
    )
    traffic: TrafficSpec | None = Field(
        default=None,
        description="Requests of a Gateway to the endpoint, in a Deployment. If unset, clients ask its Service.",
    )
    idle: IdleSpec | None = Field(
        default=None,
        description="Scaling to zero by the KEDA HTTP add-on, whose interceptor holds requests while a server starts. "
        "Needs a cluster that serves its HTTPScaledObject, and a Deployment. If unset, servers stay.",
    )
    token: SecretKeySpec | None = Field(
        default=None,
        description="Secret key with the bearer token that requests must carry. If unset, requests need no token.",
    )
