"""DeepSpeed ZeRO stages 0 to 3, with the optimizer state on the devices or in host memory.

The configuration arrives decided, as `deepspeed.json`. This module refuses undecided values and sections that would
replace the job's own optimizer or schedule; the transformers integration compares the rest with TrainingArguments, and
after set-up the engine is compared with the job.

DeepSpeed reads its checkpoints by unpickling, which runs any code that a file names. Here it reads through `_read`,
which builds tensors, containers and a handful of DeepSpeed's own plain classes only, from files that the checkpoint's
manifest lists; the rank that reads a file compares its hash first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_contract.choices import Precision, StrategyName
from finetune_contract.layout import FailureClass
from finetune_contract.report import TimePart
from finetune_contract.trainer_job import Strategy as StrategySettings
from finetune_trainer.checkpoint.checkpoints import CheckpointPart
from finetune_trainer.core.distributed import barrier
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import FileEntry
from finetune_trainer.strategies.deepspeed_import import import_deepspeed
from finetune_trainer.strategies.strategy_protocol import (
    Placed,
    WeightsPlace,
    expect,
    not_in_effect,
    tied_names,
    type_name,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from finetune_trainer.strategies.shard_files import StagedState

_HPZ = "zero_hpz_partition_size"
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")
"""ZeRO++ (Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023)."""


class DeepSpeed:
    """DeepSpeed's engine and checkpoint form: shards tied to the stage and the number of processes that wrote them."""

    name: StrategyName = "deepspeed"
    replica_step = None
    shards_itself = False
    scales_loss = False
    takes_weights: WeightsPlace = "files"

    def __init__(
        self,
        settings: StrategySettings,
        precision: Precision,
        world_size: int,
        config: Mapping[str, Any],
        scratch: Path,
    ) -> None:
        """`scratch`: folder for files of offloaded state, if `config` names none."""
        self._settings = settings
        self._precision = precision
        self._world_size = world_size
        refuse_auto(config)
        _refuse_second_owners(config)
        _refuse_universal(config)
        self._config = _with_folder(config, scratch)
        self._zero: Mapping[str, Any] = self._config.get("zero_optimization", {})

    @property
    def communicates_in(self) -> tuple[TimePart, ...]:
        """Parts with communication: the backward pass reduces gradients, from stage 1 on the step gathers the updated
        parameters, and stage 3 gathers parameters in the forward pass too.
        """
        stage = self._settings.zero_stage or 0
        parts: tuple[TimePart, ...] = ("forward", "backward", "optimizer")
        return parts if stage == 3 else parts[1:] if stage else ("backward",)

    def arguments(self) -> Mapping[str, object]:
        """Pass on the configuration as it is; the engine applies the precision, given to both for comparison."""
        return {
            "deepspeed": self._config,
            "bf16": self._precision == "bf16",
            "fp16": self._precision == "fp16",
        }

    def prepare_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """Partition the model for stage 3; for the other stages the engine partitions later."""
        import_deepspeed()
        if self._settings.uses_nvme:
            feature = "parallelism.offload with nvme"
            _refuse_missing("AsyncIOBuilder", feature, "Use an image that has it (with libaio), or offload to cpu.")
        for key in _QUANTIZED:
            if self._zero.get(key):
                feature = f"parallelism.deepspeedConfig.zero_optimization.{key}"
                _refuse_missing(
                    "QuantizerBuilder", feature, "Use GPUs and an image with CUDA's compiler, or leave it out."
                )
        if self._settings.zero_stage == 3:
            self._divide(model)
        else:
            from deepspeed.accelerator import get_accelerator

            device = get_accelerator().current_device_name()
            for parameter in model.parameters():
                _place(parameter, device, self._dtype)
        return model

    @property
    def _dtype(self) -> torch.dtype:
        """Type of the weights that the engine computes with."""
        from finetune_trainer.devices.device_units import TORCH_TYPES

        return TORCH_TYPES[self._precision]

    def _divide(self, model: PreTrainedModel) -> None:
        """Convert, move and partition one parameter after another, so that a device holds one whole one at a time.

        The engine would put the whole model on each device before it partitions it (DeepSpeed 0.19,
        `DeepSpeedEngine._configure_distributed_model`); it leaves partitioned parameters where they are, and the
        buffers, which are not partitioned, too. All ranks continue with the weights of rank 0.
        """
        import deepspeed
        import torch
        from deepspeed.accelerator import get_accelerator

        # As `deepspeed.initialize` would later: on top of the existing process group.
        deepspeed.init_distributed(get_accelerator().communication_backend_name(), auto_mpi_discovery=False)
        device, dtype = get_accelerator().current_device_name(), self._dtype
        first, *others = model.parameters()
        _place(first, device, dtype)
        deepspeed.zero.Init(module=torch.nn.ParameterList([first]), config_dict_or_path=self._config)
        for parameter in others:
            _place(parameter, device, dtype)
            first.convert_to_zero_parameters([parameter])  # type: ignore[attr-defined]  # it has that from Init
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)

    def assert_in_effect(self, placed: Placed) -> None:
        """Expect a DeepSpeed engine with the job's stage, offload, precision and world size."""
        from deepspeed import DeepSpeedEngine

        engine = placed.wrapped
        if not isinstance(engine, DeepSpeedEngine):
            raise not_in_effect(
                self.name, "NotDeepSpeed", f"the model is a {type_name(engine)}, not a DeepSpeed engine"
            )
        stage, requested = engine.zero_optimization_stage(), self._settings.zero_stage
        expect(
            stage == requested,
            self.name,
            "WrongZeroStage",
            f"the engine runs ZeRO stage {stage}, requested was {requested}",
        )
        size = engine.dp_world_size
        expect(
            size == self._world_size,
            self.name,
            "WrongGroupSize",
            f"the engine has {size} of {self._world_size} processes",
        )
        for kind, enabled in (("bf16", engine.bfloat16_enabled()), ("fp16", engine.fp16_enabled())):
            problem = f"{kind} is {'on' if enabled else 'off'} in the engine and the precision is {self._precision}"
            expect(bool(enabled) == (self._precision == kind), self.name, "WrongPrecision", problem)
        self._assert_sharded(engine, placed)
        self._assert_offload(engine, placed)
        self._assert_zero_plus_plus(engine, placed)

    def _assert_sharded(self, engine: Any, placed: Placed) -> None:
        """Expect the optimizer and the parameters of the configured stage, not its number alone."""
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        stage = self._settings.zero_stage
        optimizer = engine.optimizer
        kind = {0: object, 1: DeepSpeedZeroOptimizer, 2: DeepSpeedZeroOptimizer, 3: DeepSpeedZeroOptimizer_Stage3}[
            stage or 0
        ]
        problem = f"the optimizer of ZeRO stage {stage} is a {type_name(optimizer)}"
        expect(isinstance(optimizer, kind), self.name, "WrongOptimizer", problem)
        if stage == 3:
            whole = [name for name, parameter in placed.model.named_parameters() if not hasattr(parameter, "ds_id")]
            expect(
                not whole,
                self.name,
                "ParameterNotSharded",
                f"{len(whole)} parameters are not partitioned, e.g. {whole[:1]}",
            )

    def _assert_offload(self, engine: Any, placed: Placed) -> None:
        """Expect the requested offload, in the engine's configuration and in the actual place of the state."""
        requested = (self._settings.offload_optimizer, self._settings.offload_parameters)
        actual = (_device_of(engine.zero_offload_optimizer()), _device_of(engine.zero_offload_param()))
        for state, there, wanted in zip(("optimizer state is", "parameters are"), actual, requested, strict=True):
            problem = f"{state} offloaded to {there}, requested was {wanted}"
            expect(there == wanted, self.name, "WrongOffload", problem)
        optimizer, parameters = requested
        swapped = bool(getattr(engine.optimizer, "swap_optimizer", False))
        problem = f"the optimizer keeps its state in {'files' if swapped else 'memory'}, requested was {optimizer}"
        expect(swapped == (optimizer == "nvme"), self.name, "WrongOffload", problem)
        if parameters == "none":
            return
        for name, parameter in placed.model.named_parameters():
            shard = getattr(parameter, "ds_tensor", None)
            if shard is None or getattr(parameter, "ds_persist", False):
                continue  # too small to be worth moving: the threshold is in the plan
            if parameters == "nvme":
                kept, computed = _swapper(parameter).dtype, parameter.dtype
                problem = f"{name} is {computed} and its file holds {kept}"  # on a CPU DeepSpeed takes bf16 for all
                expect(kept == computed, self.name, "WrongOffload", problem)
                if not _swapper(parameter).swappable_tensor(param=parameter):
                    continue  # too small for a file of its own
            in_files = getattr(shard.final_location, "value", shard.final_location) == "nvme"
            right = in_files if parameters == "nvme" else shard.device.type == "cpu"
            problem = f"the shard of {name} is {'in a file' if in_files else f'on {shard.device}'}"
            expect(right, self.name, "WrongOffload", f"{problem}, requested was {parameters}")

    def _assert_zero_plus_plus(self, engine: Any, placed: Placed) -> None:
        """Expect the configured secondary shards and quantized communication."""
        import torch

        wanted = min(int(self._zero.get(_HPZ, 1)), self._world_size)
        for name, parameter in placed.model.named_parameters() if wanted > 1 else ():
            group = getattr(parameter, "ds_zero_param_process_group", None)
            size = 1 if group is None else torch.distributed.get_world_size(group)
            problem = f"{name} has secondary shards over {size} processes, requested were {wanted}"
            expect(size == wanted, self.name, "WrongSecondaryShards", problem)
        actual = (engine.zero_quantized_weights(), engine.zero_quantized_gradients())
        for key, state in zip(_QUANTIZED, actual, strict=True):
            problem = f"{key} is {'on' if state else 'off'} in the engine"
            expect(bool(state) == bool(self._zero.get(key)), self.name, "WrongQuantization", problem)

    def accumulating(self, placed: Placed) -> AbstractContextManager[Any]:
        """Return an empty context: each backward pass tells the engine whether it is the last."""
        return nullcontext()

    def write_weights(self, placed: Placed, path: Path) -> FileEntry | None:
        """Write the weights in the engine's precision; stage 3 gathers one parameter at a time."""
        import torch

        from finetune_trainer.checkpoint.tensor_files import TensorForm, storage_order, write_gathered

        tied, persistent = tied_names(placed.model), placed.model.state_dict().keys()
        held: dict[str, torch.Tensor] = {
            name: parameter
            for name, parameter in placed.model.named_parameters(remove_duplicate=False)
            if name not in tied and (parameter.requires_grad or not placed.adapted)
        }
        held |= {name: buffer for name, buffer in placed.model.named_buffers() if name in persistent}
        forms = {
            name: TensorForm(value.dtype, tuple(getattr(value, "ds_shape", value.shape)))
            for name, value in held.items()
        }
        # The last forward pass may have prefetched parameters of the next; those in flight cannot be gathered.
        placed.wrapped.empty_partition_cache()  # type: ignore[operator]
        gathered = _gathered(held[name] for name in storage_order(forms))
        return write_gathered(path, forms, gathered, main=torch.distributed.get_rank() == 0)

    def save(self, placed: Placed, folder: Path) -> Mapping[str, FileEntry]:
        """Have the engine write one folder with the shards of all ranks, which it does not hash."""
        placed.wrapped.save_checkpoint(str(folder), exclude_frozen_parameters=placed.adapted)  # type: ignore[operator]
        return {}

    def stage(self, placed: Placed) -> StagedState:
        """Raise NotImplementedError: the engine gathers and writes its state in one call."""
        raise NotImplementedError("DeepSpeed's checkpoints are not asynchronous; job.json refuses it.")

    def load(self, placed: Placed, part: CheckpointPart) -> None:
        """Have the engine read its shards. Raise StageError CHECKPOINT if it does not find them, or for a file that
        differs from the manifest or holds more than data.
        """
        engine: Any = placed.wrapped
        tag = part.checked(part.folder / "latest").read_text(encoding="utf-8").strip()
        loaded = None
        if tag not in ("", "..") and tag == Path(tag).name:  # DeepSpeed would follow a path
            with _reads_data_of(engine, part):
                loaded, _ = engine.load_checkpoint(str(part.folder), tag, load_module_strict=not placed.adapted)
        if loaded is None:
            raise StageError(
                FailureClass.CHECKPOINT,
                "NoDeepSpeedState",
                f"DeepSpeed found no state of its own in {part.folder}.",
                "Start anew.",
            )
        if self._settings.offload_optimizer == "nvme":
            _restore_what_is_in_memory(engine, part, tag)
        _settle_adam(engine)

    def why_not_from(self, manifest_strategy: str, manifest_world_size: int, world_size: int) -> str | None:
        """Allow only the same stage over the same number of processes."""
        mine = self._settings.checkpoint_form
        if manifest_strategy != mine:
            return f"it was written by strategy {manifest_strategy}, and {mine} reads its own shards only"
        if manifest_world_size != world_size:
            return f"it was written by {manifest_world_size} processes, and DeepSpeed's shards belong to that number"
        return None


