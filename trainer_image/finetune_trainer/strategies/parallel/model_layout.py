"""Parts of a model that a pipeline can separate: the modules before its layers, the layers, the modules after them.

Three layouts are known, those of BERT, GPT-2 and Llama, by the names of the parts in transformers; most families follow
one of them. A model with a weight outside these parts is refused, as several stages would need it. `balance`, a pure
function, decides by cost where to cut.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Form:
    """Names of the parts of a pre-trained body."""

    like: str
    """Best-known family with this form."""
    embedding: str
    """Module that turns token ids into hidden states; later stages receive those of the stage before instead."""
    layers: str
    added: tuple[str, ...] = ()
    """Modules whose output is added to the embedding; 0 in later stages."""
    passed: tuple[str, ...] = ()
    """Modules between embedding and layers that change hidden states; skipped in later stages."""
    norms: tuple[str, ...] = ()
    """Modules after the layers that change hidden states; skipped in earlier stages."""
    extras: tuple[str, ...] = ()
    """Modules after the layers with another output than hidden states; left out in earlier stages."""
    first_only: tuple[str, ...] = ()
    """Inputs that only the embedding reads, in a separate call."""


FORMS = (
    Form("BERT", "embeddings", "encoder.layer", extras=("pooler",)),
    Form("GPT-2", "wte", "h", added=("wpe",), passed=("drop",), norms=("ln_f",), first_only=("token_type_ids",)),
    Form("Llama", "embed_tokens", "layers", norms=("norm",)),
)


class ReceivedStates(nn.Module):
    """Replacement for the embedding: returns the hidden states sent by the stage before."""

    hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert self.hidden is not None
        return self.hidden


class ZeroOutput(nn.Module):
    """Replacement for a module whose output is added to the hidden states: returns 0."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(())


class PassThrough(nn.Module):
    """Replacement for a layer of another stage: returns its first argument."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden


@dataclass(frozen=True)
class Layout:
    """Names of a model's parts, in the order in which they compute."""

    form: Form
    body: str
    """Name of the pre-trained body."""
    count: int
    """Number of layers."""
    heads: tuple[str, ...]
    """Modules beside the body."""

    def named(self, part: str) -> str:
        """Return the name in the model of a part of the body."""
        return f"{self.body}.{part}"

    def layer(self, index: int) -> str:
        """Return the name of a layer."""
        return f"{self.named(self.form.layers)}.{index}"

    @property
    def before(self) -> tuple[str, ...]:
        """Modules before the layers."""
        return tuple(self.named(part) for part in (self.form.embedding, *self.form.added, *self.form.passed))

    @property
    def after(self) -> tuple[str, ...]:
        """Modules after the layers."""
        return (*(self.named(part) for part in (*self.form.norms, *self.form.extras)), *self.heads)

    def stage_of(self, name: str, cuts: Sequence[int]) -> int:
        """Return the index of the stage with the weight or buffer `name`; -1 if it is in none of the parts."""
        layers = f"{self.named(self.form.layers)}."
        if name.startswith(layers):
            index = int(name.removeprefix(layers).partition(".")[0])
            return next(stage for stage, end in enumerate(cuts[1:]) if index < end)
        if _is_inside(name, self.before):
            return 0
        return len(cuts) - 2 if _is_inside(name, self.after) else -1


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def layout_of(model: PreTrainedModel) -> Layout:
    """Return the layout of `model`; raise StageError CONFIG `NoPipelineLayout` for an unknown one."""
    body = model.base_model
    form = next((form for form in FORMS if _has(body, form)), None)
    families = f"those laid out as {', '.join(form.like for form in FORMS[:-1])} or {FORMS[-1].like}"
    if form is None or body is model:
        raise _cannot(model, f"its parts have other names than those of {families}")
    layers = body.get_submodule(form.layers)
    assert isinstance(layers, nn.ModuleList)
    prefix = model.base_model_prefix
    heads = tuple(name for name, _ in model.named_children() if name != prefix)
    layout = Layout(form, prefix, len(layers), heads)
    shared = [name for name, _ in model.named_parameters() if layout.stage_of(name, (0, layout.count)) < 0]
    if shared:
        raise _cannot(model, f"its weight {shared[0]} belongs to no part of a single stage; supported are {families}")
    return layout


def _cannot(model: PreTrainedModel, why: str) -> StageError:
    return StageError(
        FailureClass.CONFIG,
        "NoPipelineLayout",
        f"parallelism.pipeline.degree is above 1, and {type(model).__name__} cannot be cut into stages: {why}.",
        "Set parallelism.pipeline.degree to 1, and strategy fsdp or deepspeed to shard the model.",
    )


def _has(body: nn.Module, form: Form) -> bool:
    def found(part: str) -> Any:
        module: Any = body
        for name in part.split("."):
            module = getattr(module, name, None)
        return module

    wanted = (form.embedding, *form.added, *form.passed, *form.norms)
    return isinstance(found(form.layers), nn.ModuleList) and all(isinstance(found(part), nn.Module) for part in wanted)


# -------------------------------------------------------------------------------------------------------------- balance


