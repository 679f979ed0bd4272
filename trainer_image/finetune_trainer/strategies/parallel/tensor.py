"""Tensor parallelism: each layer split over processes, by the model's plan in transformers, or ours for GPT-2
(`conv1d.py`).

Models without a plan are refused with the list of those that have one, and so are numbers of attention heads that the
degree does not divide. Modules outside the plan (norms, the task's head) are whole on every process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from finetune_contract.layout import FailureClass
from finetune_contract.plans import SLICED_NORM_FAMILIES, tensor_families
from finetune_trainer.core.failures import StageError
from finetune_trainer.strategies.parallel.conv1d import FAMILIES, conv1d_plan
from finetune_trainer.strategies.parallel.conv1d import widths as conv1d_widths
from finetune_trainer.strategies.strategy_protocol import HEADS, refuse_uneven, tied_names

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


SUMMED = "replicated_with_grad_allreduce"
"""transformers' style for a weight that is whole everywhere and sees a part of the heads. Its hook sums the accumulated
gradient after every micro-batch, which counts earlier ones again: we sum once a step.
"""
_SPLIT = ("colwise", "rowwise", "embedding", "packed")
"""Prefixes of the styles that split weights."""


def tensor_plan(model: PreTrainedModel, degree: int) -> dict[str, str]:
    """Return the module or parameter of `model` -> transformers' style that splits it.

    StageError CONFIG `NoTensorPlan` for a model without a plan, `UnevenHeads` if `degree` does not divide its heads.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    conv1d = conv1d_plan(model)
    if not model.tp_plan and not conv1d:
        raise StageError(
            FailureClass.CONFIG,
            "NoTensorPlan",
            f"parallelism.tensor is {degree}, and there is no tensor-parallel plan for models of type "
            f"{model.config.model_type}. There is one for {', '.join(tensor_families())}.",
            "Set parallelism.tensor to 1, and parallelism.pipeline.degree or strategy fsdp to shard the model.",
        )
    heads = {name: getattr(model.config, name, None) for name in HEADS}
    refuse_uneven("parallelism.tensor", degree, heads | conv1d_widths(model))
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=degree, tp_plan=conv1d or None))
    return dict(plan)


def of_kept_layers(plan: Mapping[str, str], model: PreTrainedModel) -> dict[str, str]:
    """Return the part of `plan` for the modules that a process of a pipeline has: those of other stages are removed, or
    replaced by a PassThrough.
    """
    from finetune_trainer.strategies.parallel.model_layout import PassThrough

    there = {name for name, module in model.named_modules() if not isinstance(module, PassThrough)}
    there |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: style for name, style in plan.items() if name in there}


def has_sharded_norms(model: PreTrainedModel) -> bool:
    """Return whether the norms of `model` can compute slices of the tokens (`sequence_norms.py`)."""
    return model.config.model_type in SLICED_NORM_FAMILIES


def split_weights(plan: dict[str, str]) -> list[str]:
    """Return the names of the weights that `plan` splits."""
    return [name for name, style in plan.items() if name.endswith(".weight") and style.startswith(_SPLIT)]


def summed_weights(plan: dict[str, str]) -> list[str]:
    """Return the names of the weights that `plan` keeps whole and of whose gradients each process has a part."""
    return [name for name, style in plan.items() if style == SUMMED and name.endswith(".weight")]


def split_layers(model: PreTrainedModel, mesh: DeviceMesh, plan: dict[str, str], device: str) -> None:
    """Replace the weights that `plan` splits by this process's shards (DTensors over the one-dimensional `mesh`), in
    fp32 on `device`. The caller sums the gradients of `summed_weights`.

    The plan divides weights without memory; then each shard is copied from the weight as it is stored. Of one that is
    mapped from a file, only the rows or columns of the shard are read.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from finetune_trainer.strategies.parallel.sharded_tensors import sharded_like

    # A plan names modules, and each may split a shared weight in its own way: untie, split, tie again.
    tied = {name: other for name, other in tied_names(model).items() if name in plan or other in plan}
    for name in tied:
        _set_parameter(model, name, model.get_parameter(name).data)
    stored = {name: weight for name, weight in model.named_parameters() if name in plan}
    for name, weight in stored.items():
        dtype = torch.float32 if weight.is_floating_point() else weight.dtype
        empty = torch.empty_like(weight, dtype=dtype, device="meta")
        _set_parameter(model, name, empty, trained=weight.requires_grad)
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if style != SUMMED})
    for name, weight in stored.items():
        if name in tied:
            continue
        empty = model.get_parameter(name)
        if isinstance(empty, DTensor):
            shard = sharded_like(weight.data, empty, device=device, dtype=empty.dtype)
            _set_parameter(model, name, shard, trained=weight.requires_grad)
        else:
            _put_parameter(model, name, weight)
    for name, other in tied.items():
        _put_parameter(model, name, model.get_parameter(other))


def _set_parameter(model: PreTrainedModel, name: str, weight: torch.Tensor, *, trained: bool = True) -> None:
    import torch

    _put_parameter(model, name, torch.nn.Parameter(weight, requires_grad=trained))


def _put_parameter(model: PreTrainedModel, name: str, parameter: torch.nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)


def tensor_families_json() -> str:
    """Return the content of `finetune_contract/tensor_families.json`: families with a plan in transformers or here."""
    import json

    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    tasks = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "CAUSAL_LM", "MASKED_LM")
    names = {name for task in tasks for name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")}
    planned = {name for name in names if getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)}
    return json.dumps(sorted({*planned, *FAMILIES}), indent=2) + "\n"
