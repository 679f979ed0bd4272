"""LoRA, QLoRA and DoRA: small trained matrices beside frozen weights, and the task's head, which is trained in full.

peft inserts them into the model in place, so the strategies shard an ordinary model, some of whose weights are frozen.
The head is everything outside of the pre-trained body, and a pooler, which many checkpoints lack. The adapted layers
are linear layers of the blocks; names that match none of them are refused, because peft accepts a list of names when
one of them matches. Only the trained weights are kept, so the result is built from the base model, loaded again: a base
model that has changed since is refused.

QLoRA holds the frozen linear layers of the blocks in 4 bits, adapted or not. Its adapter is merged into the rounded
weights and not into those of the base model: it was trained beside the rounded ones, and partly makes up for the
rounding. peft merges into them as well (`tuners/lora/bnb.py`), and transformers has `dequantize_and_replace` for that
(`integrations/bitsandbytes.py`, "QLoRA adapters merging").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from finetune_contract.choices import Precision
from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import Adapter, TrainerJob
from finetune_trainer.core.failures import StageError, first_of, needed_library
from finetune_trainer.core.uris import Uri, local_path, package_path
from finetune_trainer.models.adapter_card import AdapterCard
from finetune_trainer.models.loading import weights_digest
from finetune_trainer.models.stored_weights import in_training_type

if TYPE_CHECKING:
    from peft import LoraConfig, TaskType
    from transformers import PreTrainedModel

_NAME = "default"
"""peft's name for an unnamed adapter."""
_POOLER = "pooler"
_SHOWN_NAMES = 24
ADAPTER_WEIGHTS = "adapter_model.safetensors"


# -------------------------------------------------------------------------------------------------- modules and layers


