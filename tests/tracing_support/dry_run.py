"""One traced run, in a process that has the CUDA stub loaded: the trainer's own loop, on fake tensors.

Called by `process_support.forked` in a fork of its own, as the functions in `switched_off` stay replaced.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, PreTrainedModel

from finetune_contract.facts import ModelFacts
from finetune_contract.trainer_job import TrainerJob, Training
from finetune_operator.jobs.render.deepspeed_config import deepspeed_config
from finetune_trainer.core import distributed
from finetune_trainer.data.packing import SIZES
from finetune_trainer.models import adapters, float8
from finetune_trainer.models.stored_weights import in_training_type, narrow_weights
from finetune_trainer.report.measured_facts import model_facts
from finetune_trainer.strategies.parallel.mesh import MeshShape
from finetune_trainer.strategies.select import strategy_for
from finetune_trainer.tasks.task_registry import task_parts
from finetune_trainer.training.loop import TrainingLoop
from finetune_trainer.training.loop_parts import LoopData, LoopHooks, LoopModel, StepReport
from finetune_trainer.training.order import Collate, EpochOrder, Pick
from finetune_trainer.training.passes import packed_attention
from finetune_trainer.training.passes.activations import Activations, InHostMemory, OnDevice
from finetune_trainer.training.passes.chunked_loss import chunk_loss
from finetune_trainer.training.passes.packed_attention import pack_attention
from finetune_trainer.training.timing import CudaMoments, Lap, PartClock
from finetune_trainer.training.training_arguments import training_arguments
from tracing_support import memory_kinds, stub_cuda, switched_off, traced_cases
from tracing_support.held_cases import HELD_CASES
from tracing_support.memory_cases import MEMORY_CASES
from tracing_support.trace import EVENT, Trace
from trainer_support.no_checkpoints import to_the_last_step

_ROW_BORDERS = packed_attention.row_borders
NO_GROUPS = distributed.Backends("fake", "fake", FakeStore())  # type: ignore[no-untyped-call]


class _Rows(torch.utils.data.Dataset[Any]):
    """Rows of a case."""

    def __init__(self, count: int, case: traced_cases.Case) -> None:
        self._count = count
        self._case = case

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, picks: Sequence[Pick]) -> list[dict[str, Any]]:
        return self.without_reference(picks)

    def without_reference(self, picks: Sequence[Pick]) -> list[dict[str, Any]]:
        """Return rows like `TrainRows`; no case here needs a reference model."""
        ids = np.arange(self._case.tokens) % 1000 + 1
        row: dict[str, Any] = {"input_ids": ids, "labels": ids, "label": 0}
        if self._case.packed:
            row[SIZES] = [self._case.tokens // self._case.packed] * self._case.packed
        return [row for _ in picks]


class _RealBatches(Collate):
    """Makes the loader's batches real tensors, as they are in a training before they go to the device."""

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        with _disable_current_modes():
            return super().__call__(features)

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        if isinstance(batch["input_ids"], FakeTensor):  # the micro-batches of a pipeline's pass
            return super().items(batch)
        with _disable_current_modes():
            return super().items(batch)


@dataclass
class _Observer:
    """Records the number of the last reported step."""

    seen: int = 0

    def on_step(self, report: StepReport) -> None:
        self.seen = report.step


class _Clock(PartClock):
    """Clock that reports the current part of a step to the trace, and records the costs of the last step: after the
    first one, all one-time allocations are done.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__(CudaMoments())
        self._trace = trace
        self.loop: TrainingLoop | None = None
        """Loop whose states are marked when a backward pass has ended."""
        self.kept = 0
        """Bytes on the GPU that the last forward pass keeps for its backward pass."""
        self._before = 0
        self.waits: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self.stub_waits = 0
        """Waits for streams and devices, and for events outside of torch's Python code."""
        self._stub_before = 0

    def end_lap(self) -> Lap:
        """End a step: it has read the figures of the one before, and its own are on their way."""
        self.waits, self.sent = dict(self._trace.waits), dict(self._trace.sent)
        self._trace.waits.clear()
        self._trace.sent.clear()
        named = sum(count for place, count in self.waits.items() if place.startswith(EVENT))
        self.stub_waits, self._stub_before = stub_cuda.waits() - self._stub_before - named, stub_cuda.waits()
        return super().end_lap()

    def enter(self, part: Any) -> None:
        live = self._trace.live["cuda"]
        if part == "forward":
            self._before = live
        if part == "backward":
            self.kept = live - self._before
        if self.loop is not None and part in ("forward", "backward", "optimizer", "rest"):
            memory_kinds.mark_states(self._trace, self.loop.engine.model, self.loop.engine.optimizer)
        self._trace.enter(part)
        super().enter(part)


