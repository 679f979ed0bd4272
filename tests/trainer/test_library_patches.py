"""Changes of libraries: all are in one module, none stays behind, and no two change the same thing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from finetune_contract.layout import JobPaths
from finetune_trainer.core import library_patches
from finetune_trainer.core.library_patches import Patch, patches_removed
from finetune_trainer.strategies.deepspeed_import import import_deepspeed
from process_support.libraries import libraries
from process_support.sliced import decoder
from trainer_support.tasks import task_job, trained, training_of, write_lines

import_deepspeed()  # before others import it, and with it torch's compiler
SOURCES = Path(str(library_patches.__file__)).parents[1]
PATCHES = {name: each for name, each in vars(library_patches).items() if isinstance(each, Patch)}
BLOCKED = {"without_bitsandbytes": "bitsandbytes", "without_mlflow": "mlflow", "without_torchao": "torchao"}
IN_FORCE_ALREADY = {"no_collective_to_compile"}
"""The import above puts it in force for this process."""
FUNCTIONS = {"attention_over_token_shards": 2, "sharded_cross_entropy": 0, "uncompiled_where_it_fails": 0}
"""Patch -> number of functions that it takes, if not one; blocked imports take none."""


def values_of(name: str) -> tuple[Any, ...]:
    """Return values for a patch."""
    if name == "conv1d_styles":
        return ({"conv1d_heads": object()},)
    return (lambda *_: None,) * (0 if name.startswith("without_") else FUNCTIONS.get(name, 1))


@pytest.mark.parametrize("name", sorted({*PATCHES} - IN_FORCE_ALREADY))
def test_a_patch_changes_libraries_and_its_removal_leaves_them_as_before(name: str, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    if name in BLOCKED:
        monkeypatch.delitem(sys.modules, BLOCKED[name], raising=False)
    patch, before = PATCHES[name], libraries()
    with patches_removed():
        patch.until_end(*(values := values_of(name)))
        assert libraries() != before
        patch.until_end(*values)
    assert libraries() == before
    with suppress(ZeroDivisionError), patches_removed():
        patch.until_end(*values)
        raise ZeroDivisionError
    assert libraries() == before
    with patch(*values):
        assert libraries() != before
    assert libraries() == before


def test_two_patches_of_one_thing_are_refused() -> None:
    before = libraries()
    with library_patches.rows_for_masks(print):
        with (
            pytest.raises(RuntimeError, match=r"masks_by_known_padding cannot change .*\[sdpa\]: rows_for_masks has"),
            library_patches.masks_by_known_padding(print),
        ):
            pass
        with pytest.raises(RuntimeError, match="rows_for_masks cannot change"):
            library_patches.rows_for_masks.until_end(len)
    assert libraries() == before


def test_the_last_patch_is_removed_first() -> None:
    order: list[str] = []

    def note(name: str) -> Callable[[], Iterator[None]]:
        def install() -> Iterator[None]:
            order.append(f"+{name}")
            yield
            order.append(f"-{name}")

        return install

    first, last = (Patch(name, (name,), contextmanager(note(name))) for name in ("first", "last"))
    with patches_removed():
        first.until_end()
        with patches_removed():
            last.until_end()
            first.until_end()  # is in force
        assert order == ["+first", "+last", "-last"]
        last.until_end()
    assert order == ["+first", "+last", "-last", "+last", "-last", "-first"]


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("packing", [False, True], ids=["padded rows", "packs"])
def test_a_training_leaves_libraries_as_they_were(packing: bool, tmp_path: Path, tiny_family, caplog) -> None:
    model = tiny_family(tmp_path / "model", "llama", max_position_embeddings=128)
    rows = [{"text": "the soup was lovely " * (1 + at % 4)} for at in range(16)]
    data = write_lines(tmp_path / "data" / "train.jsonl", rows)
    preparation = {"max_length": 32, "packing": packing}
    training = training_of(steps=2, batch=4, micro=2)
    job = task_job("text-generation", model, data, ["text"], training=training, preparation=preparation)
    before = libraries()
    caplog.set_level("INFO")
    for attempt in ("first", "second"):
        trained(job, JobPaths(tmp_path / attempt))
        assert libraries() == before
    assert ("attention of each row by itself" in caplog.text) == packing


def test_sequence_parallelism_leaves_libraries_as_they_were(tmp_path: Path) -> None:
    import torch

    from finetune_trainer.strategies.parallel.sequence import ShardedAttention

    before = libraries()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for _ in range(2):
            with patches_removed():
                attention, model = ShardedAttention(torch.distributed.group.WORLD), decoder("llama")
                attention.take_over(model)
                model(input_ids=torch.tensor([[3, 5, 8]]), position_ids=torch.arange(3)[None])
                assert attention.whole_tokens == 3
                assert libraries() != before
            assert libraries() == before
    finally:
        torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------ the page


def changes_of_libraries(source: str) -> list[str]:
    """Return the statements of a module that change something of a library that it imports."""
    tree = ast.parse(source)
    foreign = set(_foreign_names(tree))
    found = []
    for node in ast.walk(tree):
        changed: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            changed = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            changed = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            changed = [ast.Attribute(node.args[0], "changed")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            named = node.func.attr in ("register", "setdefault", "pop", "update")
            changed = [node.func] if named else []
        if any(_is_of_library(each, foreign) for each in changed):
            found.append(ast.unparse(node))
    return found


def _foreign_names(tree: ast.Module) -> Iterator[str]:
    """Return the names of a module that are bound to libraries, their modules, classes and functions."""
    ours = {"__future__", "finetune_contract", "finetune_trainer", *sys.stdlib_module_names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names: Mapping[str, str] = {each.asname or each.name.partition(".")[0]: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {each.asname or each.name: str(node.module) for each in node.names}
        else:
            continue
        yield from (name for name, module in names.items() if module.partition(".")[0] not in ours)


def _is_of_library(target: ast.expr, foreign: set[str]) -> bool:
    root = target
    while isinstance(root, ast.Attribute | ast.Subscript):
        if ast.unparse(root) == "sys.modules":
            return True
        root = root.value
    return isinstance(target, ast.Attribute | ast.Subscript) and isinstance(root, ast.Name) and root.id in foreign


@pytest.mark.parametrize(
    "change",
    [
        "from transformers import AttentionInterface\nAttentionInterface.register('sdpa', print)",
        "import torch\ntorch._dynamo.config.suppress_errors = True",
        "from transformers import PreTrainedModel\ndel PreTrainedModel.prepare_distribute_model",
        "import deepspeed.ops\ndeepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False",
        "from transformers import masking_utils\nsetattr(masking_utils, 'sdpa_mask', print)",
        "import sys\nsys.modules.setdefault('torchao', None)",
    ],
)
def test_changes_of_libraries_are_found(change: str) -> None:
    assert changes_of_libraries(change)


def test_no_other_module_changes_libraries() -> None:
    modules = [
        each for each in SOURCES.rglob("*.py") if each.name != "library_patches.py" and each.parent.name != "site"
    ]
    assert len(modules) > 100
    found = {each.relative_to(SOURCES): changes_of_libraries(each.read_text(encoding="utf-8")) for each in modules}
    assert {str(module): changes for module, changes in found.items() if changes} == {}
