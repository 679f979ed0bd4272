"""An attacker with write access to the job's volume changes its checkpoints: none of the attacker's code runs, and with
a signing key none of the attacker's data are read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_contract.layout import ENV_CHECKPOINT_SECRET, FailureClass
from finetune_contract.trainer_job import CheckpointSchedule, EarlyStopping
from finetune_trainer.checkpoint.checkpoints import MANIFEST, SIGNATURE, Checkpoint, CheckpointStore, Manifest, verify
from finetune_trainer.checkpoint.signing import Signer, signer_of
from finetune_trainer.core.distributed import ProcessWorld
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import FileEntry, entries_of, entry_of
from finetune_trainer.training.stopping import EarlyStopper

KEY = "0123456789abcdef0123456789abcdef"


def write(store: CheckpointStore, step: int) -> Path:
    store.begin(step)
    (store.partial(step) / "state").mkdir()
    (store.partial(step) / "state" / "weights.pt").write_bytes(b"w" * (1000 + step))
    return store.commit(step, strategy="ddp", world_size=1, job={"seed": 1}, first_of_run=False).folder


def forge_manifest(folder: Path, **changes: Any) -> None:
    """Write a manifest that matches the files, as only their hashes would need."""
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    files = entries_of(folder)
    kept = {name: entry for name, entry in files.items() if name not in (MANIFEST, SIGNATURE)}
    forged = manifest.model_copy(update={"files": kept, **changes})
    (folder / MANIFEST).write_text(forged.to_json(), encoding="utf-8")


class Marks:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


# ------------------------------------------------------------------------------------------------------------ folders


def adds_a_file(folder: Path) -> None:
    (folder / "state" / "mp_rank_01_model_states.pt").write_bytes(b"x")


def links_a_file_to_its_copy_elsewhere(folder: Path) -> None:
    victim, elsewhere = folder / "state" / "weights.pt", folder.parent / "elsewhere.pt"
    shutil.move(victim, elsewhere)
    victim.symlink_to(elsewhere)


def links_a_folder_to_its_copy_elsewhere(folder: Path) -> None:
    shutil.move(folder / "state", folder.parent / "elsewhere")
    (folder / "state").symlink_to(folder.parent / "elsewhere")


def links_the_checkpoint_to_its_copy_elsewhere(folder: Path) -> None:
    shutil.move(folder, folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def puts_a_pipe_in_place_of_a_file(folder: Path) -> None:
    (folder / "state" / "weights.pt").unlink()
    os.mkfifo(folder / "state" / "weights.pt")


def names_a_file_outside(folder: Path) -> None:
    (folder.parent / "outside.pt").write_bytes(b"x")
    text = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    text["files"]["../outside.pt"] = text["files"].pop("state/weights.pt")
    (folder / "state" / "weights.pt").unlink()
    (folder / MANIFEST).write_text(json.dumps(text), encoding="utf-8")


def is_an_older_checkpoint_under_a_newer_name(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "step-5", folder)


def assert_older_one_is_taken(
    store: CheckpointStore, change: Callable[[Path], None], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Write two checkpoints, change the newer one, and expect that it is skipped with a warning."""
    write(store, 5)
    change(write(store, 10))
    newest = store.newest()
    assert newest is not None
    assert newest.manifest.step == 5
    (record,) = caplog.records
    assert named in record.getMessage()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (adds_a_file, "mp_rank_01_model_states.pt is not in its manifest"),
        (links_a_file_to_its_copy_elsewhere, "weights.pt is a symbolic link"),
        (links_a_folder_to_its_copy_elsewhere, "state is not in its manifest"),
        (links_the_checkpoint_to_its_copy_elsewhere, "step-10 is a symbolic link"),
        (puts_a_pipe_in_place_of_a_file, "weights.pt is not a regular file"),
        (names_a_file_outside, "manifest.json cannot be read"),
        (is_an_older_checkpoint_under_a_newer_name, "manifest.json belongs to step 5"),
    ],
)
def test_a_checkpoint_that_leads_elsewhere_is_skipped(
    change: Callable[[Path], None], named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    assert_older_one_is_taken(CheckpointStore(tmp_path, keep=2), change, named, caplog)


def test_files_changed_before_signing_are_signed(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=2, signer=Signer(KEY.encode(), "mine"))
    store.begin(5)
    (store.partial(5) / "weights.pt").write_bytes(b"w" * 1000)
    (store.partial(5) / "weights.pt").write_bytes(b"x" * 1000)  # by somebody else
    store.commit(5, strategy="ddp", world_size=1, job={"seed": 1}, first_of_run=False)
    newest = store.newest()
    assert newest is not None
    assert (newest.folder / "weights.pt").read_bytes() == b"x" * 1000


def test_a_link_in_place_of_the_checkpoints_is_refused(tmp_path: Path):
    write(CheckpointStore(tmp_path / "elsewhere", keep=2), 5)
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StageError, match="is a symbolic link") as error:
        CheckpointStore(tmp_path / "checkpoints", keep=2).newest()
    assert (error.value.failure_class, error.value.reason) == (FailureClass.CHECKPOINT, "CheckpointsElsewhere")


