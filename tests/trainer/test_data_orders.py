"""Orders to other processes: they arrive unchanged, and nothing else is accepted as one."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.prepared import write_tables
from finetune_trainer.prepare import orders
from finetune_trainer.prepare.orders import PodOrder, RowFolder, pod_order, read_pod_order, read_shards
from finetune_trainer.prepare.shards import Recipe, Rows, Shard, ShardFacts, cut
from suite_plugins.fuzz import examples
from trainer_support.tasks import training_of

ROWS = 12


def rows_in(folder: Path, count: int = ROWS) -> datasets.Dataset:
    write_tables(folder / "raw.arrow", [pa.table({"text": [f"row {at}" for at in range(count)]})])
    return datasets.Dataset.from_file(str(folder / "raw.arrow"))


def a_recipe(**changes: Any) -> Recipe:
    job = {
        "name": "job",
        "task": "text-classification",
        "model": {"uri": "hf://org/model", "revision": "a" * 40},
        "dataset": {"uri": "file:///rows.jsonl", "columns": {"text": "text", "label": "label"}},
        "training": training_of(steps=1, arguments={"adam_beta1": 0.1 + 0.2, "report_to": ["none"], "odd": None}),
        "preparation": {"engine": "job", "workers": 2},
        **changes,
    }
    return Recipe(TrainerJob.model_validate(job), max_length=128, stride=32, model_type="bert")


def same(one: Any, other: Any) -> bool:
    """Return whether both are equal, of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return all(map(same, one, other)) if one.dtype == object else one.tobytes() == other.tobytes()
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_MESSAGES = st.lists(st.fixed_dictionaries({"role": _TEXT, "content": _TEXT | st.none()}), max_size=2)
_TARGETS: dict[str, st.SearchStrategy[Any]] = {
    "classes": arrays.arrays(np.int64, ROWS),
    "numbers": arrays.arrays(np.float64, ROWS),
    "flags of several classes": arrays.arrays(np.int32, (ROWS, 3)),
    "whether rows are learnt": arrays.arrays(np.bool_, ROWS),
}
_OBJECTS: dict[str, st.SearchStrategy[Any]] = {
    "texts": _TEXT,
    "tags of words": st.integers(0, 4).flatmap(lambda count: arrays.arrays(np.int32, count)),
    "answers": st.tuples(st.lists(_TEXT, max_size=2), st.lists(st.integers(), max_size=2)),
    "pairs of texts": st.tuples(_TEXT, _TEXT),
    "pairs of conversations": st.tuples(_MESSAGES, _MESSAGES),
    "objects called like ours": st.dictionaries(
        st.sampled_from(["tuple", "dict", "array", "float"]), _TEXT | st.floats(allow_nan=False)
    ),
}


def objects(values: list[Any]) -> Any:
    found = np.empty(len(values), object)
    for at, each in enumerate(values):
        found[at] = each
    return found


_ANY_TARGETS = st.one_of(
    st.none(), *_TARGETS.values(),
    *(st.lists(each, min_size=ROWS, max_size=ROWS).map(objects) for each in _OBJECTS.values()),
)  # fmt: skip


@examples(60)
@given(targets=_ANY_TARGETS, chosen=st.sets(st.integers(0, ROWS - 1), min_size=1), shard_rows=st.integers(1, ROWS))
def test_shards_arrive_as_they_were_given(targets: Any, chosen: set[int], shard_rows: int, tmp_path_factory: Any):
    folder = tmp_path_factory.mktemp("rows")
    index = np.array(sorted(chosen), np.int64)
    rows = Rows(rows_in(folder), index, None if targets is None else targets[index])
    shards = dict(enumerate(cut("train", rows, {"text": "text"}, shard_rows=shard_rows, chunk_rows=5)))
    path = folder / "order-1.json"
    path.write_text(pod_order(a_recipe(), shards, RowFolder(folder)), encoding="utf-8")
    read = read_shards(path, read_pod_order(path), RowFolder(folder))
    assert list(read) == list(shards)
    for number, shard in shards.items():
        assert_same_shard(read[number], shard)


def assert_same_shard(one: Shard, other: Shard) -> None:
    for name in ("role", "number", "of", "first", "inputs", "chunk_rows"):
        assert same(getattr(one, name), getattr(other, name))
    assert same(one.rows.index, other.rows.index)
    assert same(one.rows.targets, other.rows.targets)
    last = len(other.rows.index)
    assert one.rows.table(0, last, ["text"]).to_pydict() == other.rows.table(0, last, ["text"]).to_pydict()