def run(name: str, result: str) -> None:
    """Trace the case `name`, and write its figures to the file `result`."""
    memory_cases = (*MEMORY_CASES, *HELD_CASES)
    case = next((each for each in memory_cases if each.name == name), None) or traced_cases.named(name)
    training, facts = case.training, _facts(case)
    local = case.rank % training.world.processes_per_node
    world = distributed.ProcessWorld(case.rank, case.size, local, training.world.processes_per_node, "environment")
    distributed.settle_environment(os.environ, world, device="cuda", threads=1, strategy=training.strategy.name)
    os.environ["STUB_CUDA_DEVICES"] = str(len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    torch.cuda._is_in_bad_fork = lambda: False  # libraries queried the devices before the fork; the stub's stay valid
    distributed.connect(world, "cuda", 1, training.strategy.name, NO_GROUPS)
    for row in switched_off.ROWS:
        row.apply()
    if training.in_four_bits:
        switched_off.FOUR_BITS.apply()
    switched_off.follow_devices()
    _meshes_of_real_numbers()
    packed_attention.row_borders = _real_borders
    fakes = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    # Masked-lm has no tokens with global attention.
    trace = Trace(fakes, answered_no=("LongformerEncoder.forward",))
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(number, device="cuda")` starts in host memory
    with tempfile.TemporaryDirectory() as folder, fakes, trace:
        loop, activations, observer, clock = _loop(case, training, facts, trace, Path(folder))
        clock.loop = loop
        loop.train()
    assert observer.seen == traced_cases.STEPS
    vocabulary, tokens = case.config["vocab_size"], case.rows * case.tokens // training.strategy.sequence
    if os.environ.get("FINETUNE_TRACE_LARGEST"):
        print("\n".join(memory_kinds.largest_of(trace, vocabulary, tokens)))
    figures = {
        "waits": clock.waits,
        "stub_waits": clock.stub_waits,
        "sent": clock.sent,
        "peaks": trace.peaks,
        "kept": clock.kept,
        "moved": getattr(activations, "moved_bytes", 0),
        "held": memory_kinds.kinds_at_peak(trace, vocabulary, tokens),
        "facts": json.loads(facts.to_json()),
    }
    Path(result).write_text(json.dumps(figures), encoding="utf-8")


def _facts(case: traced_cases.Case) -> ModelFacts:
    """Return the facts that the trainer measures of the case's model."""
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(**case.model_config).save_pretrained(folder)
        return model_facts(
            TrainerJob.model_validate({"name": "traced", "task": case.task, "model": {"uri": f"file://{folder}"}})
        )


def _loop(
    case: traced_cases.Case, training: Training, facts: ModelFacts, trace: Trace, folder: Path
) -> tuple[TrainingLoop, Activations, _Observer, _Clock]:
    config = AutoConfig.for_model(**case.model_config)
    if case.task == "text-classification":
        config.problem_type = "single_label_classification"
    strategy = strategy_for(training, _deepspeed(training, facts), folder)
    task: Any = task_parts(case.task)
    auto: Any = getattr(transformers, task.head.auto)
    model = auto.from_config(config, dtype=torch.float32)
    adapted, in_float8 = _changed(model, training)
    if strategy.takes_weights == "device":
        in_training_type(model.parameters(), narrow_weights(model, training.precision), "cuda")
    chunk_loss(model, training)
    shape = MeshShape.of(training.strategy, training.batch.data_parallel)
    rows = training.batch.global_batch_size * traced_cases.STEPS
    lengths = np.full(rows, case.tokens)
    activations = InHostMemory() if training.strategy.offload_activations == "cpu" else OnDevice()
    loaded = LoopModel(
        model,
        strategy,
        training.optimizer,
        adapted=adapted,
        in_float8=in_float8,
        packs=pack_attention(model, training, torch.device("cuda"), packing=case.packed > 0),
        checkpointing=training.strategy.activation_checkpointing,
        activations=activations,
    )
    data = LoopData(
        EpochOrder(lengths, training.loop_batch, shape.data_rank(case.rank), 1, grouped=False),
        rows=cast(Any, _Rows(rows, case)),
        collate=_RealBatches(task.encoding, 0, shape.token_shard(case.rank)),
        validation=None,
    )
    observer, clock = _Observer(), _Clock(trace)
    hooks = LoopHooks(cast(Any, observer), clock)
    arguments = training_arguments(training, folder, strategy.arguments())
    return TrainingLoop(arguments, loaded, data, to_the_last_step(), hooks), activations, observer, clock


def _changed(model: PreTrainedModel, training: Training) -> tuple[adapters.Adapted | None, float8.InFloat8 | None]:
    job: Any = SimpleNamespace(model=SimpleNamespace(uri="file:///model", revision=None), seed=1, training=training)
    adapted = None if training.adapter is None else adapters.adapt(model, training.adapter, job)
    if adapted is not None and adapted.held:
        _move_scales(model)
    if training.precision != "fp8":
        return adapted, None
    float8.refuse_without_units("cuda")
    return adapted, float8.convert(model)


def _move_scales(model: PreTrainedModel) -> None:
    """Move the scales of weights in 4 bits to the device, which `Params4bit` does as its weight is moved."""
    for layer in model.modules():
        if getattr(layer, "quant_state", None) is not None:
            cast(Any, layer).quant_state.to("cuda")


def _deepspeed(training: Training, facts: ModelFacts) -> dict[str, Any] | None:
    plan: Any = SimpleNamespace(
        trainer=SimpleNamespace(training=training), model=facts, launcher="local", deepspeed_overrides={}
    )
    return deepspeed_config(plan)


def _real_borders(positions: torch.Tensor) -> Any:
    with _disable_current_modes():
        return _ROW_BORDERS(positions)


def _meshes_of_real_numbers() -> None:
    """Create meshes outside the fake modes, as their rank numbers are read at creation."""
    from torch.distributed import device_mesh

    make = device_mesh.init_device_mesh

    def made(*arguments: Any, **settings: Any) -> Any:
        with _disable_current_modes():
            return make(*arguments, **settings)

    device_mesh.init_device_mesh = made
    joined = device_mesh.DeviceMesh._concatenate

    def join(*arguments: Any) -> Any:
        with _disable_current_modes():
            return joined(*arguments)

    device_mesh.DeviceMesh._concatenate = staticmethod(join)  # type: ignore[method-assign,assignment]
