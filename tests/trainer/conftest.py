"""A tiny model, tiny data, and stages run as real processes."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.choices import Stage
from finetune_contract.layout import ENV_PROGRESS, ENV_REPORT, JobPaths
from finetune_contract.report import Progress, TrainerReport
from finetune_contract.trainer_job import Strategy, TrainerJob
from finetune_trainer.core.library_patches import patches_removed
from suite_plugins.patience import patient
from trainer_support import compiled
from trainer_support.forking import fork_server
from trainer_support.tasks import largest_difference, losses, task_job, train_here, training_of

# Before anything compiles, and for the programs that tests start.
compiled.settle(os.environ)

WORDS = {
    "good": ["lovely", "bright", "solid", "sweet", "quick", "warm", "kind", "fresh"],
    "bad": ["broken", "dull", "sour", "slow", "cold", "rude", "stale", "weak"],
    "other": [
        "the",
        "a",
        "phone",
        "soup",
        "chair",
        "lamp",
        "was",
        "is",
        "very",
        "quite",
        "and",
        "it",
        "we",
        "bought",
        "table",
        "shirt",
    ],
}
TIMEOUT_SECONDS = 540
"""Limit of a stage, of which the first may compile DeepSpeed's host optimizer; see `trainer_support.compiled`."""


def write_rows(path: Path, count: int, seed: int) -> None:
    """Write sentences of different lengths whose words determine the label."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            label = draw.randrange(2)
            telltale = draw.choices(WORDS["good" if label else "bad"], k=draw.randint(1, 3))
            words = telltale + draw.choices(WORDS["other"], k=draw.randint(2, 24))
            draw.shuffle(words)
            file.write(json.dumps({"text": " ".join(words), "label": label}) + "\n")


def write_tiny_bert(folder: Path, *, words: Iterable[str] = (), labels: Sequence[str] = (), **config: Any) -> Path:
    """Write a random BERT (2 layers, 32 wide) with a word-level tokenizer, in Hub layout; with a head if there are
    `labels`. `words`: its vocabulary, that of `write_rows` if empty; `config`: further fields of BertConfig.
    """
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

    words = sorted(set(words)) or [word for each in WORDS.values() for word in each]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    torch.manual_seed(7)
    head = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    size = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    whole = BertConfig(vocab_size=len(vocabulary), **{**size, **(head if labels else {}), **config})
    (BertForSequenceClassification if labels else BertModel)(whole).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def dropout(share: float) -> dict[str, float]:
    """Return both of BERT's dropout fields."""
    return {"hidden_dropout_prob": share, "attention_probs_dropout_prob": share}


_FAMILIES: dict[str, dict[str, Any]] = {
    "bert": dropout(0.0),
    "roberta": {**dropout(0.0), "max_position_embeddings": 66, "pad_token_id": 0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0},
    "llama": {"num_key_value_heads": 2, "pad_token_id": 0},
    "qwen3": {"num_key_value_heads": 2, "pad_token_id": 0, "head_dim": 8},
}