def head_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the modules with weights outside of the pre-trained body, and of the body's pooler; none for
    a language model, whose head is pre-trained with its body.
    """
    if cast(Any, model).get_output_embeddings() is not None:
        return ()
    prefix = model.base_model_prefix
    heads = [name for name, child in model.named_children() if name != prefix and _has_weights(child)]
    if _has_weights(getattr(model.base_model, _POOLER, None)):
        heads.append(f"{prefix}.{_POOLER}")
    return tuple(heads)


def head_parameters(model: PreTrainedModel) -> int:
    """Count the parameters of the head."""
    return sum(p.numel() for name in head_modules(model) for p in model.get_submodule(name).parameters())


def _has_weights(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


@dataclass(frozen=True)
class BlockLinear:
    """A linear layer of a block."""

    name: str
    """Name in the model."""
    short: str
    """Name in its block, with `*` for numbers."""
    inputs: int
    outputs: int


def block_linears(model: nn.Module) -> tuple[BlockLinear, ...]:
    """Return the linear layers (GPT-2's Conv1D among them) of the elements of the model's outermost module lists."""
    from transformers.pytorch_utils import Conv1D

    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    linears = []
    for name, module in model.named_modules():
        within = next((prefix for prefix in outermost if name.startswith(f"{prefix}.")), None)
        if within is None or not isinstance(module, nn.Linear | Conv1D):
            continue
        # The first part after the list is the block's number.
        short = name.removeprefix(f"{within}.").partition(".")[2]
        outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else reversed(module.weight.shape)
        linears.append(BlockLinear(name, re.sub(r"(?<![^.])\d+(?![^.])", "*", short), inputs, outputs))
    return tuple(linears)


def adapted_layers(model: nn.Module, adapter: Adapter, model_uri: str) -> tuple[str, ...]:
    """Return the names of the layers that `adapter` adapts, in the model's order.

    A target matches as in peft: the whole name, or its end after a dot. Raise StageError CONFIG `UnknownTargetModules`
    for targets without a match.
    """
    linears = block_linears(model)
    wanted = adapter.target_modules
    if wanted is None:
        matched = tuple(linear.name for linear in linears)
    else:
        unknown = [target for target in wanted if not any(_matches(target, linear.name) for linear in linears)]
        if unknown:
            raise _unknown_targets(unknown, linears, model_uri)
        matched = tuple(linear.name for linear in linears if any(_matches(target, linear.name) for target in wanted))
    if not matched:
        raise StageError(
            FailureClass.CONFIG,
            "NothingToAdapt",
            f"model.adapter.method is {adapter.method}, and {model_uri} has no linear layers in blocks.",
            "Set model.adapter.method to none.",
        )
    return matched


def _matches(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _unknown_targets(unknown: Sequence[str], linears: Sequence[BlockLinear], model_uri: str) -> StageError:
    names = sorted({linear.short for linear in linears})
    return StageError(
        FailureClass.CONFIG,
        "UnknownTargetModules",
        f"model.adapter.targetModules has {', '.join(map(repr, unknown))}, and no linear layer in the blocks of "
        f"{model_uri} has that name; there are {first_of(names, _SHOWN_NAMES)}.",
        "Use these names or their ends after a dot, or set model.adapter.targetModules to auto for all layers.",
    )


# ------------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Adapted:
    """Result of `adapt`: the adapted model's layers and weights by name."""

    adapter: Adapter
    layers: tuple[str, ...]
    """Names of the layers with an adapter."""
    trained: frozenset[str]
    """Names of the trained weights; all others are frozen."""
    base: str
    """Digest of the frozen weights as loaded."""
    held: tuple[str, ...] = ()
    """Names of the layers with weights in 4 bits."""
    precision: Precision = "fp32"
    """Precision in which the layers of `held` compute."""

    def assert_in_effect(self, model: nn.Module) -> None:
        """Raise StageError STRATEGY_NOT_IN_EFFECT unless exactly the adapter's matrices and the head are trained in
        `model`, and its other linear layers are in 4 bits where the adapter asks for that.
        """
        from peft.tuners.lora import LoraLayer

        layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        bare = sorted(set(self.layers) ^ layers.keys())
        self._expect(not bare, f"{len(bare)} layers have no adapter or an extra one, e.g. {bare[:1]}")
        for name, layer in layers.items():
            works = layer.active_adapters == [_NAME] and not layer.merged and not layer.disable_adapters
            self._expect(works, f"the adapter of {name} is disabled")
            dora = bool(layer.use_dora[_NAME])
            self._expect(
                dora == (self.adapter.method == "dora"), f"the adapter of {name} is {'dora' if dora else 'lora'}"
            )
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        odd = sorted(self.trained ^ trained)
        self._expect(not odd, f"{len(odd)} weights are frozen or trained by mistake, e.g. {odd[:1]}")
        if self.held:
            wide = [name for name in self.held if not four_bits().is_held(_base(model, name), self.precision)]
            self._expect(not wide, f"{len(wide)} layers are not in 4 bits, e.g. {wide[:1]}")

    def _expect(self, holds: bool, problem: str) -> None:
        if not holds:
            raise StageError(
                FailureClass.STRATEGY_NOT_IN_EFFECT,
                "AdapterNotInEffect",
                f"model.adapter.method {self.adapter.method} was requested and is not in effect: {problem}.",
                "This is a defect of the image or its libraries; without model.adapter all weights are trained.",
            )


def _base(model: nn.Module, name: str) -> nn.Module:
    """Return the layer of that name; for an adapted layer its base layer."""
    from peft.tuners.lora import LoraLayer

    layer = model.get_submodule(name)
    return layer.get_base_layer() if isinstance(layer, LoraLayer) else layer


def four_bits() -> ModuleType:
    """Import `finetune_trainer.models.four_bits`; raise StageError CONFIG `BitsAndBytesMissing` without its library."""
    with needed_library(
        "bitsandbytes",
        "BitsAndBytesMissing",
        "model.adapter.method is qlora, and bitsandbytes, which holds weights in 4 bits",
        "Add pip install 'finetune-trainer[qlora]' to the image, or set model.adapter.method to lora.",
    ):
        from finetune_trainer.models import four_bits
    return four_bits


def adapt(model: PreTrainedModel, adapter: Adapter, job: TrainerJob) -> Adapted:
    """Insert the adapter into `model`, freeze the rest, and make the head trainable.

    The matrices are drawn from the job's seed whatever the caller's random state, so that all processes and strategies
    start alike.
    """
    from peft import inject_adapter_in_model

    layers, heads = adapted_layers(model, adapter, job.model.uri), head_modules(model)
    kinds = ("lora_A", "lora_B", "lora_magnitude_vector") if adapter.method == "dora" else ("lora_A", "lora_B")
    matrices = {f"{layer}.{kind}.{_NAME}.weight" for layer in layers for kind in kinds}
    whole = {
        f"{head}.modules_to_save.{_NAME}.{name}"
        for head in heads
        for name, _ in model.get_submodule(head).named_parameters()
    }
    base = weights_digest(model, without=heads)
    precision: Precision = "fp32" if job.training is None else job.training.precision
    held: tuple[str, ...] = ()
    if adapter.method == "qlora":
        held = tuple(linear.name for linear in block_linears(model))
        divided = job.training is not None and job.training.strategy.name == "fsdp"
        four_bits().hold(model, held, precision, divided=divided)
    adapted = Adapted(adapter, layers, frozenset(matrices | whole), base, held, precision)
    if adapter.method == "dora":
        # peft takes the norms of the weights, in their type.
        in_training_type(cast(nn.Parameter, model.get_submodule(name).weight) for name in layers)
    with torch.random.fork_rng(devices=[]), _fp32_for_peft(model, layers):
        torch.manual_seed(job.seed)
        inject_adapter_in_model(_config(model, adapter, job, layers, heads), model, _NAME)
    in_training_type(parameter for parameter in model.parameters() if parameter.requires_grad)  # those of heads
    return adapted


@contextmanager
def _fp32_for_peft(model: nn.Module, layers: Sequence[str]) -> Iterator[None]:
    """Show peft weights in fp32 in place of those of `layers` in other types, without memory: it draws matrices in the
    type of the weights, which it does not read, and they would be rounded.
    """
    others: list[tuple[nn.Parameter, torch.Tensor]] = []
    for name in layers:
        weight = model.get_submodule(name).weight
        if isinstance(weight, nn.Parameter) and weight.is_floating_point() and weight.dtype != torch.float32:
            others.append((weight, weight.data))
            weight.data = torch.empty(1, dtype=torch.float32).expand(weight.shape)
    try:
        yield
    finally:
        for weight, data in others:
            weight.data = data


def _config(
    model: PreTrainedModel, adapter: Adapter, job: TrainerJob, layers: Sequence[str], heads: Sequence[str]
) -> LoraConfig:
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    hub = job.model.uri.startswith("hf://")
    return LoraConfig(
        task_type=_kind(model),
        base_model_name_or_path=_base_name(job.model.uri),
        revision=job.model.revision if hub else None,
        r=adapter.rank,
        lora_alpha=cast(int, adapter.alpha),  # peft only divides it by the rank
        lora_dropout=adapter.dropout,
        use_dora=adapter.method == "dora",
        target_modules=list(layers),
        fan_in_fan_out=isinstance(model.get_submodule(layers[0]), Conv1D),
        modules_to_save=list(heads),
    )


def _base_name(uri: str) -> str:
    """Return the base model's name, with which peft loads it: on the Hub, or an absolute path."""
    parsed = Uri.parse(uri, "model.uri")
    if parsed.scheme == "hf":
        return parsed.rest.rstrip("/")
    if parsed.scheme == "pkg":
        return str(package_path(parsed, "model.uri", FailureClass.MODEL, "ModelNotFound").resolve())
    return str(local_path(parsed).resolve())


def _kind(model: PreTrainedModel) -> TaskType | None:
    """Return peft's task type for the model; peft also trains the heads of these types."""
    from peft import TaskType

    if cast(Any, model).get_output_embeddings() is None:
        return TaskType.SEQ_CLS
    if not model.can_generate():
        return None
    return TaskType.SEQ_2_SEQ_LM if model.config.is_encoder_decoder else TaskType.CAUSAL_LM


# --------------------------------------------------------------------------------------------------------------- result


def write_adapter_and_merge(
    model: PreTrainedModel, adapted: Adapted, job: TrainerJob, state: Mapping[str, Any], folder: Path
) -> PreTrainedModel:
    """Write the adapter of `state` (the trained weights) into `folder` as peft does, and return `model` with it merged
    into the weights beside which it was trained: those of QLoRA are rounded first.

    `model`: the job's model before adaptation. Raise StageError MODEL `BaseModelChanged` when it has changed since the
    training began.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import save_file

    heads = head_modules(model)
    if weights_digest(model, without=heads) != adapted.base:
        raise StageError(
            FailureClass.MODEL,
            "BaseModelChanged",
            f"The weights of {job.model.uri} have changed since the training began, and the adapter needs the old "
            "ones.",
            "Use a revision that does not change, or a folder that is not written to, and train again.",
        )
    if adapted.held:
        four_bits().round_weights(model, adapted.held)
    config = _config(model, adapted.adapter, job, adapted.layers, heads)
    whole = PeftModel(model, config, _NAME)
    prefix = "base_model.model."
    result = whole.load_state_dict({f"{prefix}{name}": value for name, value in state.items()}, strict=False)
    lost = adapted.trained - state.keys()
    assert not result.unexpected_keys, f"{result.unexpected_keys[:3]} were trained and are not in the model"
    assert not lost, f"{sorted(lost)[:3]} were trained and are missing"
    folder.mkdir(parents=True)
    weights = {
        name: value.contiguous()
        for name, value in get_peft_model_state_dict(whole, save_embedding_layers=False).items()
    }
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config.inference_mode = True
    config.save_pretrained(str(folder))
    AdapterCard.of(job.task, model, adapted.base, rounded=bool(adapted.held)).write(folder)
    merged: PreTrainedModel = whole.merge_and_unload()
    return merged
