"""LoRA adapters on one base model, which is held once: each computes beside the base's weights, without a merge.

A batch has rows of one adapter: peft can mix them, but computes each layer once for each adapter then, and not for all
heads. An adapter is refused with the reason where it could change the answers of others, or its own would be random:
weights outside of its matrices and heads, weights of another base, a head that it lacks.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from finetune_contract.choices import InferencePrecision, Task
from finetune_contract.inference_settings import ServedAdapter
from finetune_contract.layout import ADAPTER_CARD, FailureClass
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError, first_of
from finetune_trainer.core.uris import Uri, local_path
from finetune_trainer.devices.device_units import TORCH_TYPES
from finetune_trainer.models.adapter_card import AdapterCard, head_config
from finetune_trainer.models.adapters import ADAPTER_WEIGHTS, head_modules
from finetune_trainer.models.loading import resolve_model, weights_digest
from finetune_trainer.tasks.heads import adopt_padding, name_labels
from finetune_trainer.tasks.task_protocol import Head, Labels

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
"""Prefix of names in an adapter's weights: those of peft's wrapper around the model."""
_BASE = "base"
"""Name of no adapter: layers compute without one."""
_READ = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    }
)
"""Settings of LoRA that decide what it computes."""
_WITHOUT_EFFECT = frozenset(
    {
        *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
        *("inference_mode", "lora_dropout", "init_lora_weights", "eva_config"),
    }
)
"""Settings of the training, and facts about the adapter. `init_lora_weights` is checked."""
_KEPT_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to draw the first matrices that leave the base's weights as they are."""
_TASK_TYPES: Mapping[Task, tuple[str, ...]] = {
    "text-classification": ("SEQ_CLS",),
    "token-classification": ("TOKEN_CLS", "SEQ_CLS"),
    "question-answering": ("QUESTION_ANS", "SEQ_CLS"),
    "text-generation": ("CAUSAL_LM",),
    "preference-tuning": ("CAUSAL_LM",),
    "summarization": ("SEQ_2_SEQ_LM",),
    "translation": ("SEQ_2_SEQ_LM",),
    "masked-lm": (),
}
"""Task -> peft's types of its adapters; this project writes SEQ_CLS for all heads that do not write."""


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in the model."""

    labels: Labels
    revision: str
    """Digest of its files."""


@dataclass
class AdaptedModel:
    """A base model with adapters, of which one at a time is in use."""

    model: PreTrainedModel
    """The model itself; its adapted layers are peft's."""
    base_labels: Labels | None
    """Labels of the base model's own head; None: it has none, and only adapters answer."""
    adapters: Mapping[str, LoadedAdapter]
    """Adapters by their names in requests."""
    _switches: list[Any] = field(default_factory=list)
    """Layers and heads with adapters."""
    _used: str | None = None

    def use(self, name: str | None) -> None:
        """Compute with the adapter from now on; None: with the base alone. Some 0.1 us for each adapted layer."""
        inner = _BASE if name is None else _inner_name(list(self.adapters).index(name))
        if inner == self._used:
            return
        for module in self._switches:
            # peft's own set_adapter also walks through the weights of all adapters, and knows no "none of them".
            module._active_adapter = [inner]
        self._used = inner


@dataclass(frozen=True)
class _Adapter:
    """Files of an adapter."""

    name: str
    folder: Path
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    card: AdapterCard | None

    @property
    def others(self) -> frozenset[str]:
        """Names in the model of the weights that are not matrices of LoRA."""
        return frozenset(name.removeprefix(_PREFIX) for name in self.weights if ".lora_" not in name)

    def refused(self, why: str, hint: str) -> StageError:
        """Return the error for this adapter."""
        return StageError(
            FailureClass.MODEL, "AdapterRefused", f"Adapter {self.name} ({self.folder}) cannot be served: {why}.", hint
        )