def balance(layers: Sequence[float], stages: int, *, before: float = 0.0, after: float = 0.0) -> tuple[int, ...]:
    """Return the cuts that minimize the cost of the costliest stage, and of these the most even ones (by squares).

    `layers`: cost of each; `before` and `after`: further cost of the first and the last stage. Returns stages + 1
    indices, from 0 to the number of layers: stage i has the layers from cuts[i] to cuts[i + 1], at least one.
    ValueError if there are fewer layers than stages.
    """
    count = len(layers)
    if stages < 1 or count < stages:
        raise ValueError(f"{count} layers cannot be divided among {stages} stages")
    sums = [0.0]
    for cost in layers:
        sums.append(sums[-1] + cost)

    def cost_between(start: int, end: int, stage: int) -> float:
        cost = sums[end] - sums[start]
        return cost + (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)

    # best[end]: for the layers up to `end` in the stages so far: cost of the costliest stage, sum of squares, cuts.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(stages):
        next_best: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            options = (
                (max(most, stage_cost), squares + stage_cost * stage_cost, (*cuts, end))
                for start, (most, squares, cuts) in best.items()
                if start < end
                for stage_cost in [cost_between(start, end, stage)]
            )
            next_best[end] = min(options)
        best = next_best
    return best[count][2]


def cost_of(module: nn.Module | None) -> float:
    """Return multiplications per token: the elements of its matrices. An embedding is looked up, and costs nothing."""
    if module is None:
        return 0.0
    cost = 0 if isinstance(module, nn.Embedding) else sum(p.numel() for p in module.parameters(False) if p.ndim > 1)
    return float(cost) + sum(cost_of(child) for child in module.children())


def cuts_of(model: PreTrainedModel, layout: Layout, stages: int) -> tuple[int, ...]:
    """Return where to cut `model` into `stages`; StageError CONFIG `MoreStagesThanLayers` if it has too few layers."""
    if layout.count < stages:
        raise StageError(
            FailureClass.CONFIG,
            "MoreStagesThanLayers",
            f"The pipeline has {stages} stages, and {type(model).__name__} has {layout.count} layers.",
            "Lower parallelism.pipeline.degree; schedule interleaved has two stages a process.",
        )
    # A layer without matrices costs something too.
    layers = [1 + cost_of(model.get_submodule(layout.layer(index))) for index in range(layout.count)]
    # A head's work per row costs next to nothing beside the work per token.
    per_token = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return balance(layers, stages, after=cost_of(per_token) if isinstance(per_token, nn.Module) else 0.0)


# -------------------------------------------------------------------------------------------------------------- cutting


_SWITCHES = ("training", "gradient_checkpointing", "_gradient_checkpointing_func")


@dataclass(frozen=True)
class Shell:
    """One stage as a model of its own: the model's modules, with replacements for those of other stages."""

    model: PreTrainedModel
    received: ReceivedStates | None
    """None in the first stage."""
    body: nn.Module
    copies: tuple[tuple[nn.Module, nn.Module], ...]
    """Pairs of a module that is not shared with the whole model, and its original."""
    skips: frozenset[str] = frozenset()
    """Inputs that this stage does not take."""

    def follow(self) -> None:
        """Copy the switches of the whole model: its mode, and activation checkpointing."""
        for copied, original in self.copies:
            copied.__dict__.update({name: original.__dict__[name] for name in _SWITCHES if name in original.__dict__})


def shell_of(model: PreTrainedModel, layout: Layout, start: int, end: int) -> Shell:
    """Return the stage with the layers from `start` to `end`. It shares its modules with `model`; those that contain
    replaced ones are copied without their weights.
    """
    form, first, last = layout.form, start == 0, end == layout.count
    others: dict[str, nn.Module | None] = {
        layout.layer(index): PassThrough() for index in range(layout.count) if not start <= index < end
    }
    received = None if first else ReceivedStates()
    if received is not None:
        others[layout.named(form.embedding)] = received
        others |= {layout.named(part): ZeroOutput() for part in form.added}
        others |= {layout.named(part): PassThrough() for part in form.passed}
    if not last:
        others |= {layout.named(part): PassThrough() for part in form.norms}
        others |= {layout.named(part): None for part in form.extras}
        others |= dict.fromkeys(layout.heads)
    copies: list[tuple[nn.Module, nn.Module]] = []
    made = _with_others(model, others, copies)
    skips: frozenset[str] = frozenset() if first else frozenset(form.first_only)
    return Shell(made, received, made.get_submodule(layout.body), tuple(copies), skips)


def _with_others(model: Any, others: dict[str, nn.Module | None], copies: list[tuple[nn.Module, nn.Module]]) -> Any:
    """Return a copy of `model` with the modules `others` at their names."""
    shell = copy.copy(model)
    copies.append((shell, model))
    shell._modules = dict(model._modules)
    nested: dict[str, dict[str, nn.Module | None]] = {}
    for name, other in others.items():
        head, dot, rest = name.partition(".")
        if not dot:
            shell._modules[head] = other
        else:
            nested.setdefault(head, {})[rest] = other
    for head, inner in nested.items():
        shell._modules[head] = _with_others(model._modules[head], inner, copies)
    return shell


def keep_stages(model: PreTrainedModel, layout: Layout, cuts: Sequence[int], stages: Sequence[int]) -> None:
    """Remove everything from `model` that none of `stages` has. Names stay as they are."""
    kept = {index for stage in stages for index in range(cuts[stage], cuts[stage + 1])}
    unused = [layout.layer(index) for index in range(layout.count) if index not in kept]
    unused += [] if 0 in stages else list(layout.before)
    unused += [] if len(cuts) - 2 in stages else list(layout.after)
    for name in unused:
        owner, _, attribute = name.rpartition(".")
        parent = model.get_submodule(owner)
        if getattr(parent, attribute, None) is not None:
            parent._modules[attribute] = PassThrough()
