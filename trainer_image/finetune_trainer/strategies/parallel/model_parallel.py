"""Tensor and pipeline parallelism, with data-parallel replicas: one mesh of processes.

Within a replica the processes read the same rows; between replicas gradients are averaged once a step, while the last
backward pass runs. Checkpoints have the form of `full_state.py`, by parameter name, so that a run can continue from
them with any mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from finetune_contract.choices import Precision, StrategyName
from finetune_contract.layout import FailureClass
from finetune_contract.report import TimePart
from finetune_contract.trainer_job import Training
from finetune_trainer.checkpoint.checkpoints import CheckpointPart
from finetune_trainer.checkpoint.tensor_files import TensorForm, read_pickled, storage_order, write_gathered
from finetune_trainer.core.distributed import barrier, patiently_gathered
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import FileEntry
from finetune_trainer.models.stored_weights import in_training_type
from finetune_trainer.strategies.full_state import (
    OPTIMIZER,
    WEIGHTS,
    FullState,
    is_gathered,
    load_shards,
    stored_form,
)
from finetune_trainer.strategies.optimizer_state import (
    NamedState,
    load_named_state,
    merged_groups,
    named_state,
    parameter_names,
)
from finetune_trainer.strategies.parallel.gradient_reducer import GradientReducer, copy_parts, pieces
from finetune_trainer.strategies.parallel.mesh import DATA, PIPELINE, TENSOR, MeshShape
from finetune_trainer.strategies.parallel.pipeline import Pipeline
from finetune_trainer.strategies.parallel.sharded_tensors import is_sharded, placement_of, sharded_like, whole_of
from finetune_trainer.strategies.parallel.tensor import (
    SUMMED,
    has_sharded_norms,
    of_kept_layers,
    split_layers,
    split_weights,
    summed_weights,
    tensor_plan,
)
from finetune_trainer.strategies.parallel.whole_answers import fp32_by_block, shared_from_first
from finetune_trainer.strategies.shard_files import StagedState, stage_state
from finetune_trainer.strategies.strategy_protocol import (
    Placed,
    ReplicaStep,
    WeightsPlace,
    expect,
    tied_names,
    type_name,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

_PROBE_TOKENS = 4
_PROBE_TOLERANCE = 1e-3
"""Relative and absolute: sums over processes round in another order; a missing part differs by far more."""


class ModelParallel(FullState):
    """A mesh of data, pipeline and tensor ranks."""

    name: StrategyName = "ddp"
    shards_itself = True
    scales_loss = False
    takes_weights: WeightsPlace = "files"
    _norm_over: tuple[str, ...] = (TENSOR, PIPELINE)
    """Dimensions of the mesh whose processes have different gradients at the optimizer's step."""

    def __init__(self, training: Training) -> None:
        self._settings = training.strategy
        self._precision: Precision = training.precision
        self._device = training.world.device
        self.shape = MeshShape.of(training.strategy, training.batch.data_parallel)
        self.pipeline: Pipeline | None = None
        self._mesh: DeviceMesh | None = None
        self._plan: dict[str, str] = {}
        self._parameters = 0
        self._tied: dict[str, str] = {}
        self._tied_groups: dict[str, Any] = {}
        """Second name of a weight on two stages -> group of the processes that have it."""
        self.reducer: GradientReducer | None = None
        """Averages gradients over the replicas; None: there is one, or FSDP does it."""

    @property
    def _label(self) -> str:
        return self._settings.label

    @property
    def replica_step(self) -> ReplicaStep:
        """The strategy itself."""
        return self

    @property
    def passed(self) -> int:
        """Number of micro-batches in one batch of the loop: those of a pass through the pipeline."""
        return 1 if self._settings.pipeline is None else self._settings.pipeline.micro_batches

    @property
    def communicates_in(self) -> tuple[TimePart, ...]:
        """Parts in which split layers or stages exchange hidden states, or the norm over a replica is computed."""
        if self.pipeline is not None:
            return ("forward_backward", "optimizer")
        return ("forward", "backward", "optimizer") if self.shape.tensor > 1 else ()

    def arguments(self) -> Mapping[str, object]:
        """Enable autocast for bf16; the stages of a pipeline do it themselves."""
        return {"bf16": self._precision == "bf16" and self._settings.pipeline is None}

    # ---------------------------------------------------------------------------------------------------------- set-up

    def prepare_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """Remove the layers of other stages, then split the others, and put them on the device in fp32; the model's
        output must stay the same. Rank 0 computes that of the whole model: the others read their own parts alone.
        """
        self._mesh = self.shape.build(self._device)
        self._parameters = sum(parameter.numel() for parameter in model.parameters())
        self._tied = tied_names(model)
        expected, sliced = shared_from_first(lambda: _whole_probe(model)), False
        if self.shape.tensor > 1:
            self._plan = tensor_plan(model, self.shape.tensor)
            if sliced := self._settings.pipeline is None and has_sharded_norms(model):
                from finetune_trainer.strategies.parallel.sequence_norms import (
                    shard_tokens_between_layers,
                    sharded_plan,
                )

                self._plan = sharded_plan(self._plan, model, SUMMED)
        if self._settings.pipeline is not None:
            self.pipeline = Pipeline(model, self._settings.pipeline, self._mesh[PIPELINE])
            self._tied_groups = self._make_tied_groups()
        if self.shape.tensor > 1:
            split_layers(model, self._mesh[TENSOR], of_kept_layers(self._plan, model), self._device)
            if sliced:
                shard_tokens_between_layers(model, self._mesh[TENSOR])
        rest = (parameter for parameter in model.parameters() if placement_of(parameter, TENSOR) is None)
        in_training_type(rest, device=self._device)
        if self.pipeline is not None:
            self.pipeline.build_stages(model)
            model.forward = self.pipeline.evaluate
        model.to(self._device)  # type: ignore[arg-type]
        self._expect_same_answers(model, expected)
        if self.pipeline is not None:
            self._compute_in_precision()
        self._overlap(model)
        return model

    def _compute_in_precision(self) -> None:
        assert self.pipeline is not None
        self.pipeline.compute_in(self._precision)

    def _make_tied_groups(self) -> dict[str, Any]:
        """Create the groups of processes that share a weight, over all pipelines; every process creates all of them."""
        assert self.pipeline is not None
        groups = {}
        for name, other in self._tied.items():
            mine = sorted({self.pipeline.process_of(name), self.pipeline.process_of(other)})
            everyone: list[Any] = [None] * self.shape.size
            distributed.all_gather_object(everyone, mine)
            for ranks in sorted({tuple(processes) for processes in everyone}):
                group = distributed.new_group(list(ranks)) if len(ranks) > 1 else None
                if distributed.get_rank() in ranks and group is not None:
                    groups[name] = group
        return groups

    def _expect_same_answers(self, model: PreTrainedModel, expected: dict[str, torch.Tensor]) -> None:
        """Expect the output of the whole model: code that its plan or layout misses would train another model."""
        actual = _probe(model)
        for name, value in expected.items():
            same = name in actual and torch.allclose(
                actual[name].cpu().float(), value.cpu().float(), rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE
            )
            problem = f"the {type(model).__name__} computes different {name} in parallel than as a whole"
            expect(same, self._label, "OtherAnswers", problem)

    def assert_in_effect(self, placed: Placed) -> None:
        """Expect no wrapper, planned weights in shards, and on each process the weights of its stages alone."""
        from torch.distributed.tensor import DTensor

        expect(
            placed.wrapped is placed.model,
            self._label,
            "ModelIsWrapped",
            f"the model is wrapped in {type_name(placed.wrapped)}",
        )
        size = 1 if self._mesh is None else self._mesh.size()
        problem = f"the mesh has {size} of {placed.world_size} processes"
        expect(size == placed.world_size, self._label, "WrongMesh", problem)
        held = dict(placed.model.named_parameters())
        planned = [name for name in split_weights(self._plan) if name in held]
        whole = [name for name in planned if not is_sharded(held[name], TENSOR)]
        expect(
            not whole and (bool(planned) or self.shape.tensor == 1),
            self._label,
            "ParameterNotSharded",
            f"{len(whole)} of {len(planned)} planned weights are whole, e.g. {whole[:1]}",
        )
        for name in planned:
            parameter = held[name]
            assert isinstance(parameter, DTensor)
            shards = parameter.device_mesh[TENSOR].size()
            wrong = f"{name} is in {shards} shards, planned are {self.shape.tensor}"
            expect(shards == self.shape.tensor, self._label, "WrongMesh", wrong)
        if self.pipeline is not None:
            self._assert_in_stages(held)
        stepped = {id(param) for group in placed.optimizer.param_groups for param in group["params"]}
        mine = {name: weight for name, weight in held.items() if weight.requires_grad and self._steps(weight)}
        lost = [name for name, weight in mine.items() if id(weight) not in stepped]
        expect(not lost, self._label, "NotOptimized", f"the optimizer lacks {lost[:1]}")

    def _assert_in_stages(self, held: Mapping[str, torch.Tensor]) -> None:
        assert self._mesh is not None
        mine = sum(value.numel() for name, value in held.items() if name not in self._tied_groups)
        buffer = torch.tensor([mine], dtype=torch.int64, device=self._device)
        distributed.all_reduce(buffer, group=self._mesh[PIPELINE].get_group())
        total = int(buffer)
        expect(
            total == self._parameters,
            self._label,
            "NotInStages",
            f"the stages together have {total:,} parameters, the model {self._parameters:,}",
        )
        expect(mine < self._parameters, self._label, "NotInStages", "this process has all of the model")

    # ------------------------------------------------------------------------------------------------------------ step

    def _steps(self, parameter: torch.Tensor) -> bool:
        """Return whether the optimizer of this process steps `parameter`."""
        return True

    def stepped_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups of parameters that this process steps: all."""
        return groups

    def share_weights(self) -> None:
        """Do nothing: every replica has stepped all of its weights."""

    def _overlap(self, model: PreTrainedModel) -> None:
        """Have the gradients of `model` averaged over the replicas while backward passes run."""
        self._reduce(model, [parameter for parameter in model.parameters() if parameter.requires_grad], None)

    def _reduce(
        self, model: PreTrainedModel, weights: Sequence[torch.nn.Parameter], owners: Sequence[int] | None
    ) -> None:
        """Average the gradients of `weights`, each on its owner alone if `owners` are given. Those that processes of a
        replica sum up are averaged after the sum.
        """
        if self.shape.data == 1:
            return
        named = dict(model.named_parameters(remove_duplicate=False))
        summed = {*self._tied_groups, *(self._tied[name] for name in self._tied_groups), *summed_weights(self._plan)}
        late = frozenset(id(named[name]) for name in summed if name in named)
        group, passes = self._replica_group, self.passed
        self.reducer = GradientReducer(weights, group, self.shape.data, passes, local_gradient, owners, late)

    def accumulating(self, placed: Placed) -> AbstractContextManager[Any]:
        """Average no gradients: those of the last micro-batch come on top."""
        return nullcontext() if self.reducer is None else self.reducer.held()

    def average_gradients(self, model: PreTrainedModel) -> None:
        """Sum gradients of which several processes of a replica have a part, and wait for the averages over the
        replicas, most of which were reduced during the last backward pass.
        """
        self._sum_inside_replica(dict(model.named_parameters()))
        if self.reducer is not None:
            self.reducer.finish()

    def _sum_inside_replica(self, held: Mapping[str, torch.Tensor]) -> None:
        assert self._mesh is not None
        self._sum_tied(held)
        for piece in pieces([local_gradient(held[name]) for name in summed_weights(self._plan) if name in held]):
            flat = torch.cat([gradient.flatten() for gradient in piece])
            distributed.all_reduce(flat, group=self._mesh[TENSOR].get_group())
            copy_parts(flat, piece)

    @property
    def _replica_group(self) -> Any:
        """Group of the processes that have the same part of the model in different replicas."""
        assert self._mesh is not None
        return self._mesh[DATA].get_group()

    def _sum_tied(self, held: Mapping[str, torch.Tensor]) -> None:
        for name, group in self._tied_groups.items():
            mine = name if name in held else self._tied[name]
            distributed.all_reduce(local_gradient(held[mine]), group=group)

    def clip_gradients(self, model: PreTrainedModel, most: float) -> torch.Tensor:
        """Scale gradients so that their norm over the whole model is at most `most`, and return the norm before."""
        assert self._mesh is not None
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        gradients = []
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            local = local_gradient(parameter)
            gradients.append(local)
            if name in self._tied_groups:
                continue  # counted where it has its first name
            square = torch.linalg.vector_norm(local).double().square()
            # A gradient that is whole on every tensor rank counts once.
            squares += square if is_sharded(parameter, TENSOR) else square / self.shape.tensor
        for dimension in self._norm_over:
            if getattr(self.shape, dimension) > 1:
                distributed.all_reduce(squares, group=self._mesh[dimension].get_group())
        norm = squares.sqrt().float()
        # As in torch.nn.utils.clip_grad_norm_.
        factor = torch.clamp(most / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        return norm

    # ----------------------------------------------------------------------------------------------------------- state

    def write_weights(self, placed: Placed, path: Path) -> FileEntry | None:
        """Gather one weight after another, from its tensor ranks and its stage, and write them on rank 0."""
        held = {name: value for name, value in placed.model.state_dict().items() if name not in self._tied}
        mine = {name: TensorForm.of(value) for name, value in held.items()}
        everyone = patiently_gathered((self._sends_state, mine))
        senders = {name: rank for rank, (sends, forms) in reversed([*enumerate(everyone)]) if sends for name in forms}
        forms = {name: everyone[rank][1][name] for name, rank in senders.items()}
        gathered = self._gathered(held, forms, senders)
        return write_gathered(path, forms, gathered, main=distributed.get_rank() == 0)

    def _gathered(
        self, held: Mapping[str, torch.Tensor], forms: Mapping[str, TensorForm], senders: Mapping[str, int]
    ) -> Iterator[torch.Tensor]:
        """Yield the unsharded tensors of all stages on rank 0, and what this process has on the others, in the storage
        order of `forms`. Every rank must read them.
        """
        rank = distributed.get_rank()
        for name in storage_order(forms):
            barrier()  # see `write_gathered`
            whole = _whole(held[name]) if name in held else None
            if rank == senders[name] != 0:
                assert whole is not None
                distributed.send(whole, dst=0)
            if rank == 0 != senders[name]:
                whole = torch.empty(forms[name].shape, dtype=forms[name].dtype)
                distributed.recv(whole, src=senders[name])
            if whole is not None:
                yield whole

    @property
    def _sends_state(self) -> bool:
        """True for the first process of its stage in the first replica."""
        here = self.shape.coordinates(distributed.get_rank())
        return here[DATA] == 0 and here[TENSOR] == 0

    def save(self, placed: Placed, folder: Path) -> Mapping[str, FileEntry]:
        """Write the parts of this process; of what several have, a share."""
        return self._staged(placed, copied=False).write(folder)

    def stage(self, placed: Placed) -> StagedState:
        """Copy the parts of this process; of what several have, a share."""
        return self._staged(placed, copied=True)

    def _staged(self, placed: Placed, *, copied: bool) -> StagedState:
        state = placed.model.state_dict()  # first, as it returns parameters that FSDP gathered to their shards
        optimizer = named_state(placed.optimizer, parameter_names(placed.model))
        everyone = patiently_gathered((optimizer.groups, optimizer.numbers))
        merged = NamedState(
            {(name, key): value for (name, key), value in optimizer.tensors.items() if name not in self._tied},
            {
                (name, key): value
                for _, numbers in everyone
                for (name, key), value in numbers.items()
                if name not in self._tied
            },
            merged_groups([groups for groups, _ in everyone], self._tied),
        )
        weights = {name: value for name, value in state.items() if name not in self._tied}
        return stage_state(*stored_form(weights, merged), copied=copied)

    def load(self, placed: Placed, part: CheckpointPart) -> None:
        """Read the parts that this process needs."""
        held = placed.model.state_dict()  # first, as in `save`
        named = parameter_names(placed.model)
        parameters = {self._tied.get(name, name): value for name, value in named.items() if self._steps(value)}
        if is_gathered(part):
            self._load_gathered(placed, part, parameters)
        else:
            weights = {self._tied.get(name, name): value for name, value in held.items()}
            load_shards(placed.optimizer, weights, parameters, part)

    def _load_gathered(
        self, placed: Placed, part: CheckpointPart, parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        """Read a checkpoint of an earlier release on rank 0, which sends the others their shares."""
        weights: dict[str, Any] = {}
        optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
        if distributed.get_rank() == 0:
            weights = read_pickled(part, part.folder / WEIGHTS)
            optimizer = read_pickled(part, part.folder / OPTIMIZER)
        barrier()
        held = placed.model.state_dict()
        with torch.no_grad():
            for name, value in self._spread(weights):
                if name in held:
                    held[name].copy_(sharded_like(value, held[name]))
        values = {(name, key): value for name, entries in optimizer["state"].items() for key, value in entries.items()}
        tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        rest: list[Any] = [
            optimizer["param_groups"],
            {key: value for key, value in values.items() if key not in tensors},
        ]
        distributed.broadcast_object_list(rest, src=0)
        groups, numbers = rest
        state: dict[tuple[str, str], torch.Tensor] = {}
        for (name, key), value in self._spread(tensors):
            if name in parameters:
                whole = value.shape == parameters[name].shape
                state[name, key] = sharded_like(value, parameters[name]) if whole else value
        load_named_state(placed.optimizer, parameters, NamedState(state, numbers, groups))

    def _spread(self, tensors: Mapping[Any, torch.Tensor]) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield the tensors of rank 0, one after another, on every rank's CPU."""
        layout: list[Any] = [{name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}]
        distributed.broadcast_object_list(layout, src=0)
        for name, (shape, dtype) in layout[0].items():
            value = tensors[name].contiguous() if name in tensors else torch.empty(shape, dtype=dtype)
            distributed.broadcast(value, src=0)
            yield name, value