def write_tiny_family(folder: Path, family: str, **config: Any) -> Path:
    """Write a random model (4 layers, 32 wide, 4 heads) of that model type without dropout, with the tokenizer of
    `write_tiny_bert`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    write_tiny_bert(folder)
    vocabulary = len((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    shape = {"vocab_size": vocabulary, "max_position_embeddings": 64, **shape, **_FAMILIES[family], **config}
    torch.manual_seed(7)
    whole = AutoConfig.for_model(family, num_labels=2, **shape)
    AutoModelForSequenceClassification.from_config(whole).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Ended:
    """Result of a stage that has ended."""

    exit_code: int
    output: str
    reports: Mapping[int, TrainerReport]
    """Reports by rank; ranks that were killed have none."""
    progress: tuple[Progress, ...]

    @property
    def first_failure(self) -> TrainerReport:
        """Report of the rank that failed first: the cause."""
        failed = [report for report in self.reports.values() if report.failure is not None]
        assert failed, self.output
        return min(failed, key=lambda report: report.failure.time if report.failure else 0.0)


@dataclass(frozen=True)
class Bench:
    """A workspace with prepared data for running jobs."""

    workspace: Path
    job: TrainerJob
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> JobPaths:
        return JobPaths.of(self.workspace, self.job.name)

    def losses(self) -> list[float]:
        """Return the training loss of each step."""
        return losses(self.paths)

    def weights(self) -> dict[str, Any]:
        """Return the weights in `model/`."""
        from safetensors.torch import load_file

        return load_file(self.paths.model / "model.safetensors")

    def command(
        self, stage: Stage, deepspeed: Mapping[str, Any] | None, program: Sequence[str] = ("finetune_trainer",)
    ) -> list[str]:
        """Return the arguments of one process; `program`: the module, and its arguments before those of the stage."""
        self.workspace.mkdir(parents=True, exist_ok=True)
        job = self.workspace / f"{self.job.name}.job.json"
        job.write_text(self.job.to_json(), encoding="utf-8")
        command = ["-m", *program, str(stage), "--job", str(job), "--workspace", str(self.workspace)]
        if deepspeed is not None:
            config = self.workspace / f"{self.job.name}.deepspeed.json"
            config.write_text(json.dumps(deepspeed), encoding="utf-8")
            command += ["--deepspeed", str(config)]
        return command

    def start(
        self,
        stage: Stage = Stage.TRAIN,
        *,
        processes: int = 1,
        launcher: Sequence[str] | None = None,
        program: Sequence[str] = ("finetune_trainer",),
        deepspeed: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        """Start a stage alone, by torchrun with several processes, or by `launcher`."""
        variables = self.fresh_environment()
        if launcher is None:
            launcher = [sys.executable]
            if processes > 1:
                launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = self.command(stage, deepspeed, program)
        settled = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))},
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **variables,
            **(environment or {}),
        }
        return subprocess.Popen(
            [*wrapper, *launcher, *command], env=settled, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def fresh_environment(self) -> dict[str, str]:
        """Return the environment with the places of reports, after deleting earlier reports."""
        for old in self.workspace.glob("report-*.json"):
            old.unlink()
        (self.workspace / "progress.jsonl").unlink(missing_ok=True)
        return {
            ENV_REPORT: str(self.workspace / "report-{rank}.json"),
            ENV_PROGRESS: str(self.workspace / "progress.jsonl"),
            **self.environment,
        }

    def case(
        self,
        stage: Stage = Stage.TRAIN,
        *,
        processes: int,
        deepspeed: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return a stage as a ForkServer's case."""
        return {
            "processes": processes,
            "arguments": self.command(stage, deepspeed)[2:],
            "environment": {**self.fresh_environment(), **(environment or {})},
            "log": str(self.workspace / "log"),
        }

    def end(self, process: subprocess.Popen[str]) -> Ended:
        """Wait for a started stage."""
        try:
            output, _ = process.communicate(timeout=patient(TIMEOUT_SECONDS))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            pytest.fail(f"the stage did not end in {patient(TIMEOUT_SECONDS):g} s:\n{output}")
        return self.ended(process.returncode, output)

    def ended(self, exit_code: int, output: str) -> Ended:
        """Return the result, with the reports that were written."""
        reports = [
            TrainerReport.model_validate_json(p.read_bytes())
            for p in self.workspace.glob("report-*.json")
            if p.stat().st_size
        ]
        progress_file = self.workspace / "progress.jsonl"
        lines = progress_file.read_text(encoding="utf-8").splitlines() if progress_file.exists() else []
        progress = tuple(Progress.model_validate_json(line) for line in lines)
        return Ended(exit_code, output, {report.rank: report for report in reports}, progress)

    def train_here(self) -> None:
        """Train in this process, with strategy single only."""
        train_here(self.job, self.paths)

    def run(
        self,
        stage: Stage = Stage.TRAIN,
        *,
        processes: int = 1,
        deepspeed: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> Ended:
        """Run a stage to its end, in forked processes unless a program wraps them."""
        how: dict[str, Any] = {"processes": processes, "deepspeed": deepspeed, "environment": environment}
        if wrapper:
            return self.end(self.start(stage, **how, wrapper=wrapper))
        codes, output = fork_server().run(self.case(stage, **how), TIMEOUT_SECONDS)
        return self.ended(max(codes, key=abs), output)

    def with_training(self, name: str | None = None, **changes: Any) -> Bench:
        """Return another job in the same workspace (with the same prepared data if the name stays); `changes` are
        training fields.
        """
        assert self.job.training is not None
        training = self.job.training.model_copy(update=changes)
        job = self.job.model_copy(update={"training": training, "name": name or self.job.name})
        return Bench(self.workspace, TrainerJob.model_validate(job.model_dump()), self.environment)

    def spread(
        self, strategy: str, processes: int, *, micro: int | None = None, name: str | None = None, **settings: Any
    ) -> Bench:
        """Return the same training on `processes` processes at the same global batch."""
        assert self.job.training is not None
        batch, world = self.job.training.batch, self.job.training.world
        micro = micro or batch.global_batch_size // processes
        # Processes of this machine, planned as on two nodes where the strategy distinguishes nodes.
        nodes = 2 if settings.get("fsdp_sharding") == "hybrid" else 1
        return self.with_training(
            name,
            strategy=Strategy(name=strategy, **settings),  # type: ignore[arg-type]
            world=world.model_copy(update={"nodes": nodes, "processes_per_node": processes // nodes}),
            batch=batch.model_copy(
                update={
                    "micro_batch_size": micro,
                    "gradient_accumulation": batch.global_batch_size // (micro * processes),
                    "data_parallel": processes,
                }
            ),
        )

    def in_replicas(self, strategy: Strategy, replicas: int, micro: int, **changes: Any) -> Bench:
        """Return the same training by `replicas` that read rows of their own, each of as many processes as `strategy`
        has, at the same global batch; `changes` are training fields.
        """
        training = self.job.training
        assert training is not None
        batch = {
            "micro_batch_size": micro,
            "gradient_accumulation": training.batch.global_batch_size // (micro * replicas),
            "data_parallel": replicas,
        }
        return self.with_training(
            **changes,
            strategy=strategy,
            world=training.world.model_copy(update={"processes_per_node": replicas * strategy.replica_ranks}),
            batch=training.batch.model_copy(update=batch),
        )

    def at(self, workspace: Path) -> Bench:
        """Return the same job in another workspace, which gets a copy of the prepared data."""
        other = Bench(workspace, self.job, self.environment)
        other.paths.root.mkdir(parents=True)
        shutil.copytree(self.paths.prepared, other.paths.prepared)
        return other

    def deepspeed_config(self, stage: int | None = None, **zero: Any) -> dict[str, Any]:
        """Return a resolved DeepSpeed configuration for this training; `stage` only to contradict the job."""
        training = self.job.training
        assert training is not None
        zero = {"stage": training.strategy.zero_stage if stage is None else stage, **zero}
        for section, device in {
            "offload_optimizer": training.strategy.offload_optimizer,
            "offload_param": training.strategy.offload_parameters,
        }.items():
            if device != "none":
                zero[section] = {"device": device, "pin_memory": False}
            if device == "nvme":
                # DeepSpeed writes files only from a mebibyte on, which no weight of the tiny model has.
                zero[section] |= {"buffer_size": 1 << 20, "max_in_cpu": 0} if section == "offload_param" else {}
        return {
            "train_batch_size": training.batch.global_batch_size,
            "train_micro_batch_size_per_gpu": training.batch.micro_batch_size,
            "gradient_accumulation_steps": training.batch.gradient_accumulation,
            "gradient_clipping": training.max_grad_norm,
            "zero_optimization": zero,
            "bf16": {"enabled": training.precision == "bf16"},
        }


def make_job(model: Path, data: Path, **training: Any) -> TrainerJob:
    """Return a text-classification job on one process; `training` as in `training_of`."""
    usual = {"steps": 20, "micro": 16, "threads": 1, "learning_rate": 2e-3, "warmup_steps": 4, "weight_decay": 0.01}
    return task_job(
        "text-classification",
        model,
        data,
        ["text", "label"],
        training=training_of(**{**usual, "steps_per_epoch": 12, **training}),
        name="tiny",
        preparation={"max_length": 32},
        evaluation={"device": "cpu", "batch_tokens": 1024},
        predict=None,
        seed=42,  # new adapters are drawn with it
    )


@pytest.fixture(autouse=True)
def libraries_as_found() -> Iterator[None]:
    """Remove the changes of libraries that a test has not removed itself."""
    with patches_removed():
        yield


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    """Return the paths of a job that a test runs in its own process."""
    return JobPaths(tmp_path / "job")


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train, validation and test."""
    folder = tmp_path_factory.mktemp("data")
    for seed, (split, count) in enumerate({"train": 200, "validation": 40, "test": 40}.items()):
        write_rows(folder / f"{split}.jsonl", count, seed)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny BERT without dropout, so that runs can be compared."""
    return write_tiny_bert(tmp_path_factory.mktemp("model") / "tiny-bert", **dropout(0.0))


@pytest.fixture(scope="session")
def tiny_model_with_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny BERT with dropout, so that a lost random state shows."""
    return write_tiny_bert(tmp_path_factory.mktemp("model") / "tiny-bert-dropout", **dropout(0.1))


@pytest.fixture(scope="session")
def tiny_bert() -> Callable[..., Path]:
    """Return the function, as tests cannot import this file."""
    return write_tiny_bert


@pytest.fixture(scope="session")
def tiny_family() -> Callable[..., Path]:
    """Return the function, as tests cannot import this file."""
    return write_tiny_family


@pytest.fixture(scope="session")
def bench_of() -> Callable[[Path, Path, Path], Bench]:
    """Return a function: workspace, model and data -> the tiny job on them, prepared."""
    return lambda workspace, model, data: prepared_bench(workspace, make_job(model, data))


@pytest.fixture(scope="session")
def family_bench(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_family: Callable[..., Path],
    bench_of: Callable[[Path, Path, Path], Bench],
    tiny_data: Path,
) -> Callable[..., Bench]:
    """Return a function: family, config and data -> a bench with its tiny model, prepared once."""
    made: dict[Any, Bench] = {}

    def of(family: str, config: tuple[tuple[str, Any], ...] = (), data: Path = tiny_data) -> Bench:
        if (family, config, data) not in made:
            folder = tmp_path_factory.mktemp(family)
            model = tiny_family(folder / "model", family, **dict(config))
            made[family, config, data] = bench_of(folder / "bench", model, data)
        return made[family, config, data]

    return of


@pytest.fixture(scope="session")
def prepared() -> Callable[[Path, TrainerJob], Bench]:
    """Return the function, as tests cannot import this file."""
    return prepared_bench


def prepared_bench(workspace: Path, job: TrainerJob) -> Bench:
    """Return a bench after preparing its data (in this process: start-up is the expensive part)."""
    from finetune_trainer.core.progress import NoProgress
    from finetune_trainer.prepare.prepare import prepare

    bench = Bench(workspace, job)
    bench.paths.root.mkdir(parents=True)
    prepare(job, bench.paths, NoProgress())
    return bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path) -> Bench:
    """The tiny job, prepared. Tests work on copies (`bench.at(tmp_path / "w")`)."""
    return prepared_bench(tmp_path_factory.mktemp("bench"), make_job(tiny_model, tiny_data))


@pytest.fixture(scope="session")
def wide_bench(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Bench:
    """Four steps of a model of one layer whose weights of 4 MiB are large enough for files of their own, prepared."""
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 1}
    model = write_tiny_bert(tmp_path_factory.mktemp("model") / "wide-bert", **size, **dropout(0.0))
    job = make_job(model, tiny_data, steps=4, learning_rate=1e-4, warmup_steps=0)
    return prepared_bench(tmp_path_factory.mktemp("wide-bench"), job)


@pytest.fixture(scope="session")
def dropout_bench(tmp_path_factory: pytest.TempPathFactory, tiny_model_with_dropout: Path, tiny_data: Path) -> Bench:
    """The tiny job on the model with dropout, prepared."""
    return prepared_bench(tmp_path_factory.mktemp("dropout-bench"), make_job(tiny_model_with_dropout, tiny_data))


@dataclass(frozen=True)
class Spread:
    """One way to spread the tiny job."""

    strategy: str
    processes: int = 2
    micro: int | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    zero: tuple[tuple[str, Any], ...] = ()
    """Further keys of the DeepSpeed configuration's section zero_optimization."""


@pytest.fixture(scope="session")
def whole_run(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Spread], tuple[Bench, Ended]]:
    """Return a function that runs the tiny job from the first step to the last, once for each way to spread it;
    pytest's workers share the runs, as several files read them. Tests work on copies.
    """
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "whole-runs"

    def run(spread: Spread) -> tuple[Bench, Ended]:
        folder = shared / sha256(repr(spread).encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        end = folder / "end.json"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not end.exists():
                shutil.rmtree(folder / "w", ignore_errors=True)
                copy = bench.at(folder / "w")
                job = copy.spread(spread.strategy, spread.processes, micro=spread.micro, **dict(spread.settings))
                config = job.deepspeed_config(**dict(spread.zero)) if spread.strategy == "deepspeed" else None
                ended = job.run(processes=spread.processes, deepspeed=config)
                end.write_text(json.dumps([job.job.to_json(), ended.exit_code, ended.output]), encoding="utf-8")
        job_json, exit_code, output = json.loads(end.read_text(encoding="utf-8"))
        job = Bench(folder / "w", TrainerJob.model_validate_json(job_json))
        return job, job.ended(exit_code, output)

    return run


@pytest.fixture(scope="session")
def spread_of() -> type[Spread]:
    """Return the class, as tests cannot import this file."""
    return Spread


@pytest.fixture
def compared(record_property: Callable[[str, object], None]) -> Callable[[Bench, Bench], tuple[float, float]]:
    """Return a function: a run and the one in a single process -> the largest relative difference of their losses, and
    the largest of their weights. Both go into the JUnit report, with the case's name, for tables of a suite's run.
    """

    def compare(run: Bench, alone: Bench) -> tuple[float, float]:
        losses = max(abs(mine / theirs - 1) for mine, theirs in zip(run.losses(), alone.losses(), strict=True))
        weights = largest_difference(run.weights(), alone.weights())
        record_property("largest relative difference of losses", f"{losses:.1e}")
        record_property("largest difference of weights", f"{weights:.1e}")
        return losses, weights

    return compare


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A volume of 4 MiB."""
    folder = tmp_path / "volume"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small volume needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a failed test's frame may hold a file open
