"""Checkpoints in shards: each process writes its part, and any division of the model reads what it needs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import CheckpointSchedule, Strategy
from finetune_trainer.checkpoint import tensor_files
from finetune_trainer.checkpoint.checkpoints import Checkpoint, CheckpointStore
from finetune_trainer.checkpoint.sharded_hashing import ShardedHashing, divided
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import entries_of
from finetune_trainer.strategies.shard_files import INDEX, read_index, read_state, stage_state
from trainer_support.forking import fork_server
from trainer_support.tasks import largest_difference, write_decoder

# ------------------------------------------------------------------------------------------------------ any division


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GPT-2, whose embeddings are tied and whose attention has three matrices side by side in one."""
    return write_decoder(tmp_path_factory.mktemp("decoder") / "gpt2", "gpt2")


def go_on(bench, decoder: Path, out: Path, before: Path | None, *, gathered: bool = False) -> Path:
    """Continue from the checkpoint `before` as `bench` divides the model, and return the folder of the results."""
    out.mkdir()
    training = bench.job.training
    arguments = {
        "training": training.model_dump(mode="json", by_alias=True),
        "model": str(decoder),
        "before": None if before is None else str(before),
        "out": str(out),
        "gathered": gathered,
    }
    case = {
        "processes": training.world.size,
        "call": "process_support.spread_state:go_on",
        "arguments": arguments,
        "environment": {},
        "log": str(out / "log"),
    }
    codes, output = fork_server().run(case)
    assert codes == [0] * training.world.size, output
    return out


def whole(path: Path) -> dict[tuple[str, ...], Any]:
    import torch

    weights, optimizer = torch.load(path, weights_only=True)
    state = {(name, key): value for name, entries in optimizer.items() for key, value in entries.items()}
    return {**{(name,): value for name, value in weights.items()}, **state}


def assert_equal(mine: Path, theirs: Path) -> None:
    """Expect the same weights and optimizer state, to the last bit."""
    read, wrote = whole(mine), whole(theirs)
    assert read.keys() == wrote.keys()
    assert any(len(name) == 2 for name in read)
    assert [name for name, value in read.items() if not value.equal(wrote[name])] == []


def ways(bench) -> dict[str, Any]:
    return {
        "fsdp on 2": bench.spread("fsdp", 2),
        "fsdp on 4": bench.spread("fsdp", 4),
        "single": bench.spread("single", 1),
        "ddp on 2": bench.spread("ddp", 2),
        "fsdp on 3, which divides nothing evenly": bench.spread("fsdp", 3),
        "tensor on 2": bench.in_replicas(Strategy(name="ddp", tensor=2), 1, 4),
        "ZeRO-1 over split layers on 2 x 2": bench.in_replicas(Strategy(name="ddp", zero_stage=1, tensor=2), 2, 4),
        "fsdp over split layers on 2 x 2": bench.in_replicas(Strategy(name="fsdp", tensor=2), 2, 4),
        "fsdp on 2 x 2, hybrid": bench.spread("fsdp", 4, fsdp_sharding="hybrid"),
        "fsdp on 1": bench.spread("fsdp", 1),
    }


def test_a_checkpoint_is_read_bit_by_bit_however_the_model_is_divided(bench, decoder, tmp_path: Path):
    before: Path | None = None
    for number, (name, way) in enumerate(ways(bench).items()):
        out = go_on(way, decoder, tmp_path / str(number), None if before is None else before / "step-2")
        files = {path.name for path in (out / "step-2" / "state").iterdir()}
        assert files == {INDEX, *(f"shard-{rank:05}.safetensors" for rank in range(way.job.training.world.size))}, name
        if before is not None:
            assert_equal(out / "loaded.pt", before / "saved.pt")
            assert not whole(out / "saved.pt")["lm_head.weight",].equal(whole(out / "loaded.pt")["lm_head.weight",])
        before = out