@pytest.mark.parametrize("change", ["content", "link", "unlisted", "outside"])
def test_a_file_that_changes_after_the_checkpoint_verified_is_not_read(change: str, tmp_path: Path):
    part = verify(write(CheckpointStore(tmp_path, keep=2), 5)).part("state")
    path = part.folder / "weights.pt"
    assert part.checked(path).samefile(path)
    match change:
        case "content":
            path.write_bytes(b"x" * path.stat().st_size)
        case "link":
            shutil.move(path, tmp_path / "weights.pt")
            path.symlink_to(tmp_path / "weights.pt")
        case "unlisted":
            path = part.folder / "other.pt"
            path.write_bytes(b"x")
        case _:
            path = part.folder / ".." / ".." / "latest"
    with pytest.raises(StageError) as error:
        part.checked(path)
    assert (error.value.failure_class, error.value.reason) == (FailureClass.CHECKPOINT, "DamagedCheckpoint")


def test_replaced_best_weights_are_refused_as_the_result(tmp_path: Path):
    import torch
    from safetensors.torch import save_file

    def write_weights(placed: object, path: Path) -> FileEntry:
        save_file({"weight": torch.ones(2)}, path)
        return entry_of(path)

    strategy: Any = SimpleNamespace(write_weights=write_weights)
    placed: Any = None

    def stopper() -> EarlyStopper:
        return EarlyStopper(EarlyStopping(patience=1), tmp_path / "best", ProcessWorld(0, 1), strategy)

    first = stopper()
    first.should_stop(3, {"loss": 0.5}, placed)
    assert first.best_weights() == tmp_path / "best" / "step-3.safetensors"
    resumed = stopper()
    resumed.restore(json.loads(json.dumps(first.state())))
    assert resumed.best_weights() == first.best_weights()
    save_file({"weight": torch.zeros(2)}, tmp_path / "best" / "step-3.safetensors")
    with pytest.raises(StageError, match="has changed since it was written") as error:
        resumed.best_weights()
    assert error.value.reason == "BestWeightsChanged"


# --------------------------------------------------------------------------------------------------------- signatures


def test_a_signed_checkpoint_is_continued_from_with_its_key_alone(tmp_path: Path):
    signer = Signer(KEY.encode(), "mine")
    folder = write(CheckpointStore(tmp_path, 2, signer), 5)
    assert len((folder / SIGNATURE).read_text(encoding="utf-8").strip()) == 64
    assert verify(folder, signer).manifest.step == 5
    assert verify(folder).manifest.step == 5  # without a key no signature is required
    for other in (Signer(KEY[::-1].encode(), "mine"), Signer(KEY.encode(), "another job")):
        with pytest.raises(StageError, match="does not belong to the manifest and the job's signing key"):
            verify(folder, other)


def takes_the_signature_away(folder: Path) -> None:
    (folder / SIGNATURE).unlink()


def forges_file_and_manifest(folder: Path) -> None:
    (folder / "state" / "weights.pt").write_bytes(b"forged")
    forge_manifest(folder)