def refuse_broken_passes(training: Training) -> None:
    """Raise StageError CONFIG for a step that is no whole number of passes through the pipeline."""
    pipeline = training.strategy.pipeline
    if pipeline is not None and training.batch.gradient_accumulation % pipeline.micro_batches:
        raise StageError(
            FailureClass.CONFIG,
            "BrokenPasses",
            f"parallelism.pipeline.microBatches is {pipeline.micro_batches}, and a step has "
            f"{training.batch.gradient_accumulation} micro-batches, not a multiple of it.",
            "Plan again.",
        )


# -------------------------------------------------------------------------------------------------------------- tensors


def _whole_probe(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the output of the whole `model`, whose weights are as stored."""
    with fp32_by_block(model):
        return _probe(model)


def _probe(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the output of `model` for a row of a few tokens."""
    training, device = model.training, model.device
    vocabulary: int = model.config.get_text_config().vocab_size
    ids = torch.arange(1, _PROBE_TOKENS + 1, device=device).remainder(vocabulary).unsqueeze(0)
    model.train(False)
    # With gradients, as split layers compute in another way without.
    outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    model.train(training)
    return {name: value.detach() for name, value in outputs.items() if isinstance(value, torch.Tensor)}


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return this process's part of the gradient, zeros if there is none; changing it changes the gradient."""
    from torch.distributed.tensor import DTensor

    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    if isinstance(parameter, DTensor):
        assert isinstance(gradient, DTensor)
        if gradient.placements != parameter.placements:
            gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()
    return gradient


def _whole(value: torch.Tensor) -> torch.Tensor:
    """Return the unsharded tensor, on the CPU. Every process with a part must call it."""
    return whole_of(value).detach().to("cpu", copy=True).contiguous()
