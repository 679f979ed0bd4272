"""Every change that the trainer makes inside a library for the whole process: what, why and until when.

A patch is in force for a `with` block, or with `until_end` until the end of the innermost `patches_removed` (a training
or a stage; outside of one, of the process). The last patch is removed first, so that the next job of a process finds
the libraries as they were. Two patches in force never change the same thing. The functions that are put in place are
with their ideas; callers pass them.

Not here: hooks and methods of one model, and settings that a library has for its process (threads, logs, TF32). Not
removed: what libraries did while imported, and the kernels of Liger, which replaces functions of transformers itself
and has no way back.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec

_Values = ParamSpec("_Values")


@dataclass(frozen=True, eq=False)
class Patch(Generic[_Values]):
    """A change of libraries, which takes values of the caller."""

    name: str
    changes: tuple[str, ...]
    """Names of the things that it changes."""
    install: Callable[_Values, AbstractContextManager[object]]

    @contextmanager
    def __call__(self, *values: _Values.args, **named: _Values.kwargs) -> Iterator[None]:
        """Put the patch in force inside the context. RuntimeError if one in force changes the same thing."""
        for other in _in_force:
            if both := set(self.changes) & set(other.changes):
                raise RuntimeError(f"{self.name} cannot change {', '.join(sorted(both))}: {other.name} has done so")
        _in_force[self] = (values, named)
        try:
            with self.install(*values, **named):
                yield
        finally:
            del _in_force[self]

    def until_end(self, *values: _Values.args, **named: _Values.kwargs) -> None:
        """Put the patch in force until the end of the innermost `patches_removed`, unless it is with equal values."""
        if _in_force.get(self) == (values, named):
            return
        context = self(*values, **named)
        context.__enter__()
        _scopes[-1].callback(context.__exit__, None, None, None)  # as without an error, after which some stay


_in_force: dict[Patch[...], tuple[object, object]] = {}
"""Patch -> its values."""
_scopes = [ExitStack()]
"""Removals, innermost scope last; the first scope is the process."""
atexit.register(_scopes[0].close)  # before Python takes the modules apart, in which a removal would fail aloud


@contextmanager
def patches_removed() -> Iterator[None]:
    """Remove at the end what `until_end` put in force meanwhile."""
    with ExitStack() as scope:
        _scopes.append(scope)
        scope.callback(_scopes.remove, scope)
        yield


def _patch(
    *changes: str,
) -> Callable[[Callable[_Values, AbstractContextManager[object]]], Patch[_Values]]:
    """Make a patch of a function that returns the context in which it is in force."""
    return lambda install: Patch(install.__name__, changes, install)


# ------------------------------------------------------------------------------------------------------------ attention


@_patch("transformers.AttentionInterface[sdpa]")
def attention_by_row(attend: Callable[..., Any]) -> AbstractContextManager[None]:
    """Compute the rows of packs by themselves, until the end: layers are repeated for backward passes, too."""
    from transformers import AttentionInterface

    return _registered(AttentionInterface, sdpa=attend)


@_patch(
    "transformers.AttentionMaskInterface[sdpa]",
    "transformers.masking_utils.find_packed_sequence_indices",
)
@contextmanager
def rows_for_masks(mask: Callable[..., Any]) -> Iterator[None]:
    """Have the layers get rows in place of a mask, in a forward pass over packs. transformers looks for the rows of a
    pack on the device, and the host would wait for what it finds.
    """
    from transformers import AttentionMaskInterface, masking_utils

    with (
        _registered(AttentionMaskInterface, sdpa=mask),
        _attribute(masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
    ):
        yield


@_patch("transformers.AttentionMaskInterface[sdpa]")
def masks_by_known_padding(mask: Callable[..., Any]) -> AbstractContextManager[None]:
    """Have masks made by what the host knows of the padding, in a forward pass: transformers inspects the device."""
    from transformers import AttentionMaskInterface

    return _registered(AttentionMaskInterface, sdpa=mask)


@_patch(
    "transformers.AttentionInterface[sequence_parallel]",
    "transformers.AttentionMaskInterface[sequence_parallel]",
)
@contextmanager
def attention_over_token_shards(attend: Callable[..., Any], mask: Callable[..., Any]) -> Iterator[None]:
    """Add the attention of sequence parallelism, until the end."""
    from transformers import AttentionInterface, AttentionMaskInterface

    with (
        _registered(AttentionInterface, sequence_parallel=attend),
        _registered(AttentionMaskInterface, sequence_parallel=mask),
    ):
        yield


# --------------------------------------------------------------------------------------------------- tensor parallelism


@_patch("transformers.ALL_PARALLEL_STYLES[... of Conv1D]")
def conv1d_styles(styles: Mapping[str, object]) -> AbstractContextManager[None]:
    """Add the styles of GPT-2's layers, for which transformers has no plan, until the end."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    return _registered(ALL_PARALLEL_STYLES, **styles)