def takes_the_signature_of_another_checkpoint(folder: Path) -> None:
    shutil.copy(folder.parent / "step-5" / SIGNATURE, folder / SIGNATURE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (takes_the_signature_away, f"{SIGNATURE} is missing"),
        (forges_file_and_manifest, "does not belong to the manifest"),
        (takes_the_signature_of_another_checkpoint, "does not belong to the manifest"),
    ],
)
def test_with_a_key_a_checkpoint_that_it_did_not_sign_is_skipped(
    change: Callable[[Path], None], named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    store = CheckpointStore(tmp_path, 2, Signer(KEY.encode(), "mine"))
    assert_older_one_is_taken(store, change, named, caplog)


def test_unsigned_checkpoints_alone_are_refused_with_a_key(tmp_path: Path):
    write(CheckpointStore(tmp_path, 2), 5)
    with pytest.raises(StageError, match=r"signed with the key of checkpoints\.signingKey") as error:
        CheckpointStore(tmp_path, 2, Signer(KEY.encode(), "mine")).newest()
    assert error.value.reason == "NoWholeCheckpoint"


def test_the_key_comes_from_the_environment_and_is_not_shown():
    signed = CheckpointSchedule(every_steps=1, keep=1, signed=True)
    signer = signer_of("mine", signed, {ENV_CHECKPOINT_SECRET: f"{KEY}\n"})
    assert signer == Signer(KEY.encode(), "mine")
    assert KEY not in repr(signer)
    assert signer_of("mine", CheckpointSchedule(every_steps=1, keep=1), {ENV_CHECKPOINT_SECRET: KEY}) is None


@pytest.mark.parametrize(
    ("environment", "reason"), [({}, "SigningKeyMissing"), ({ENV_CHECKPOINT_SECRET: "short"}, "SigningKeyTooShort")]
)
def test_a_job_that_signs_does_not_train_without_a_good_key(environment: dict[str, str], reason: str):
    with pytest.raises(StageError) as error:
        signer_of("mine", CheckpointSchedule(every_steps=1, keep=1, signed=True), environment)
    assert (error.value.failure_class, error.value.reason) == (FailureClass.CONFIG, reason)


# ---------------------------------------------------------------------------------------------------------- resumption


def test_code_in_the_files_of_a_resumed_run_does_not_run(bench, tmp_path: Path):
    import torch

    schedule, marker = CheckpointSchedule(every_steps=1, keep=3), tmp_path / "it ran"
    run = bench.at(tmp_path / "w").with_training(max_steps=2, checkpoints=schedule)
    ended = run.run()
    assert ended.exit_code == 0, ended.output
    (run.paths.state / "train.json").unlink()
    shutil.rmtree(run.paths.checkpoints / "step-2")
    folder = run.paths.checkpoints / "step-1"
    pickled = sorted(path for path in folder.rglob("*.pt"))
    assert [path.name for path in pickled] == ["random-0.pt", "scheduler.pt"]
    for path in pickled:
        written = path.read_bytes()
        torch.save(Marks(marker), path, _use_new_zipfile_serialization=False)
        forge_manifest(folder)
        failure = run.run().first_failure.failure
        assert (failure.failure_class, failure.reason) == (FailureClass.CHECKPOINT, "CheckpointHoldsCode"), path
        path.write_bytes(written)
        assert not marker.exists()
    forge_manifest(folder)
    assert run.run().exit_code == 0


# ---------------------------------------------------------------------------------------------------------- DeepSpeed


def test_deepspeeds_own_classes_are_read_and_anything_else_is_not(tmp_path: Path):
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    from finetune_trainer.strategies.deepspeed import _read

    store, marker = CheckpointStore(tmp_path, keep=2), tmp_path / "it ran"
    scaler = DynamicLossScaler(2.0, 2.0, 1000, 1, 1, raise_error_at_min_scale=True, dtype=torch.float16)
    state = {
        "loss_scaler": LossScaler(4.0),
        "other_scaler": scaler,
        "zero_stage": ZeroStageEnum.gradients,
        "param_slice_mappings": [OrderedDict(weight=fragment_address(numel=3, start=1))],
        "flat": torch.nn.Parameter(torch.ones(3)),
        "shape": torch.Size([1, 2]),
        "ds_config": {"bf16": {"enabled": False}},
    }
    store.begin(5)
    for zipped in (False, True):
        torch.save(state, store.partial(5) / f"plain-{zipped}.pt", _use_new_zipfile_serialization=zipped)
        hostile = store.partial(5) / f"hostile-{zipped}.pt"
        torch.save({"a": Marks(marker)}, hostile, _use_new_zipfile_serialization=zipped)
    checkpoint: Checkpoint = store.commit(5, strategy="s", world_size=1, job={}, first_of_run=False)
    part = checkpoint.part(".")
    for zipped in (False, True):
        read = _read(part, checkpoint.folder / f"plain-{zipped}.pt", "cpu")
        assert (read["loss_scaler"].cur_scale, read["zero_stage"]) == (4.0, ZeroStageEnum.gradients)
        assert vars(read["other_scaler"]) == vars(scaler)
        assert read["param_slice_mappings"] == state["param_slice_mappings"]
        with pytest.raises(StageError) as error:
            _read(part, checkpoint.folder / f"hostile-{zipped}.pt", "cpu")
        assert error.value.reason == "CheckpointHoldsCode"
    assert not marker.exists()
    torch.load(checkpoint.folder / "hostile-False.pt", weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (0, "bf16"), (1, "bf16"), (3, "bf16")])
