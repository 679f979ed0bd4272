"""Groups of weights that FSDP gathers together: each transformer block, and an embedding and a head of their own.

The rest of the model is the root's group, which is gathered from a step's first forward pass to the end of its backward
pass. Embeddings and head are its largest part, 1 GiB each in bf16 for Llama 3.1 8B. A weight that both share stays in
the root: a group of both would be gathered as long, from the first layer of the forward pass to the last one of the
backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_DECODERS = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of transformers' decoders with a head."""


@dataclass(frozen=True)
class Group:
    """Module whose weights are gathered and released together."""

    module: torch.nn.Module
    releases: bool
    """True if its weights are released after the forward pass, and gathered again for the backward pass."""
    gathers_for_backward: bool = True
    """False if no gradient is computed from the values of its weights."""


def groups_of(model: PreTrainedModel, *, releases: bool) -> list[Group]:
    """Return the groups of `model` beside the root's, before or after `fully_shard`. `releases`: that of the blocks.

    The backward pass of a head begins where its forward pass ends, so that its weights stay gathered between both.
    """
    blocks = [Group(block, releases) for block in transformer_blocks(model)]
    return [*blocks, *_ends(model, releases)]


def _ends(model: PreTrainedModel, releases: bool) -> Iterator[Group]:
    """Yield the groups of embedding and head, if no other module reads their weights.

    A head of masked-language models may read the weights of the embeddings directly, and code that comes with a model
    may do so, too: their embeddings stay in the root.
    """
    import torch

    given: Any = model
    embedding, head = given.get_input_embeddings(), given.get_output_embeddings()
    classes = [cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models.")]
    decoder = any(cls.__name__.endswith(_DECODERS) for cls in classes)
    if not classes or (head is not None and not decoder):
        return
    uses = _uses_of_weights(model)
    inside = {id(module) for block in transformer_blocks(model) for module in block.modules()}
    for module in (embedding, head):
        outside = isinstance(module, torch.nn.Module) and id(module) not in inside
        if outside and _uses_of_weights(module) and _uses_of_weights(module).items() <= uses.items():
            if module is embedding:
                plain = isinstance(module, torch.nn.Embedding) and len(list(module.parameters())) == 1
                yield Group(module, releases, gathers_for_backward=not plain)
            else:
                yield Group(module, releases=False)


def transformer_blocks(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the model's repeated blocks: by its `_no_split_modules`, else the members of its longest module list."""
    import torch

    names = set(getattr(model, "_no_split_modules", None) or ())
    # By all of its classes: fully_shard gives a module a subclass with another name.
    blocks = [module for module in model.modules() if names & {cls.__name__ for cls in type(module).__mro__}]
    if blocks:
        # Some models list embeddings there too. A group of their own does no harm, unless the head shares their
        # weights, which have to be in one group.
        uses = _uses_of_weights(model)
        return [block for block in blocks if _uses_of_weights(block).items() <= uses.items()]
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max((list(module_list) for module_list in lists), key=len, default=[])


def _uses_of_weights(module: torch.nn.Module) -> Mapping[int, int]:
    """Return the number of names under which a module has each of its weights, by id."""
    return Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))