def _gathered(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield whole tensors, each of which is valid until the next."""
    import deepspeed
    import torch

    for tensor in tensors:
        sharded = hasattr(tensor, "ds_id")
        if sharded:
            barrier()  # see `write_gathered`
        with torch.no_grad(), deepspeed.zero.GatheredParameters([tensor], enabled=sharded):
            yield tensor.detach()


def _place(parameter: torch.nn.Parameter, device: str, dtype: torch.dtype) -> None:
    """Move a parameter to the device, and convert it there if it is floating-point."""
    parameter.data = parameter.data.to(device)
    if parameter.is_floating_point():
        parameter.data = parameter.data.to(dtype)


def _device_of(settings: Any) -> str:
    """Return the device to which a section of DeepSpeed's configuration offloads."""
    return "none" if settings is None else str(getattr(settings.device, "value", settings.device))


def _settle_adam(engine: Any) -> None:
    """Convert loaded state between torch's AdamW and DeepSpeed's CPU Adam, for runs that continue with the optimizer in
    host memory after an out-of-memory error. They differ in a few settings, and torch has the step as a tensor.
    """
    import torch

    inner = engine.basic_optimizer
    for group in inner.param_groups:
        for name, value in inner.defaults.items():
            group.setdefault(name, value)
    on_host = type(inner).__name__ == "DeepSpeedCPUAdam"
    for state in inner.state.values():
        if "step" in state and torch.is_tensor(state["step"]) == on_host:
            state["step"] = int(state["step"]) if on_host else torch.tensor(float(state["step"]))


@contextmanager
def _reads_data_of(engine: Any, part: CheckpointPart) -> Iterator[None]:
    """Have DeepSpeed read files of `part` by `_read`. All its reads of a file end in the `load` of its checkpoint
    engine (DeepSpeed 0.19, `runtime/engine.py` and `runtime/state_dict_factory.py`), but for universal checkpoints.
    """
    reader = engine.checkpoint_engine
    reader.load = lambda path, map_location=None: _read(part, Path(path), map_location)
    try:
        yield
    finally:
        del reader.load


def _read(part: CheckpointPart, path: Path, map_location: Any) -> Any:
    """Return the content of a file that DeepSpeed wrote to `part`; errors as `read_pickled`."""
    from finetune_trainer.checkpoint.tensor_files import read_pickled

    return read_pickled(part, path, map_location, _plain_classes())


def _plain_classes() -> list[Any]:
    """Return DeepSpeed's classes in its own checkpoints: they hold numbers, and their constructors call nothing."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def _restore_what_is_in_memory(engine: Any, part: CheckpointPart, tag: str) -> None:
    """Restore the state that DeepSpeed 0.19 does not read back if optimizer state is in files: sub-groups too small for
    a file, the learning rate, and Adam's step count. It writes all of it, but `load_checkpoint` copies the files alone,
    and would reset the moments in them, as it knows of none before the first step.
    """
    import torch

    path = Path(engine._get_zero_ckpt_name(str(part.folder), tag))
    saved = _read(part, path, "cpu")["optimizer_state_dict"]
    zero, inner = engine.optimizer, engine.optimizer.optimizer
    zero.checkpoint_event_prologue()  # releases the weights that stay gathered, which are stale
    zero._set_fp32_optimizer_param_groups()
    in_saved_order = [parameter for group in inner.param_groups for parameter in group["params"]]
    zero._clear_fp32_optimizer_param_groups()
    for group, former in zip(inner.param_groups, saved["optimizer_state_dict"]["param_groups"], strict=True):
        group.update({name: value for name, value in former.items() if name != "params"})
    with torch.no_grad():
        for index, parameter in enumerate(in_saved_order):
            sub_group = next(i for i, flat in enumerate(zero.fp32_partitioned_groups_flat) if flat is parameter)
            state = dict(saved["optimizer_state_dict"]["state"][index])
            if zero._swappable_optimizer_subgroup(sub_group):
                # Buffers that the swapper registers, and fills from the files before the first step.
                count = int(zero.fp16_partitioned_groups_flat_numel[sub_group])
                state |= {name: torch.empty(count) for name in state if name != "step"}
                inner.state[parameter] = state
                continue
            inner.state[parameter] = state
            parameter.copy_(saved["fp32_flat_groups"][sub_group])
            zero._reassign_or_swap_out_partitioned_parameters(sub_group)
    zero.checkpoint_event_epilogue()  # and gathers them again


def _swapper(parameter: Any) -> Any:
    """Return the object with which DeepSpeed moves the shard of a parameter to files."""
    return parameter.nvme_swapper


def _with_folder(config: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    """Return `config` with `scratch` as the folder of state that is offloaded to files and has no folder yet."""
    zero = dict(config.get("zero_optimization", {}))
    for section in ("offload_optimizer", "offload_param"):
        if zero.get(section, {}).get("device") == "nvme":
            zero[section] = {"nvme_path": str(scratch), **zero[section]}
    return {**config, **({"zero_optimization": zero} if zero else {})}


def _refuse_missing(builder: str, feature: str, hint: str) -> None:
    """Raise StageError CONFIG `OperatorMissing` if one of DeepSpeed's own operators can neither be loaded nor compiled:
    the run would fail amid the set-up with a message of the compiler.
    """
    from deepspeed.ops import op_builder

    try:
        getattr(op_builder, builder)().load(verbose=False)
    except (Exception, SystemExit) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StageError(
            FailureClass.CONFIG,
            "OperatorMissing",
            f"{feature} needs DeepSpeed's {builder.removesuffix('Builder')} operator, which is not available here: "
            f"{reason}.",
            hint,
        ) from error


def refuse_auto(config: Mapping[str, Any], path: str = "deepspeed.json") -> None:
    """Raise StageError CONFIG for any remaining `auto`: two parties would decide the same number, late."""
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
    """Raise StageError CONFIG for sections that DeepSpeed would apply instead of the job's own fields."""
    for section, field in {"optimizer": "training.optimizer", "scheduler": "training.scheduler"}.items():
        if section in config:
            raise StageError(
                FailureClass.CONFIG,
                "DeepSpeedConfigMismatch",
                f"deepspeed.json.{section} is set, and {field} decides it.",
                f"Leave it out of parallelism.deepspeedConfig and set {field}.",
            )


def _refuse_universal(config: Mapping[str, Any]) -> None:
    """Raise StageError CONFIG for universal checkpoints: this trainer writes none, and DeepSpeed unpickles them."""
    if config.get("checkpoint", {}).get("load_universal"):
        raise StageError(
            FailureClass.CONFIG,
            "UniversalCheckpoint",
            "deepspeed.json.checkpoint.load_universal is true, and only checkpoints that this trainer wrote are read.",
            "Leave it out of parallelism.deepspeedConfig.",
        )
