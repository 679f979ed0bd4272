"""The list of keys that DeepSpeed knows, compared with the installed DeepSpeed."""

from __future__ import annotations

import os
from typing import Any

from finetune_operator.spec.tables.deepspeed_keys import known_keys, open_sections
from finetune_trainer.strategies.deepspeed_import import import_deepspeed


class Recorder(dict[str, Any]):
    """A configuration that records the keys that DeepSpeed looks up, in itself and in its sections."""

    def __init__(self, path: tuple[str, ...], seen: dict[tuple[str, ...], set[str]], values: dict[str, Any]) -> None:
        self.path, self.seen = path, seen
        nested = {
            key: Recorder((*path, key), seen, value) if isinstance(value, dict) else value
            for key, value in values.items()
        }
        super().__init__(nested)

    def _note(self, key: str) -> str:
        self.seen.setdefault(self.path, set()).add(key)
        return key

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(self._note(key), default)

    def pop(self, key: str, *default: Any) -> Any:
        return super().pop(self._note(key), *default)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._note(str(key)))

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(self._note(key))

    def keys(self) -> Any:
        return self


def keys_of_installed_deepspeed() -> dict[tuple[str, ...], frozenset[str]]:
    """Return section -> keys: those that DeepSpeed reads in a configuration, and fields of its pydantic sections."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import_deepspeed()
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import DeepSpeedConfig, HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    seen: dict[tuple[str, ...], set[str]] = {}
    config = {"train_batch_size": 1, "activation_checkpointing": {}, "aio": {}, "flops_profiler": {}, "data_types": {}}
    DeepSpeedConfig(Recorder((), seen, config))
    models = {
        ("zero_optimization",): DeepSpeedZeroConfig,
        ("zero_optimization", "offload_optimizer"): DeepSpeedZeroOffloadOptimizerConfig,
        ("zero_optimization", "offload_param"): DeepSpeedZeroOffloadParamConfig,
        ("zero_optimization", "leaf_module"): DeepSpeedZeroLeafModuleConfig,
        ("zero_optimization", "zenflow"): ZenFlowConfig,
        ("bf16",): DeepSpeedBF16Config,
        ("fp16",): DeepSpeedFP16Config,
        ("comms_logger",): CommsLoggerConfig,
        ("tensorboard",): TensorBoardConfig,
        ("wandb",): WandbConfig,
        ("csv_monitor",): CSVConfig,
        ("comet",): CometConfig,
        ("compile",): CompileConfig,
        ("hybrid_engine",): HybridEngineConfig,
    }
    known = {path: frozenset(keys) for path, keys in seen.items()}
    for path, model in models.items():
        known[path] = frozenset(field.alias or name for name, field in model.model_fields.items())
    return known


def test_the_list_of_known_keys_is_that_of_the_installed_deepspeed():
    found = keys_of_installed_deepspeed()
    assert len(found[()]) > 50, "the recorder did not see what DeepSpeed reads"
    assert {".".join(path): sorted(keys) for path, keys in known_keys().items()} == {
        ".".join(path): sorted(keys) for path, keys in found.items()
    }


def test_every_section_that_is_not_checked_inside_is_a_known_key():
    assert known_keys()[()] >= open_sections()
    assert not {path[0] for path in known_keys() if path} & open_sections()
