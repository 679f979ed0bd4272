"""Measures the model's shape and this machine: the facts that a plan needs before it reads data.

Model sizes are counted on the meta device, without reading weights or allocating memory. CPU and memory are those that
this process may use: a container's limits (cgroup v1 and v2) count, not the node's size.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
from pydantic import ValidationError

from finetune_contract.facts import DeviceFacts, HardwareFacts, LinearWidths, ModelFacts, TrainerFacts
from finetune_contract.layout import FailureClass
from finetune_contract.plans import COUNTED_FAMILIES
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.devices.processor_facts import instructions, processor_facts
from finetune_trainer.models.loading import load_config, position_limit, resolve_model, stored_bytes
from finetune_trainer.tasks.task_registry import task_parts

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

ASSUMED_LABELS = 2
"""Labels of the head while the data are unknown; each further label adds only hidden_size + 1 parameters."""
CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60
"""Value above which a cgroup v1 limit means "no limit"."""
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def trainer_facts(job: TrainerJob) -> TrainerFacts:
    """Return facts of the job's model and of this machine; StageError as `load_config`."""
    return TrainerFacts(task=job.task, model=model_facts(job), hardware=hardware_facts())


def model_without_weights(job: TrainerJob) -> PreTrainedModel:
    """Return the job's model with a head for two labels, on the meta device."""
    return _without_weights(job, load_config(job))


def _without_weights(job: TrainerJob, config: PretrainedConfig) -> PreTrainedModel:
    import torch

    with torch.device("meta"):
        return task_parts(job.task).head.empty_model(config, _head_labels(job, config))


