"""Answers of processes that hold one model, each with the memory of a small device, for
`tests/trainer/test_group_batches.py`.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

BATCH_TOKENS = 500


class SmallMemory:
    """Memory of a device that holds a pass over at most `tokens` padded tokens; larger passes fail as on a GPU."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.tried: list[int] = []
        self.probed = 0
        """Number of passes up to the end of the last probe."""
        self.probes = 0
        self._begun = 0

    def limit(self, network: Any) -> None:
        """Make the passes of a model fail, except those with gradients."""
        import torch

        def look(_module: Any, _given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                return
            width = named["input_ids"].shape[1]
            cache = named.get("past_key_values")
            width += 0 if cache is None else cache.get_seq_length()
            self.tried.append(len(named["input_ids"]) * width)
            if self.tried[-1] > self.tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        network.register_forward_pre_hook(look, with_kwargs=True)

    def begin(self) -> None:
        """Begin to measure a pass."""
        self._begun = len(self.tried)
        self.probes += 1

    def share(self) -> float:
        """Return the memory in units of what the largest pass since `begin` took."""
        self.probed = len(self.tried)
        return self.tokens / max(self.tried[self._begun :])


MODEL_RANKS = 2
"""Processes that hold one model."""


def answer(job: dict[str, Any], root: str, stage: str, limits: list[int], out: str) -> None:
    """Answer the test rows of a prepared job by processes with `limits` tokens of memory; each writes its budgets and
    the tokens of its passes to `out`, and rank 0 the answers.
    """
    import torch

    from finetune_contract.choices import Stage
    from finetune_contract.inference_settings import InferenceProcesses
    from finetune_contract.layout import JobPaths
    from finetune_contract.trainer_job import TrainerJob
    from finetune_trainer.core.distributed import discover
    from finetune_trainer.core.progress import NoProgress
    from finetune_trainer.data.prepared import PreparedData
    from finetune_trainer.predict.pod_processes import BatchShard
    from finetune_trainer.predict.runner import answers_of, fitted_budgets, follow, model_to_use, settle
    from finetune_trainer.predict.tensor_group import joined_group
    from finetune_trainer.tasks.writing import WRITTEN

    given, world, paths = TrainerJob.model_validate(job), discover(os.environ), JobPaths(Path(root))
    prepared = PreparedData.open(paths)
    split, memory = prepared.of("test"), SmallMemory(limits[world.rank])
    pod = InferenceProcesses(processes=len(limits), tensor=MODEL_RANKS)
    group: Any = replace(joined_group(world, pod, "cpu"), memory=memory)  # type: ignore[call-arg]  # a TensorGroup
    model = model_to_use(given, paths, prepared, "fp32", group=group)
    memory.limit(model)
    share = BatchShard(world.rank // MODEL_RANKS, len(limits) // MODEL_RANKS, group)
    settle(model, "cpu")
    budgets: list[int] = []
    if group.leads:
        budgets = fitted_budgets(Stage(stage), given, model, split, batch_tokens=BATCH_TOKENS, share=share)
        how: dict[str, Any] = {"device": "cpu", "batch_tokens": BATCH_TOKENS, "progress": NoProgress()}
        answers = answers_of(Stage(stage), given, model, split, **how, share=share, budgets=budgets)
        group.end()
    else:
        follow(Stage(stage), given, model, group, device="cpu", pad_token_id=prepared.pad_token_id)
        answers = []
    whole = share.gathered(answers)
    found: dict[str, Any] = {"budgets": budgets, "tried": memory.tried[memory.probed :]}
    if whole is not None:
        found["losses"] = [each["nll"].tolist() for each in whole if "nll" in each]
        found["texts"] = [str(each[WRITTEN]) for each in whole if WRITTEN in each]
    (Path(out) / f"{world.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()