def load_adapted(job: TrainerJob, head: Head, precision: InferencePrecision) -> AdaptedModel:
    """Load the job's model and the adapters that it serves. StageErrors of the model, and MODEL `AdapterRefused`."""
    assert job.serving is not None
    name, arguments = resolve_model(job.model.uri, job.model.revision, job.model.trust_remote_code)
    loaded = [_read(adapter, job.task) for adapter in job.serving.adapters]
    dtype = TORCH_TYPES[precision]
    model, missing = head.load_incomplete(job, name, arguments, dtype)
    adopt_padding(job, model)
    base_labels = None if missing else head.model_labels(model.config)
    if not job.serving.serves_model:
        base_labels = None
    elif base_labels is None:
        log.info("%s has no head for %s: only its adapters answer.", name, job.task)
    digest = weights_digest(model, without=head_modules(model)) if precision == "fp32" else None
    whole: PeftModel | None = None
    adapters = {}
    for at, adapter in enumerate(loaded):
        _refuse_other_base(adapter, digest, missing)
        whole, outputs = _inserted(model, whole, _inner_name(at), adapter)
        labels = _labels(adapter, head, model, outputs)
        adapters[adapter.name] = LoadedAdapter(labels, _revision(adapter.folder))
        log.info("Adapter %s is loaded from %s.", adapter.name, adapter.folder)
    cast(nn.Module, model).to(dtype).requires_grad_(requires_grad=False)
    adapted = AdaptedModel(model, base_labels, adapters, _switches(model))
    adapted.use(None)
    return adapted


def _inner_name(at: int) -> str:
    """Return the name for peft, which allows no dots."""
    return f"adapter{at}"