def model_facts(job: TrainerJob) -> ModelFacts:
    """Measure the shape of the job's model with a head for two labels."""
    import torch
    from torch import nn

    from finetune_trainer.models.adapters import head_parameters
    from finetune_trainer.report.traced_layer import traced_block

    config = load_config(job)
    model = _without_weights(job, config)
    parameters = sum(parameter.numel() for parameter in model.parameters())  # shared ones are counted once
    embeddings = {
        id(p): p.numel() for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()
    }
    name, _ = resolve_model(job.model.uri, job.model.revision, job.model.trust_remote_code)
    dtype = getattr(config, "dtype", None)
    element_bytes = dtype.itemsize if isinstance(dtype, torch.dtype) else torch.float32.itemsize
    text = config.get_text_config()
    hidden = _size(text, job, "hidden_size", "d_model", "dim")
    heads = _size(text, job, "num_attention_heads", "num_heads", "n_heads")
    shared = getattr(text, "num_key_value_heads", None)
    try:
        facts = ModelFacts(
            model_type=config.model_type,
            parameters=parameters,
            embedding_parameters=sum(embeddings.values()),
            block_parameters=_largest_block(model),
            layers=_layers(text, job),
            hidden_size=hidden,
            intermediate_size=_feed_forward(text, job, hidden),
            attention_heads=heads,
            key_value_heads=shared if isinstance(shared, int) and 0 < shared < heads else None,
            fused_attention=getattr(model.config, "_attn_implementation", None) != "eager",
            vocabulary_size=_size(text, job, "vocab_size"),
            max_positions=position_limit(config),
            tied_embeddings=cast(Any, model).get_output_embeddings() is not None and bool(config.tie_word_embeddings),
            parameter_bytes=stored_bytes(name) or parameters * element_bytes,
            idle_parameters=_idle_parameters(model, text),
            experts=_experts(text)[1],
            head_parameters=head_parameters(model),
            linear_layers=_linear_layers(model),
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "parameters"
        raise StageError(
            FailureClass.MODEL,
            "ImpossibleShape",
            f"The model {job.model.uri} has a shape that cannot be planned: {field}: {first['msg']}.",
            "Correct the sizes in its config.json.",
        ) from error
    if config.model_type in COUNTED_FAMILIES:
        return facts
    # The model has no use after it.
    traced = traced_block(model)
    return facts.model_copy(update={"saved_per_token": traced.per_token, "saved_per_score": traced.per_score})


def _layers(text: PretrainedConfig, job: TrainerJob) -> int:
    """Count the layers: of an encoder with a decoder, those of both."""
    layers = _size(text, job, "num_hidden_layers", "num_layers", "n_layers")
    if not getattr(text, "is_encoder_decoder", False):
        return layers
    encoder = _size(text, job, "encoder_layers", default=layers)
    return encoder + _size(text, job, "num_decoder_layers", "decoder_layers", default=layers)


def _feed_forward(text: PretrainedConfig, job: TrainerJob, hidden: int) -> int:
    """Return the width of the feed-forward layer; of a mixture, that of the experts that one token passes."""
    names = ("intermediate_size", "d_ff", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "n_inner")
    passed, all_experts = _experts(text)
    if not all_experts:
        return _size(text, job, *names, default=4 * hidden)
    return passed * _size(text, job, "moe_intermediate_size", *names, default=4 * hidden)


def _experts(text: PretrainedConfig) -> tuple[int, int]:
    """Return how many experts a token passes, and how many there are; 0 of 0 for a model that is no mixture."""
    passed = getattr(text, "num_experts_per_tok", None)
    numbers = (getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    all_experts = next((number for number in numbers if isinstance(number, int) and number > 0), 0)
    return (min(passed, all_experts), all_experts) if isinstance(passed, int) and passed > 0 and all_experts else (0, 0)


def _idle_parameters(model: PreTrainedModel, text: PretrainedConfig) -> int:
    """Return the parameters of experts that one token does not pass."""
    passed, all_experts = _experts(text)
    if not all_experts:
        return 0
    routed = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    return routed // all_experts * (all_experts - passed)


def _linear_layers(model: nn.Module) -> dict[str, LinearWidths]:
    widths: dict[str, LinearWidths] = {}
    from finetune_trainer.models.adapters import block_linears

    for linear in block_linears(model):
        before = widths.get(linear.short)
        widths[linear.short] = LinearWidths(
            inputs=linear.inputs + (before.inputs if before else 0),
            outputs=linear.outputs + (before.outputs if before else 0),
            weights=linear.inputs * linear.outputs + (before.weights if before else 0),
        )
    return widths


def _head_labels(job: TrainerJob, config: PretrainedConfig) -> int:
    """Return the number of the head's labels: the model's own when nothing is trained, else assumed."""
    labels = None if job.training else task_parts(job.task).head.model_labels(config)
    return len(labels.names) if labels and labels.names else ASSUMED_LABELS


def _size(config: PretrainedConfig, job: TrainerJob, *names: str, default: int | None = None) -> int:
    """Return the first of the names that the config has: model families name the same size differently."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    if default is not None:
        return default
    raise StageError(
        FailureClass.MODEL,
        "UnknownShape",
        f"The config of {job.model.uri} (model_type {config.model_type}) has none of {', '.join(names)}.",
        "This model cannot be planned; use one whose config has its sizes.",
    )


def _largest_block(model: nn.Module) -> int:
    """Count the parameters of the largest element of a ModuleList: transformers keep their layers in one."""
    from torch import nn

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return max((sum(p.numel() for p in block.parameters()) for blocks in lists for block in blocks), default=0)


# ---------------------------------------------------------------------------------------------------------- machine


def hardware_facts() -> HardwareFacts:
    """Measure this machine, as far as this process may use it: GPUs of one product, with the smallest memory of any."""
    import torch

    from finetune_trainer.devices.device_units import capability_of, has_bf16

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu = None
    if count:
        properties = [torch.cuda.get_device_properties(i) for i in range(count)]
        gpu = DeviceFacts(
            product=properties[0].name,
            memory_bytes=min(device.total_memory for device in properties),
            bf16=all(map(has_bf16, properties)),
            capability=capability_of(min(properties, key=lambda device: (device.major, device.minor))),
        )
    return HardwareFacts(
        cpu_cores=usable_cores(),
        memory_bytes=usable_memory_bytes(),
        gpus_per_node=count,
        gpu=gpu,
        cpu_bf16=bool(_BF16_FLAGS & instructions(processor_facts())),
    )


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Count the cores by affinity and by the CPU quota, at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in cgroup_folders(cgroup):
        quota, _, period = (_text(folder / "cpu.max") or "max 100000").partition(" ")
        if quota != "max" and float(period) > 0:
            cores = min(cores, float(quota) / float(period))
    quota_us, period_us = _text(cgroup / "cpu" / "cpu.cfs_quota_us"), _text(cgroup / "cpu" / "cpu.cfs_period_us")
    if quota_us and period_us and float(quota_us) > 0:
        cores = min(cores, float(quota_us) / float(period_us))
    return max(1, int(cores))


def usable_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Return the physical memory, or the container's limit when that is less."""
    limits = [psutil.virtual_memory().total]
    files = [folder / "memory.max" for folder in cgroup_folders(cgroup)] + [cgroup / "memory" / "memory.limit_in_bytes"]
    for text in map(_text, files):
        if text and text != "max" and int(text) < _NO_LIMIT_BYTES:
            limits.append(int(text))
    return int(min(limits))


def cgroup_folders(cgroup: Path) -> list[Path]:
    """Return the folders of this process's cgroup v2 and its parents; inside a container the root is its own group."""
    group = next(
        (
            line[3:].strip("/")
            for line in (_text(Path("/proc/self/cgroup")) or "").splitlines()
            if line.startswith("0::")
        ),
        "",
    )
    folder = cgroup / group
    if not folder.is_dir():
        return [cgroup]
    return [folder, *(parent for parent in folder.parents if parent == cgroup or cgroup in parent.parents)]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