@pytest.mark.parametrize("name", ["fsdp on 2", "single", "ddp on 2", "fsdp over split layers on 2 x 2"])
def test_the_gathered_checkpoint_of_an_earlier_release_is_read(name: str, bench, decoder, tmp_path: Path):
    before = go_on(bench.spread("fsdp", 2), decoder, tmp_path / "before", None, gathered=True)
    assert {path.name for path in (before / "step-2" / "state").iterdir()} == {"weights.pt", "optimizer.pt"}
    out = go_on(ways(bench)[name], decoder, tmp_path / "after", before / "step-2")
    assert_equal(out / "loaded.pt", before / "saved.pt")


def test_processes_share_the_writing_of_replicated_state(bench, decoder, tmp_path: Path):
    out = go_on(bench.spread("ddp", 2), decoder, tmp_path / "out", None)
    sizes = [path.stat().st_size for path in (out / "step-2" / "state").glob("shard-*")]
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize(("strategy", "asynchronous"), [("fsdp", False), ("ddp", True)])
def test_a_process_killed_while_it_writes_costs_that_checkpoint_only(
    strategy: str, asynchronous: bool, bench, tmp_path: Path
):
    saving = CheckpointSchedule(every_steps=2, keep=3, asynchronous=asynchronous)
    whole_run = bench.at(tmp_path / "whole").with_training(max_steps=6, checkpoints=saving).spread(strategy, 2)
    run = bench.at(tmp_path / "w").with_training(max_steps=6, checkpoints=saving).spread(strategy, 2)
    ended = whole_run.run(processes=2)
    assert ended.exit_code == 0, ended.output
    case = run.case(processes=2)
    arguments = {"arguments": case["arguments"], "rank": 1, "writes": 2}
    call = {"call": "process_support.spread_state:train_killed", "arguments": arguments}
    codes, output = fork_server().run({**case, **call})
    assert codes[1] == -9, output
    assert codes[0] not in (0, -9), output
    assert (run.paths.checkpoints / "latest").read_text(encoding="utf-8") == "step-2\n"
    # What a thread has left of the other one is deleted when the next one is begun.
    assert [path.name for path in run.paths.checkpoints.glob("step-?")] == ["step-2"]

    resumed = run.run(processes=2)
    assert resumed.exit_code == 0, resumed.output
    assert "(step 2)" in resumed.output
    assert ("beside the training" in resumed.output) == asynchronous
    assert largest_difference(run.weights(), whole_run.weights()) == 0
    assert sorted(path.name for path in run.paths.checkpoints.glob("step-*")) == ["step-2", "step-4", "step-6"]


# ------------------------------------------------------------------------------------------------------------- files


def state_of(**more: Any) -> dict[str, Any]:
    """Return tensors of all kinds that a state holds."""
    import torch

    generator = torch.Generator().manual_seed(3)
    return {
        "weights/a": torch.randn(7, 5, generator=generator),
        "weights/narrow": torch.randn(3, 4, generator=generator).to(torch.bfloat16),
        "weights/turned": torch.randn(6, 4, generator=generator).t(),
        "weights/empty": torch.zeros(0, 4),
        "weights/odd": torch.tensor([True, False, True]),
        "optimizer/step/a": torch.tensor(3.0),
        "optimizer/count/a": torch.tensor([1, 2], dtype=torch.int64),
        **more,
    }


def stored(folder: Path, tensors: dict[str, Any]) -> Checkpoint:
    """Write a checkpoint of one process, and check the hashes that it reports."""
    hashing = ShardedHashing(1)
    store = CheckpointStore(folder, keep=1, hashing=hashing)
    store.begin(1)
    state = store.partial(1) / "state"
    state.mkdir()
    entries = stage_state(tensors, {"groups": [], "numbers": {}}, copied=False).write(state)
    assert entries == entries_of(state)
    hashing.wrote([{f"state/{name}": entry for name, entry in entries.items()}])
    return store.commit(1, strategy="single", world_size=1, job={}, first_of_run=True)