def test_rows_that_lie_elsewhere_are_copied_once(tmp_path: Path):
    whole = datasets.Dataset.from_dict({"text": [f"row {at}" for at in range(30)], "other": list(range(30))})
    kept = RowFolder(tmp_path)
    for raw in (whole.select([3, 1, 2]).select_columns(["text"]), whole.select(range(5, 25))):
        name = kept.name_of(raw)
        assert kept.name_of(raw) == name
        assert RowFolder(tmp_path).open(name, len(raw))["text"][:] == raw["text"][:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows-0.arrow", "rows-1.arrow"]


def test_a_recipe_arrives_as_it_was_given():
    recipes = [
        a_recipe(),
        a_recipe(training=None, model={"uri": "hf://org/model", "trust_remote_code": True}),
        a_recipe(task="preference-tuning", preference={"beta": 0.30000000000000004}),
    ]
    for recipe in recipes:
        assert orders.read_recipe_text(orders.recipe_text(recipe)) == recipe
        order = PodOrder.model_validate_json(pod_order(recipe, {}, RowFolder(Path("unused"))))
        assert (order.revision, order.max_length, order.stride) == (recipe.job.model.revision, 128, 32)


def test_results_arrive_as_they_were_given():
    facts = ShardFacts(rows=3, features=4, truncated=1)
    facts.lengths.update({5: 3, 2**40: 1})
    error = StageError(FailureClass.DATA, "BadRow", "Row 3 is bad.", "Correct it.")
    assert orders.read_result_text(orders.result_text(facts)) == facts
    restored = orders.read_result_text(orders.result_text(error))
    assert isinstance(restored, StageError)
    assert vars(restored) == vars(error)


class Marks:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def an_order(folder: Path) -> dict[str, Any]:
    rows = Rows(rows_in(folder), np.arange(ROWS), np.arange(ROWS))
    (shard,) = cut("train", rows, {"text": "text"})
    order: dict[str, Any] = json.loads(pod_order(a_recipe(), {0: shard}, RowFolder(folder)))
    return order


def numbers(*values: int) -> dict[str, Any]:
    return orders._stored_numbers(np.array(values)).model_dump()


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "a file outside of the folder": ({"file": "../secret.arrow"}, "not a path below the folder"),
    "a file that is not there": ({"file": "other.arrow"}, "is not a file"),
    "a result outside of the folder": ({"role": "../../model"}, "role"),
    "rows that are not there": ({"rows": 99}, "has 12 rows instead of 99"),
    "an index that leads outside": ({"index": numbers(5, 12)}, "does not ascend"),
    "an index that goes back": ({"index": numbers(5, 4)}, "does not ascend"),
    "other targets than rows": ({"targets": {"objects": [1]}}, "1 targets for 12 rows"),
    "targets of no known kind": ({"targets": {"objects": [{"call": "os.mkdir"}] * ROWS}}, "a target is"),
    "numbers of no known type": ({"targets": {"type": "object", "shape": [12], "content": ""}}, "targets"),
    "too few bytes": ({"targets": {"type": "int64", "shape": [12], "content": "AAAA"}}, "has 3 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_order_is_an_error_that_names_the_file(case: str, tmp_path: Path):
    changes, named = FORGED[case]
    order, path = an_order(tmp_path), tmp_path / "order-1.json"
    order["shards"]["0"] |= changes
    path.write_text(json.dumps(order), encoding="utf-8")
    with pytest.raises(StageError) as error:
        read_shards(path, read_pod_order(path), RowFolder(tmp_path))
    assert (error.value.failure_class, error.value.reason) == (FailureClass.STORAGE_LOST, "BrokenOrder")
    assert str(path) in error.value.message
    assert named in error.value.message


def test_a_pickle_in_place_of_an_order_does_not_run(tmp_path: Path):
    path, marker = tmp_path / "order-1.json", tmp_path / "it ran"
    path.write_bytes(pickle.dumps(Marks(marker)))
    with pytest.raises(StageError, match="was not written by a pod of this job"):
        read_pod_order(path)
    with pytest.raises(ValueError, match="JSON"):
        orders.read_shard_text(path.read_bytes(), RowFolder(tmp_path))
    with pytest.raises(ValueError, match="JSON"):
        orders.read_result_text(path.read_bytes())
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists()


def test_links_are_not_followed(tmp_path: Path):
    order = an_order(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "order-1.json"
    path.write_text(json.dumps(order), encoding="utf-8")
    (tmp_path / "raw.arrow").rename(tmp_path / "elsewhere" / "raw.arrow")
    (tmp_path / "raw.arrow").symlink_to(tmp_path / "elsewhere" / "raw.arrow")
    with pytest.raises(StageError, match="is not a file"):
        read_shards(path, read_pod_order(path), RowFolder(tmp_path))
    path.rename(tmp_path / "elsewhere" / "order-1.json")
    path.symlink_to(tmp_path / "elsewhere" / "order-1.json")
    with pytest.raises(StageError, match="is a symbolic link"):
        read_pod_order(path)