def _switches(model: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


# ---------------------------------------------------------------------------------------------------------------- files


def _read(adapter: ServedAdapter, task: Task) -> _Adapter:
    """Read an adapter's files. StageError MODEL or CONFIG for those that cannot be served."""
    from safetensors.torch import load_file

    uri = Uri.parse(adapter.uri, "endpoint.adapters.uri")
    if uri.scheme != "file":
        raise StageError(
            FailureClass.CONFIG,
            "SchemeNotSupported",
            f"endpoint.adapters has {adapter.uri!r}; adapters are read from file:// only.",
            "Copy the adapter to a folder or a claim.",
        )
    folder = local_path(uri)
    loaded = _Adapter(adapter.name, folder, {}, {}, None)
    wanted = f"Name a folder with {_CONFIG} and {ADAPTER_WEIGHTS}, such as adapter/ of a run."
    for name in (_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise loaded.refused(f"it has no {name}", wanted)
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
        loaded = _Adapter(
            adapter.name, folder, dict(config), load_file(folder / ADAPTER_WEIGHTS), AdapterCard.read(folder)
        )
    except Exception as error:  # safetensors raises its own class, which has no common base but Exception
        raise loaded.refused(f"its files cannot be read: {error}", wanted) from error
    _refuse_kind(loaded, task)
    return loaded


def _refuse_kind(adapter: _Adapter, task: Task) -> None:
    """Refuse an adapter that is no LoRA, was made for another task, or changes more than its own matrices and heads."""
    from peft import LoraConfig

    merged = "Serve the merged model instead."
    config, usual = adapter.config, vars(LoraConfig())
    kind = str(config.get("peft_type"))
    if kind != "LORA":
        raise adapter.refused(f"its type is {kind}, and LORA is supported", merged)
    trained_for = None if adapter.card is None else adapter.card.task
    if trained_for not in (None, task):
        raise adapter.refused(f"it was trained for {trained_for}, and the server is for {task}", "Use another server.")
    task_type = config.get("task_type")
    if task_type is not None and task_type not in _TASK_TYPES[task]:
        raise adapter.refused(f"its task_type is {task_type}, and the server is for {task}", "Use another server.")
    if adapter.card is not None and adapter.card.rounded:
        raise adapter.refused("it was trained beside weights rounded to 4 bits, and the base has others", merged)
    empty: tuple[object, ...] = (None, False, "none", [], {})
    odd = [
        name
        for name, value in config.items()
        if name not in _READ | _WITHOUT_EFFECT and value not in empty and value != usual.get(name)
    ]
    if config.get("init_lora_weights") not in _KEPT_BASE:
        odd.append("init_lora_weights")
    if odd:
        shown = ", ".join(f"{name} {config[name]!r}" for name in odd[:3])
        raise adapter.refused(f"its settings change more than matrices and heads: {shown[:120]}", merged)


def _refuse_other_base(adapter: _Adapter, digest: str | None, missing: Collection[str]) -> None:
    """Refuse an adapter of other weights, and one that lacks weights which the base lacks as well. `digest`: that of
    the base's weights; None: not known, as they are rounded.
    """
    if digest is not None and adapter.card is not None and adapter.card.base != digest:
        raise adapter.refused("it was trained beside other weights than the base has", "Use the model it began with.")
    random = sorted(set(missing) - adapter.others)
    if random:
        raise adapter.refused(
            f"neither it nor the base has the weights {first_of(random, 3)}, so that answers would be random",
            "Save the head with the adapter (modules_to_save), or use a base that has it.",
        )


def _revision(folder: Path) -> str:
    """Return a digest of the files that decide the answers."""
    value = hashlib.sha256()
    for name in (_CONFIG, ADAPTER_WEIGHTS):
        value.update((folder / name).read_bytes())
    return value.hexdigest()[:12]


# ------------------------------------------------------------------------------------------------------------ insertion


def _inserted(
    model: PreTrainedModel, whole: PeftModel | None, name: str, adapter: _Adapter
) -> tuple[PeftModel, int | None]:
    """Insert the adapter into the model with its weights. Return peft's wrapper of the model, and the outputs of the
    adapter's head; None: as many as the base's.
    """
    from peft import PeftModel, set_peft_model_state_dict

    hint = "Use the model that the adapter was trained with."
    config = _lora(adapter)
    try:
        if whole is None:
            whole = PeftModel(model, config, name)
        else:
            whole.add_adapter(name, config)
        outputs = _fit_heads(whole, name, adapter)
        # Its type is that of a factory of named tuples.
        result: Any = set_peft_model_state_dict(whole, adapter.weights, adapter_name=name)
    except (ValueError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise adapter.refused(f"it does not fit the base: {str(error).strip().splitlines()[0][:120]}", hint) from error
    absent = [key.replace(f".{name}.", ".") for key in result.missing_keys if f".{name}." in key]
    unknown = result.unexpected_keys
    if unknown:
        raise adapter.refused(f"the base has no place for its weights {first_of(unknown, 2)}", hint)
    if absent:
        raise adapter.refused(f"it lacks the weights {first_of(absent, 2)}", hint)
    return whole, outputs


def _lora(adapter: _Adapter) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(**{name: value for name, value in adapter.config.items() if name in _READ}, inference_mode=True)


def _fit_heads(whole: nn.Module, name: str, adapter: _Adapter) -> int | None:
    """Give the adapter's copies of heads as many outputs as its weights have, and return their number if it is not
    that of the base's head. ValueError for other differences.
    """
    from peft.utils.other import ModulesToSaveWrapper

    outputs = None
    for place, wrapper in whole.named_modules():
        if not isinstance(wrapper, ModulesToSaveWrapper) or name not in wrapper.modules_to_save:
            continue
        head = wrapper.modules_to_save[name]
        for inner, parameter in list(head.named_parameters()):
            weight = adapter.weights.get(f"{place}.{inner}")
            if weight is None or weight.shape == parameter.shape:
                continue
            if weight.shape[1:] != parameter.shape[1:]:
                raise ValueError(f"{inner} of its head is {tuple(weight.shape)}, not {tuple(parameter.shape)}")
            owner, _, leaf = inner.rpartition(".")
            module = head.get_submodule(owner)
            setattr(module, leaf, nn.Parameter(torch.empty_like(weight), requires_grad=False))
            outputs = len(weight)
            if isinstance(module, nn.Linear):
                module.out_features = outputs
    return outputs


def _labels(adapter: _Adapter, head: Head, model: PreTrainedModel, outputs: int | None) -> Labels:
    """Return the labels of the adapter's head: those of its training if they are known, else as transformers would name
    them. StageError MODEL `AdapterRefused` if their number is not that of the head's outputs.
    """
    base = model.config
    if cast(Any, model).get_output_embeddings() is None:
        outputs = base.num_labels if outputs is None else outputs
    config = head_config({} if adapter.card is None else adapter.card.head, base, type(model).__name__)
    if adapter.card is None and outputs is not None and config.num_labels != outputs:
        name_labels(config, [f"LABEL_{at}" for at in range(outputs)])
        log.warning("Adapter %s does not name its %d labels: they are LABEL_0 and so on.", adapter.name, outputs)
    labels = head.model_labels(config)
    if labels is None:
        raise adapter.refused(f"{type(model).__name__} has no head for the task", "Name the model's task.")
    if outputs is not None and config.num_labels != outputs:
        raise adapter.refused(
            f"it names {config.num_labels} labels, and its head has {outputs} outputs",
            f"Correct the labels in its {ADAPTER_CARD}.",
        )
    return labels