def test_state_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import torch
    from safetensors.torch import load_file

    monkeypatch.setattr(tensor_files, "SAVED_PIECE_BYTES", 16)
    tensors = state_of()
    part = stored(tmp_path, tensors).part("state")
    index = read_index(part)
    read = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in tensors.items()}
    read_state(part, index, read)
    assert [name for name, value in tensors.items() if not value.equal(read[name])] == []
    alone = {name: torch.zeros_like(value) for name, value in tensors.items()}
    for name, value in alone.items():
        read_state(part, index, {name: value})
    assert [name for name, value in tensors.items() if not value.equal(alone[name])] == []
    theirs = load_file(part.folder / "shard-00000.safetensors")
    assert {name for name, value in tensors.items() if value.numel()} == set(theirs)
    assert all(theirs[name].equal(tensors[name]) for name in theirs)


def test_a_tensor_in_host_memory_is_never_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import torch

    pieces = []
    monkeypatch.setattr(tensor_files, "SAVED_PIECE_BYTES", 64)
    monkeypatch.setattr(
        tensor_files._HashedFile,
        "write",
        spying(tensor_files._HashedFile.write, lambda piece: pieces.append(len(piece))),
    )
    stored(tmp_path, {"weights/a": torch.randn(100)})
    header, *rest = pieces
    assert (max(rest), sum(rest)) == (64, 400)
    assert header % 8 == 0


def spying(method: Callable[..., Any], note: Callable[[Any], object]) -> Callable[..., Any]:
    def spied(self: Any, content: Any) -> Any:
        note(content)
        return method(self, content)

    return spied


def test_index_entry_that_is_no_tensor_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match="weights/text is not a tensor"):
        stage_state({"weights/text": "x"}, {}, copied=False)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="not JSON serializable"):
        stage_state(state_of(), {"groups": [object()]}, copied=False)


def changed_index(part: Any, change: Callable[[dict[str, Any]], None], of: str | None = "weights/a") -> None:
    """Change the index, or that tensor in it, and make the manifest match, as somebody without the key can."""
    path = part.folder / INDEX
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content if of is None else content["tensors"][of])
    path.write_text(json.dumps(content), encoding="utf-8")
    part.checkpoint.manifest.files["state/index.json"] = entries_of(part.folder)["index.json"]


def names_a_file_elsewhere(tensor: dict[str, Any]) -> None:
    tensor["parts"][0]["file"] = "../../outside.safetensors"


def names_a_file_of_no_manifest(tensor: dict[str, Any]) -> None:
    tensor["parts"][0]["file"] = "other.safetensors"


def lacks_a_part(tensor: dict[str, Any]) -> None:
    tensor["parts"] = []


def has_another_shape(tensor: dict[str, Any]) -> None:
    tensor["shape"] = [70, 5]


def has_a_part_that_is_not_in_its_file(tensor: dict[str, Any]) -> None:
    tensor["parts"][0]["name"] = "weights/other"


def has_an_unknown_type(tensor: dict[str, Any]) -> None:
    tensor["dtype"] = "F3"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (names_a_file_elsewhere, "cannot be read"),
        (names_a_file_of_no_manifest, "other.safetensors is not in its manifest"),
        (lacks_a_part, "lacks parts of weights/a"),
        (has_another_shape, "has weights/a in shape"),
        (has_a_part_that_is_not_in_its_file, "shard-00000.safetensors cannot be read"),
        (has_an_unknown_type, "cannot be read"),
    ],
)
def test_an_index_that_leads_elsewhere_or_lies_is_refused(
    change: Callable[[dict[str, Any]], None], named: str, tmp_path: Path
):
    import torch
    from safetensors.torch import save_file

    part = stored(tmp_path, state_of()).part("state")
    save_file({"weights/a": torch.ones(7, 5)}, tmp_path / "outside.safetensors")
    shutil.copy(tmp_path / "outside.safetensors", part.folder / "other.safetensors")
    changed_index(part, change)
    with pytest.raises(StageError, match=named) as error:
        read_state(part, read_index(part), {"weights/a": torch.zeros(7, 5)})
    assert error.value.failure_class is FailureClass.CHECKPOINT


def claims_a_terabyte(content: dict[str, Any]) -> None:
    content["tensors"]["optimizer/step/a"]["shape"] = [1 << 38]


def claims_many_small_tensors(content: dict[str, Any]) -> None:
    small = {**content["tensors"]["optimizer/step/a"], "shape": [1_000]}
    content["tensors"] |= {f"optimizer/{number}/a": small for number in range(1_000)}