@_patch("transformers.ALL_PARALLEL_STYLES[rowwise_to_shards]")
def style_to_shards(style: object) -> AbstractContextManager[None]:
    """Add the style of layers whose outputs are summed up and divided by tokens, until the end."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    return _registered(ALL_PARALLEL_STYLES, rowwise_to_shards=style)


@_patch("torch.distributed.tensor: operators of cross-entropy")
def sharded_cross_entropy() -> AbstractContextManager[None]:
    """Compute cross-entropies of logits that are divided over the vocabulary without gathering them, until the end:
    also in backward passes, which a checkpoint resumes anywhere.
    """
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


# ---------------------------------------------------------------------------------------------------- loading of models


@_patch("transformers.PreTrainedModel._get_dtype_plan")
def types_of_loaded_weights(plan: Callable[..., Any]) -> AbstractContextManager[None]:
    """Load weights in the types of their files, which no argument of `from_pretrained` does."""
    from transformers import PreTrainedModel

    return _attribute(PreTrainedModel, "_get_dtype_plan", plan)


@_patch("transformers.PreTrainedModel.prepare_distribute_model")
def mesh_of_loaded_model(prepare: Callable[..., Any]) -> AbstractContextManager[None]:
    """Load a model over some of the processes, where transformers requires that all hold one."""
    from transformers import PreTrainedModel

    return _attribute(PreTrainedModel, "prepare_distribute_model", classmethod(prepare))


@_patch("huggingface_hub.constants.HF_HUB_OFFLINE")
@contextmanager
def hub_offline(forget: Callable[[], None]) -> Iterator[None]:
    """Request nothing else from a Hub that does not answer, until the end; then `forget` what the cache answered. The
    Hub's client reads the constant at each request, and transformers reads it, too.
    """
    from huggingface_hub import constants

    with _attribute(constants, "HF_HUB_OFFLINE", True):
        yield
    forget()


# ---------------------------------------------------------------------------------- imports of libraries, torch.compile


@_patch("torch._dynamo.config.suppress_errors")
def uncompiled_where_it_fails() -> AbstractContextManager[object]:
    """Log what cannot be compiled, and call it as it is, until the end."""
    from torch._dynamo import config

    made: AbstractContextManager[object] = config.patch(suppress_errors=True)
    return made


@_patch("deepspeed.runtime.compiler.compile")
def deepspeed_decorates_nothing(decorator: Callable[..., Any]) -> AbstractContextManager[None]:
    """Import DeepSpeed's Muon optimizer, which no job has, without torch's compiler."""
    from deepspeed.runtime import compiler

    return _attribute(compiler, "compile", decorator)


@_patch("deepspeed.ops.__compatible_ops__[deepspeed_shm_comm]")
@contextmanager
def no_collective_to_compile() -> Iterator[None]:
    """Leave out DeepSpeed's shared-memory collective on CPUs, until the end: compiled at its first start, half a minute
    and a compiler, for inference only. Collectives of a training use gloo with or without it.
    """
    import deepspeed.ops

    compatible = deepspeed.ops.__compatible_ops__
    given = dict(compatible)
    compatible["deepspeed_shm_comm"] = False
    try:
        yield
    finally:
        compatible.clear()
        compatible.update(given)


@_patch("import of mlflow")
def without_mlflow() -> AbstractContextManager[None]:
    """Import DeepSpeed without mlflow, which its autotuner imports wherever it is. Tracking imports it by itself."""
    return _not_importable("mlflow")


@_patch("import of bitsandbytes")
def without_bitsandbytes() -> AbstractContextManager[None]:
    """Keep it out of jobs without QLoRA, until the end: transformers and peft load it wherever it is, for 0.7 s."""
    return _not_importable("bitsandbytes")


@_patch("import of torchao")
def without_torchao() -> AbstractContextManager[None]:
    """Keep it out of jobs in other precisions than fp8, until the end: as bitsandbytes, for 2 s."""
    return _not_importable("torchao")


@_patch("import of openvino_telemetry")
def without_telemetry() -> AbstractContextManager[None]:
    """Block OpenVINO's telemetry, until the end."""
    return _not_importable("openvino_telemetry")


def importable_again(name: str) -> None:
    """Let a library be imported before the end, after all."""
    if name in sys.modules and sys.modules[name] is None:
        del sys.modules[name]


# ------------------------------------------------------------------------------------------------------- how it is done


@contextmanager
def _registered(table: Any, **functions: object) -> Iterator[None]:
    """Register `functions` in a table of transformers, which has no call to remove them."""
    given = {name: table._global_mapping[name] for name in functions if name in table._global_mapping}
    for name, function in functions.items():
        table.register(name, function)
    try:
        yield
    finally:
        for name in functions:
            if name in given:
                table.register(name, given[name])
            else:
                del table._global_mapping[name]


@contextmanager
def _attribute(owner: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a module or class, or hide one that a class inherits."""
    own, given = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, given)
        else:
            delattr(owner, name)


@contextmanager
def _not_importable(name: str) -> Iterator[None]:
    """Have imports of `name` fail, unless it is imported or blocked already."""
    known = name in sys.modules
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # Python's marker for "not to be imported"
    try:
        yield
    finally:
        if not known:
            importable_again(name)
