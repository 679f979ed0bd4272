"""DeepSpeed ZeRO stages 0 to 3, with the optimizer state on the devices or in host memory.

The configuration comes decided, as `deepspeed.json`. What is left undecided and what would replace the job's own
optimizer or schedule is refused here, the transformers integration compares the rest with TrainingArguments, and after
set-up the engine is compared with the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_contract.choices import Precision, StrategyName
from finetune_contract.job import Strategy as StrategySettings
from finetune_contract.layout import FailureClass
from finetune_trainer.failures import StageError
from finetune_trainer.strategies.base import Placed, expect, not_in_effect, type_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DeepSpeed:
    """The engine's own checkpoints: shards that belong to the stage and the number of processes that wrote them."""

    name: StrategyName = "deepspeed"

    def __init__(
        self, settings: StrategySettings, precision: Precision, world_size: int, config: Mapping[str, Any]
    ) -> None:
        self._settings = settings
        self._precision = precision
        self._world_size = world_size
        self._config = dict(config)
        refuse_auto(config)
        _refuse_second_owners(config)

    def arguments(self) -> Mapping[str, object]:
        """The configuration as it is; bf16 is the engine's, and told to both so that they can be compared."""
        return {"deepspeed": self._config, "bf16": self._precision == "bf16"}

    def prepare_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """The engine partitions it later."""
        _leave_out_shared_memory_op()
        return model

    def assert_in_effect(self, placed: Placed) -> None:
        """A DeepSpeed engine of the stage, the offload, the precision and the world that the job says."""
        from deepspeed import DeepSpeedEngine

        engine = placed.wrapped
        if not isinstance(engine, DeepSpeedEngine):
            raise not_in_effect(
                self.name, "NotDeepSpeed", f"the model is a {type_name(engine)}, not a DeepSpeed engine"
            )
        stage, asked = engine.zero_optimization_stage(), self._settings.zero_stage
        expect(
            stage == asked, self.name, "WrongZeroStage", f"the engine runs ZeRO stage {stage}, asked for was {asked}"
        )
        size = engine.dp_world_size
        expect(
            size == self._world_size,
            self.name,
            "WrongGroupSize",
            f"the engine knows {size} of {self._world_size} processes",
        )
        bf16 = bool(engine.bfloat16_enabled())
        found = f"bf16 is {'on' if bf16 else 'off'} in the engine and the precision is {self._precision}"
        expect(bf16 == (self._precision == "bf16"), self.name, "WrongPrecision", found)
        self._assert_sharded(engine, placed)
        self._assert_offload(engine)

    def _assert_sharded(self, engine: Any, placed: Placed) -> None:
        """The configuration says a stage; these are the objects that do it."""
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        stage = self._settings.zero_stage
        optimizer = engine.optimizer
        kind = {0: object, 1: DeepSpeedZeroOptimizer, 2: DeepSpeedZeroOptimizer, 3: DeepSpeedZeroOptimizer_Stage3}[
            stage or 0
        ]
        found = f"the optimizer of ZeRO stage {stage} is a {type_name(optimizer)}"
        expect(isinstance(optimizer, kind), self.name, "WrongOptimizer", found)
        if stage == 3:
            whole = [name for name, parameter in placed.model.named_parameters() if not hasattr(parameter, "ds_id")]
            expect(
                not whole,
                self.name,
                "ParameterNotSharded",
                f"{len(whole)} parameters are not partitioned, e.g. {whole[:1]}",
            )

    def _assert_offload(self, engine: Any) -> None:
        asked = self._settings.offload_optimizer
        settings = engine.zero_offload_optimizer()
        device = "none" if settings is None else str(getattr(settings.device, "value", settings.device))
        expect(
            device == asked,
            self.name,
            "WrongOffload",
            f"optimizer state is offloaded to {device}, asked for was {asked}",
        )

    def model_state(self, placed: Placed) -> dict[str, Any]:
        """All weights, or those that are trained, on rank 0, in the precision that the engine computes in; gathered
        one parameter at a time with stage 3.
        """
        import deepspeed
        import torch

        main = torch.distributed.get_rank() == 0
        state: dict[str, Any] = {}
        tied = _tied_names(placed.model)
        with torch.no_grad():
            for name, parameter in placed.model.named_parameters(remove_duplicate=False):
                if placed.adapted and not parameter.requires_grad:
                    continue
                with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                    if main and name not in tied:
                        state[name] = parameter.detach().to("cpu", copy=True)
        if not main:
            return {}
        persistent = placed.model.state_dict().keys()
        state |= {name: buffer.cpu() for name, buffer in placed.model.named_buffers() if name in persistent}
        return state

    def save(self, placed: Placed, folder: Path) -> None:
        """The engine writes one folder with the shards of all ranks."""
        placed.wrapped.save_checkpoint(str(folder), exclude_frozen_parameters=placed.adapted)  # type: ignore[operator]

    def load(self, placed: Placed, folder: Path) -> None:
        """The engine reads its shards; StageError CHECKPOINT when it does not find them."""
        strict = not placed.adapted
        loaded, _ = placed.wrapped.load_checkpoint(str(folder), load_module_strict=strict)  # type: ignore[operator]
        if loaded is None:
            raise StageError(
                FailureClass.CHECKPOINT,
                "NoDeepSpeedState",
                f"DeepSpeed found no state of its own in {folder}.",
                "Start anew.",
            )

    def why_not_from(self, manifest_strategy: str, manifest_world_size: int, world_size: int) -> str | None:
        """Only the same stage over the same number of processes."""
        mine = self._settings.sharding
        if manifest_strategy != mine:
            return f"it was written by strategy {manifest_strategy}, and {mine} reads its own shards only"
        if manifest_world_size != world_size:
            return f"it was written by {manifest_world_size} processes, and DeepSpeed's shards belong to that number"
        return None


def _leave_out_shared_memory_op() -> None:
    """On CPU DeepSpeed compiles a collective over shared memory at its first start: half a minute and a compiler, for
    inference only.

    Training collectives go through gloo with or without it.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _tied_names(model: PreTrainedModel) -> set[str]:
    """Names that are second names of a parameter that has another."""
    first = {id(parameter) for _, parameter in model.named_parameters()}
    names = {name for name, _ in model.named_parameters()}
    return {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in first and name not in names
    }


def refuse_auto(config: Mapping[str, Any], path: str = "deepspeed.json") -> None:
    """StageError CONFIG for any `auto` that is left: two parties would decide the same number, late."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            refuse_auto(value, f"{path}.{key}")
        elif value == "auto":
            raise StageError(
                FailureClass.CONFIG,
                "UndecidedDeepSpeedKey",
                f"{path}.{key} is 'auto'; the plan must have decided it.",
                "Plan again.",
            )


def _refuse_second_owners(config: Mapping[str, Any]) -> None:
    """StageError CONFIG for sections that DeepSpeed would obey instead of the job's own fields."""
    for section, field in {"optimizer": "training.optimizer", "scheduler": "training.scheduler"}.items():
        if section in config:
            raise StageError(
                FailureClass.CONFIG,
                "DeepSpeedConfigMismatch",
                f"deepspeed.json.{section} is set, and {field} decides it.",
                f"Leave it out of parallelism.deepspeedConfig and set {field}.",
            )
