"""Idle time of the processes of a pipeline, against the formula of the planner.

A process that takes t for a micro-batch, forward and backward, is done with m of them in m t; what is left of a pass is
the bubble. t is the slope of the pass time over m. Formula: `planning.model_parallel.bubble`, (p - 1) / (v m + p - 1).

Two kinds of layers. `wait`: each takes a fixed time in which it computes nothing, so that as many processes as one
likes share a core, and what shows is the schedule and its messages. `compute`: BERT layers; it wants a core for each
process. Passes of different m are interleaved and repeated, the median counts.

    python tests/benchmarks/pipeline_bubble.py                              about 2 minutes, 4 processes on any machine
    python tests/benchmarks/pipeline_bubble.py --layers compute --degree 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from transformers import BertConfig, BertForSequenceClassification

from finetune_contract.trainer_job import Pipeline as PipelineSettings
from finetune_operator.plan.memory.model_parallel_plan import bubble
from finetune_trainer.core.distributed import free_port
from finetune_trainer.strategies.parallel.mesh import PIPELINE, MeshShape
from finetune_trainer.strategies.parallel.pipeline import Pipeline

SCHEDULES = ("gpipe", "1f1b", "interleaved")
FORWARD_SECONDS = 0.004
"""Time of a waiting layer; backward takes twice as long, as in a real one."""
ROWS, LENGTH = 8, 64


class _Wait(torch.autograd.Function):
    """Identity that takes time in both directions."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_SECONDS)
        return hidden.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * FORWARD_SECONDS)
        return gradient


class Waiting(nn.Module):
    """Replacement for a BERT layer."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        waited: torch.Tensor = _Wait.apply(hidden)
        return waited


@dataclass(frozen=True)
class Setting:
    """One pipeline to measure."""

    schedule: str
    degree: int
    layers: str
    repeats: int

    def counts(self) -> list[int]:
        """Return numbers of micro-batches: the smallest that fills the pipeline, and more."""
        return [self.degree, 2 * self.degree, 4 * self.degree]


def model_for(setting: Setting) -> Any:
    """Return a BERT with two layers for each chunk of a process."""
    width, layers = (256, 4) if setting.layers == "compute" else (32, 4)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=layers * setting.degree,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=LENGTH,
    )
    model = BertForSequenceClassification(config)
    if setting.layers == "wait":
        model.bert.encoder.layer = nn.ModuleList(Waiting() for _ in model.bert.encoder.layer)
    return model


def passes(setting: Setting) -> dict[int, float]:
    """Return number of micro-batches -> median seconds of a pass on the slowest process."""
    pipelines = {}
    for count in setting.counts():
        settings = PipelineSettings.model_validate(
            {"degree": setting.degree, "micro_batches": count, "schedule": setting.schedule}
        )
        mesh = MeshShape(data=1, pipeline=setting.degree).build("cpu")
        model = model_for(setting)
        pipelines[count] = Pipeline(model, settings, mesh[PIPELINE])
        pipelines[count].build_stages(model)
    ids = torch.randint(1, 1000, (ROWS, LENGTH))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(ROWS, dtype=torch.long)}
    taken: dict[int, list[float]] = {count: [] for count in pipelines}
    for repeat in range(setting.repeats + 1):
        for count, pipeline in pipelines.items():
            distributed.barrier()
            started = time.perf_counter()
            pipeline.step([batch] * count, lambda model, inputs: model(**inputs).loss)
            seconds = torch.tensor(time.perf_counter() - started)
            distributed.all_reduce(seconds, op=distributed.ReduceOp.MAX)
            if repeat:  # the first pass sets up
                taken[count].append(seconds.item())
    return {count: statistics.median(each) for count, each in taken.items()}


def measure(rank: int, setting: Setting, port: int) -> None:
    """Run one process; the first one prints."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo", rank=rank, world_size=setting.degree)
    found = passes(setting)
    if rank == 0:
        print_rows(setting, found)
    distributed.destroy_process_group()


def print_rows(setting: Setting, found: dict[int, float]) -> None:
    """Print one line for each number of micro-batches."""
    least, *_, most = found
    slope = (found[most] - found[least]) / (most - least)
    for count, seconds in found.items():
        settings = PipelineSettings.model_validate(
            {"degree": setting.degree, "micro_batches": count, "schedule": setting.schedule}
        )
        measured, formula = 1 - count * slope / seconds, bubble(settings)
        print(
            f"{setting.layers:8} {setting.schedule:12} {setting.degree:2} {count:3} {seconds * 1000:9.1f} "
            f"{measured:9.1%} {formula:8.1%} {measured - formula:+11.1%}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", choices=("wait", "compute"), default="wait")
    parser.add_argument("--degree", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--schedule", choices=SCHEDULES, nargs="*", default=list(SCHEDULES))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}")
    print("layers   schedule      p   m   pass ms  measured  formula  difference")
    for degree in options.degree:
        for schedule in options.schedule:
            setting = Setting(schedule, degree, options.layers, options.repeats)
            torch.multiprocessing.start_processes(measure, (setting, free_port()), degree, start_method="fork")


if __name__ == "__main__":
    main()