def has_a_negative_size(content: dict[str, Any]) -> None:
    content["tensors"]["optimizer/step/a"]["shape"] = [-1, -1]


def has_too_many_dimensions(content: dict[str, Any]) -> None:
    content["tensors"]["optimizer/step/a"]["shape"] = [1] * 100_000


def lacks_the_settings(content: dict[str, Any]) -> None:
    content["rest"] = {}


def has_groups_of_other_weights(content: dict[str, Any]) -> None:
    content["rest"]["groups"] = [{"params": ["b"]}]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (claims_a_terabyte, r"lists tensors of 1,099,511,628,\d{3} bytes, and all files have 1,\d{3}\."),
        (claims_many_small_tensors, "lists tensors of 4,000,"),
        (has_a_negative_size, "cannot be read"),
        (has_too_many_dimensions, "cannot be read"),
        (lacks_the_settings, "has settings that the optimizer cannot load: KeyError: 'numbers'"),
        (has_groups_of_other_weights, "has settings that the optimizer cannot load: KeyError: 'a'"),
    ],
)
def test_forged_optimizer_state_is_refused_before_it_takes_memory(
    change: Callable[[dict[str, Any]], None], named: str, tmp_path: Path
):
    import torch

    from finetune_trainer.strategies.full_state import load_shards

    weight = torch.nn.Parameter(torch.randn(7, 5))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(7, 5)
    optimizer.step()
    tensors = {f"optimizer/{key}/a": value for key, value in optimizer.state[weight].items()}
    part = stored(tmp_path, {"weights/a": weight.detach(), **tensors}).part("state")
    changed_index(part, change, of=None)
    with pytest.raises(StageError, match=named) as error:
        load_shards(optimizer, {"a": weight.detach()}, {"a": weight}, part)
    assert error.value.failure_class is FailureClass.CHECKPOINT


def test_a_state_that_lacks_a_weight_is_refused(tmp_path: Path):
    import torch

    part = stored(tmp_path, state_of()).part("state")
    with pytest.raises(StageError, match=r"index\.json lacks weights/b"):
        read_state(part, read_index(part), {"weights/b": torch.zeros(2)})


# ------------------------------------------------------------------------------------------------------------ hashing


def test_a_process_hashes_its_own_files_and_a_fair_share_of_the_others(tmp_path: Path):
    sizes = {"own-0": 10, "own-1": 10, "large": 50, "b": 20, "c": 20, "d": 10}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    entries = entries_of(tmp_path)
    written = [{"own-0": entries["own-0"]}, {"own-1": entries["own-1"]}]
    shares = divided(tmp_path, dict.fromkeys(sizes), written)
    assert shares == [["own-0", "large"], ["own-1", "b", "c", "d"]]
    assert divided(tmp_path, entries, written) == shares


def test_hashes_taken_while_writing_are_compared_with_the_files(tmp_path: Path):
    hashing = ShardedHashing(1)
    (tmp_path / "a").write_bytes(b"a" * 9)
    (tmp_path / "b").write_bytes(b"b" * 9)
    mine = entries_of(tmp_path)
    hashing.wrote([{"a": mine["b"]}])  # what was written is not what is there
    entries = hashing.entries_of(tmp_path)
    assert entries == {"a": mine["b"], "b": mine["b"]}
    assert hashing.first_difference(tmp_path, entries) == (tmp_path / "a", "has changed since it was written")
    assert hashing.first_difference(tmp_path, mine) is None


def test_a_shard_that_is_lost_after_it_was_written_is_missed(tmp_path: Path):
    hashing = ShardedHashing(1)
    (tmp_path / "there").write_bytes(b"a")
    (tmp_path / "lost").write_bytes(b"b")
    mine = entries_of(tmp_path)
    hashing.wrote([mine])
    (tmp_path / "lost").unlink()
    entries = hashing.entries_of(tmp_path)
    assert entries == mine
    assert hashing.first_difference(tmp_path, entries) == (tmp_path / "lost", "is missing")
