"""Uses of a trained model: evaluation, generation, prediction and serving."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from finetune_contract.choices import RungName
from finetune_operator.api.types.field_types import Auto, Count, Quantity, SpecModel, Text, Uri
from finetune_operator.api.types.spec_data import DatasetSpec
from finetune_operator.api.types.spec_resources import SecretKeySpec


class GateSpec(SpecModel):
    """The quality that counts as success."""

    metric: Text = Field(
        description="A metric of the task or loss, named as Hugging Face does without eval_. Required."
    )
    minimum: Annotated[float, Field(ge=-1e9, le=1e9)] | None = Field(
        default=None, description="Least value, of a metric that is better when higher. Set it or maximum."
    )
    maximum: Annotated[float, Field(ge=-1e9, le=1e9)] | None = Field(
        default=None,
        description="Greatest value, of a metric that is better when lower, as loss or perplexity. Set it or minimum.",
    )


class EvaluationSpec(SpecModel):
    """Quality on held-out rows."""

    metrics: Auto | Annotated[tuple[Text, ...], Field(min_length=1, max_length=32)] = Field(
        default="auto", description="Names of the metrics, or auto (the default) for the task's own."
    )
    gate: GateSpec | None = Field(default=None, description="Left out: any result is a success.")


class GenerationSpec(SpecModel):
    """Generation of text in evaluation and prediction."""

    max_new_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=128, description="Most tokens of an answer, a count. Default 128."
    )
    num_beams: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="Beams of the search, a count. Default 1: the likeliest token at each step."
    )
    temperature: Annotated[float, Field(ge=0, le=100)] = Field(
        default=0.0, description="Above 0 tokens are drawn, the more freely the higher. Default 0: none is drawn."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Draw from the likeliest tokens of this probability together. Default 1: from all."
    )


class PreferenceSpec(SpecModel):
    """Learning of preferences, by direct preference optimisation."""

    beta: Annotated[float, Field(gt=0, le=100)] = Field(
        default=0.1,
        description="What the model pays for leaving the one that it was before training: the larger, the nearer it "
        "stays. Default 0.1.",
    )


class PredictSpec(SpecModel):
    """Batch inference."""

    dataset: DatasetSpec | None = Field(
        default=None,
        description="Rows to predict. Left out: the test split of dataset, or its validation split where there is "
        "no test split.",
    )
    output: Uri | None = Field(
        default=None,
        description="Where predictions go: a file, .jsonl or .parquet, or a folder of parts, which ends in /; "
        "file://path is relative to the job file's folder. s3://, gs:// and az:// are not supported yet. Left out: a "
        "file in the workspace.",
    )
    format: Literal["jsonl", "parquet"] | None = Field(
        default=None,
        description="Format of the predictions. Left out: as the ending of output says, else jsonl.",
    )
    workers: Auto | Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Pods that share the rows, each with a copy of the model and one GPU where the job has any, a "
        "count. Default 1; auto: at most the GPUs (without GPUs, the nodes) of resources, and no more than each has "
        "some minutes of work for. They share the workspace.",
    )
    engine: Literal["job", "spark"] = Field(
        default="job",
        description="What runs the workers, with the same result. Default job: a Kubernetes Job; spark: Spark, whose "
        "driver is one of the workers and whose executors are the others.",
    )
    optimization: Auto | RungName = Field(
        default="auto",
        description="How the model computes. Default auto: what is fastest on a sample of the rows, and none for small "
        "jobs, on GPUs, and where texts are written. none is the model as it is; int8 is the faster of onnx-int8 and "
        "openvino-int8. What is named and cannot be had fails the stage.",
    )
    tolerance: Annotated[float, Field(gt=0.5, le=1)] | None = Field(
        default=None,
        description="Share of the sample's rows whose labels have to be those of the plain model, a number. Left out: "
        "auto takes only what cannot change labels, unless metricTolerance is set.",
    )
    metric_tolerance: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="Most by which a metric of the task may be worse than with the plain model, a number; compared on "
        "the first 1,000 rows of the test split, or of validation, which need labels. Left out: none is compared.",
    )
    columns: Annotated[tuple[Text, ...], Field(max_length=64)] = Field(
        default=(), description="Input columns copied to the output. Left out: none."
    )
    id_column: Text | None = Field(
        default=None,
        description="Input column that identifies the rows, which the output has as id. Left out: there is no id, and "
        "rows are known by their numbers.",
    )
    max_bad_rows: Annotated[int, Field(ge=0, le=1_000_000_000)] | None = Field(
        default=None,
        description="Rows that cannot be read or answered before the stage fails, a count. A file beside the "
        "predictions has each with its reason. Left out: 1 % of the rows.",
    )


class EndpointResourcesSpec(SpecModel):
    """Requests and limits of one server. Its GPU follows from `resources.gpusPerNode`."""

    cpu: Quantity | None = Field(default=None, description="CPU cores. Left out: requested from the plan, no limit.")
    memory: Quantity | None = Field(default=None, description="Memory. Left out: requested from the plan, no limit.")


class EndpointSpec(SpecModel):
    """A server for the model, which starts once every stage before it has succeeded."""

    runtime: Literal["auto", "deployment", "kserve"] = Field(
        default="auto",
        description="What runs the servers: a Deployment, or KServe by an InferenceService. Default auto: KServe where "
        "the cluster serves it and it can do what the job asks for, else a Deployment.",
    )
    replicas: Annotated[int, Field(ge=1, le=1000)] = Field(default=1, description="Servers, a count. Default 1.")
    max_replicas: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        default=None, description="Most servers under load, a count. Left out: replicas, so that nothing scales."
    )
    resources: EndpointResourcesSpec = Field(default=EndpointResourcesSpec(), description="What one server takes.")
    max_latency_milliseconds: Annotated[int, Field(ge=1, le=600_000)] = Field(
        default=100,
        description="Time from a request to its answer that batches are composed for, in milliseconds. Default 100.",
    )
    max_batch_tokens: Count | None = Field(
        default=None, description="Padded tokens of one batch, a count. Left out: from the device and the model."
    )
    max_queue: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=256, description="Rows that wait at most, a count; requests beyond are answered with 429. Default 256."
    )
    optimization: Auto | RungName = Field(
        default="none",
        description="How the model computes, as in predict. Default none: the model as it is, whose labels are those "
        "that were evaluated. auto: what is fastest.",
    )
    tolerance: Annotated[float, Field(gt=0.5, le=1)] | None = Field(
        default=None,
        description="Share of sampled rows whose labels have to be those of the plain model, a number. Left out: auto "
        "takes only what cannot change labels.",
    )
    token: SecretKeySpec | None = Field(
        default=None,
        description="Secret key with the bearer token that requests have to carry. Left out: requests carry none.",
    )
