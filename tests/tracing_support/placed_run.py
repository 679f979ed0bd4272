"""Traced inference of a model whose layers are on two GPUs, in a process that has the CUDA stub loaded: the trainer's
own loading and forward passes, on fake tensors, which refuse an operation on tensors of two devices.

Called by `process_support.forked` in a fork of its own, as the functions in `switched_off` stay replaced.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import core_model_loading

from finetune_contract.data_settings import ModelSource
from finetune_contract.inference_settings import InferenceProcesses
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.distributed import ProcessWorld
from finetune_trainer.predict.pod_processes import is_placed, placement, places, refuse_host_memory, settle_gpus
from finetune_trainer.predict.runner import settle
from finetune_trainer.tasks.task_registry import task_parts
from finetune_trainer.tasks.writing import kept_places
from tracing_support import switched_off

_SMALL: dict[str, Any] = {"vocab_size": 90, "pad_token_id": 0}
_WIDE = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4}
_GROUPED = {**_WIDE, "num_key_value_heads": 2, "head_dim": 12}
_T5 = {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 8, "num_heads": 4, "decoder_start_token_id": 0}
_UNPADDED = {"pad_token_id": None}
"""For models that search for padding in their input, which fake tensors have not."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("text-generation", {"model_type": "llama", **_GROUPED}),
    "Llama, tied": ("text-generation", {"model_type": "llama", **_GROUPED, "tie_word_embeddings": True}),
    "Mistral": ("text-generation", {"model_type": "mistral", **_GROUPED, "sliding_window": None}),
    "Qwen3": ("text-generation", {"model_type": "qwen3", **_GROUPED, "tie_word_embeddings": True}),
    "GPT-2": ("text-generation", {"model_type": "gpt2", "n_embd": 48, "n_layer": 8, "n_head": 4, **_UNPADDED}),
    "Llama that classifies": ("text-classification", {"model_type": "llama", **_GROUPED}),
    "BERT": ("text-classification", {"model_type": "bert", **_WIDE}),
    "RoBERTa": ("token-classification", {"model_type": "roberta", **_WIDE}),
    "DeBERTa": ("question-answering", {"model_type": "deberta-v2", **_WIDE, **_UNPADDED}),
    "ModernBERT": ("masked-lm", {"model_type": "modernbert", **_WIDE}),
    "T5": ("summarization", {"model_type": "t5", **_T5}),
}
"""Task and config of each model; its weights are written to a file and read from it."""
USUAL = ("Llama", "Qwen3", "GPT-2", "BERT", "T5")
"""Cases of every run of the suite."""


def run(name: str, result: str) -> None:
    """Load the model of case `name` as process 1 of a pod with two GPUs a process, and pass rows through it; write the
    devices of its weights and of its outputs to the file `result`.
    """
    task_name, config = CASES[name]
    settle_gpus(ProcessWorld(1, 4, 1, 4), InferenceProcesses(processes=4, devices_per_process=2), "cuda")
    visible = os.environ["CUDA_VISIBLE_DEVICES"]
    os.environ["STUB_CUDA_DEVICES"] = str(len(visible.split(",")))
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # the fake mode is that of one thread
    torch.cuda._is_in_bad_fork = lambda: False  # libraries queried the devices before the fork; the stub's stay valid
    with tempfile.TemporaryDirectory() as folder:
        task: Any = task_parts(task_name)  # type: ignore[arg-type]
        auto: Any = getattr(transformers, task.head.auto)
        whole = transformers.AutoConfig.for_model(**{**_SMALL, **config})
        auto.from_config(whole).save_pretrained(folder)
        for row in switched_off.ROWS:
            row.apply()
        switched_off.follow_devices()
        torch._C._set_only_lift_cpu_tensors(True)
        fakes = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        core_model_loading._materialize_copy = _reader(fakes)
        FakeTensor.data_ptr = lambda tensor: id(tensor)  # type: ignore  # accelerate knows tied weights by address
        job = TrainerJob(name="job", task=task_name, model=ModelSource(uri=f"file://{folder}"))  # type: ignore[arg-type]
        with fakes, _IndicesNearby(), torch.inference_mode():
            model = task.head.load_model(job, folder, placement(2), torch.bfloat16)
            refuse_host_memory(model)
            settle(model, "cuda")
            outputs = _passes(model, task_name)
    found = {
        "visible": visible,
        "placed": is_placed(model),
        "weights": sorted(places(model)),
        "outputs": sorted(outputs),
    }
    Path(result).write_text(json.dumps(found), encoding="utf-8")


class _IndicesNearby(TorchDispatchMode):
    """Refuses indices on another GPU than the indexed tensor, as CUDA does; fake tensors take them."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the devices of an indexing, and do it."""
        if function is torch.ops.aten.index.Tensor:
            wrong = [each for each in args[1] if each is not None and each.device not in (_HOST, args[0].device)]
            assert not wrong, f"indices on {wrong[0].device} for a tensor on {args[0].device}"
        return function(*args, **(kwargs or {}))


_HOST = torch.device("cpu")


def _reader(fakes: FakeTensorMode) -> Callable[..., torch.Tensor]:
    """Return a function that reads a weight from its file outside the fake mode, and moves it within."""

    def read(stored: Any, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        with _disable_current_modes():
            weight = stored[...]
        return fakes.from_tensor(weight).to(device=device, dtype=dtype)

    return read


def _passes(model: Any, task: str) -> set[str]:
    """Return the devices of the outputs of the passes that the task's inference does."""
    ids = torch.ones(2, 10, dtype=torch.int64, device="cuda")
    if task in ("summarization", "translation"):
        return {str(model(input_ids=ids, labels=ids).logits.device)}
    if task != "text-generation":
        found = model(input_ids=ids)
        return {str(found.start_logits.device if task == "question-answering" else found.logits.device)}
    # A mask of all positions: one of rows alone would be read to find out whether any is padded.
    mask = torch.zeros(2, 1, 10, 10, dtype=torch.bfloat16, device="cuda")
    found = model(input_ids=ids, attention_mask=mask, use_cache=True)
    step = model(input_ids=ids[:, :1], past_key_values=found.past_key_values)
    with _disable_current_modes():
        places = kept_places(model, torch.tensor([1, 3]))
    part = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=places)
    return {str(each.logits.device) for each in (found, step, part)}