def test_a_deepspeed_checkpoint_of_every_stage_is_continued_from(stage: int, precision: str, bench, tmp_path: Path):
    schedule = CheckpointSchedule(every_steps=1, keep=3)
    run = bench.at(tmp_path / "w").spread("deepspeed", 1, zero_stage=stage)
    run = run.with_training(max_steps=2, checkpoints=schedule, precision=precision)
    ended = run.run(deepspeed=run.deepspeed_config())
    assert ended.exit_code == 0, ended.output
    shutil.rmtree(run.paths.checkpoints / "step-2")
    (run.paths.state / "train.json").unlink()
    ended = run.run(deepspeed=run.deepspeed_config())
    assert ended.exit_code == 0, ended.output
    assert f"Resuming from {run.paths.checkpoints / 'step-1'}" in ended.output


@pytest.fixture(scope="module")
def trained(bench, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a run of two processes with ZeRO-2 to step 4, with only the signed checkpoint of step 2 left."""
    run = bench.at(tmp_path_factory.mktemp("hostile") / "w").spread("deepspeed", 2, zero_stage=2)
    schedule = CheckpointSchedule(every_steps=2, keep=2, signed=True)
    run = run.with_training(max_steps=4, checkpoints=schedule)
    ended = run.run(processes=2, deepspeed=run.deepspeed_config(), environment={ENV_CHECKPOINT_SECRET: KEY})
    assert ended.exit_code == 0, ended.output
    shutil.rmtree(run.paths.checkpoints / "step-4")
    (run.paths.checkpoints / "latest").write_text("step-2\n", encoding="utf-8")
    (run.paths.state / "train.json").unlink()
    return run


def copy_of(run: Any, folder: Path, *, signed: bool) -> Any:
    """Return the same job with its checkpoint in another workspace, which requires a signature or does not."""
    other = run.at(folder / "w")
    shutil.copytree(run.paths.checkpoints, other.paths.checkpoints)
    return other.with_training(checkpoints=CheckpointSchedule(every_steps=2, keep=2, signed=signed))


def resumed(run: Any) -> Any:
    return run.run(processes=2, deepspeed=run.deepspeed_config(), environment={ENV_CHECKPOINT_SECRET: KEY})


def put_code_into_each_file(run: Any, marker: Path) -> None:
    """Replace every file that DeepSpeed unpickles, and make the manifest match."""
    import torch

    folder = run.paths.checkpoints / "step-2"
    files = [*folder.glob("state/global_step2/*_states.pt")]
    assert len(files) == 3
    for file in files:
        torch.save({"module": Marks(marker), "mp_world_size": 1}, file, _use_new_zipfile_serialization=False)
    forge_manifest(folder)


def test_code_in_a_deepspeed_checkpoint_does_not_run(trained, tmp_path: Path):
    run, marker = copy_of(trained, tmp_path, signed=False), tmp_path / "it ran"
    put_code_into_each_file(run, marker)
    ended = resumed(run)
    failure = ended.first_failure.failure
    assert (failure.failure_class, failure.reason) == (FailureClass.CHECKPOINT, "CheckpointHoldsCode")
    assert not marker.exists()


def test_with_a_key_a_forged_deepspeed_checkpoint_is_not_even_opened(trained, tmp_path: Path):
    run, marker = copy_of(trained, tmp_path, signed=True), tmp_path / "it ran"
    put_code_into_each_file(run, marker)
    ended = resumed(run)
    failure = ended.first_failure.failure
    assert (failure.failure_class, failure.reason) == (FailureClass.CHECKPOINT, "NoWholeCheckpoint")
    assert "does not belong to the manifest and the job's signing key" in ended.output
    assert not marker.exists()


def test_a_signed_deepspeed_checkpoint_is_continued_from(trained, tmp_path: Path):
    run = copy_of(trained, tmp_path, signed=True)
    ended = resumed(run)
    assert ended.exit_code == 0, ended.output
    assert "Resuming from" in ended.output
    assert KEY not in ended.output
    assert all(KEY not in path.read_text(errors="replace") for path in run.workspace.rglob("*") if path.is_file())


def test_universal_checkpoints_are_refused():
    from finetune_contract.trainer_job import Strategy
    from finetune_trainer.strategies.deepspeed import DeepSpeed

    settings = Strategy(name="deepspeed", zero_stage=2)
    with pytest.raises(StageError) as error:
        DeepSpeed(settings, "fp32", 2, {"checkpoint": {"load_universal": True}}, Path("unused"))
    assert (error.value.failure_class, error.value.reason) == (FailureClass.CONFIG, "UniversalCheckpoint")
