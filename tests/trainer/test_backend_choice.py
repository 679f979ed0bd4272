"""The choice among backends: measurements, the chosen backend, and the reasons of refusals."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch

from finetune_contract.choices import GPU_BACKENDS, BackendName
from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.predict.backends import choosing
from finetune_trainer.predict.backends.answer_agreement import agreement, worst_metric
from finetune_trainer.predict.backends.backend_protocol import Backend, Batch, ForwardPass, Machine, NotAvailable
from finetune_trainer.predict.backends.backends import FAMILIES, backend_by_name
from finetune_trainer.predict.backends.choosing import BackendRequest, Chosen, Sample, by_name, choose
from finetune_trainer.predict.backends.torch_backends import BF16, COMPILE, PLAIN, copied_in

ROWS = 100
PLAIN_SECONDS = 10.0
MODEL: Any = None
MACHINE = Machine()


@dataclass
class FakeBackend:
    """A backend that takes `seconds` for the sample, and gets `wrong` of its labels wrong."""

    name: str
    seconds: float
    lossy: bool = False
    wrong: int = 0
    f1: float = 0.9
    """F1 score of the backend; the plain model has 0.9."""
    setup: float = 0.0
    loading: float = 0.0
    """Seconds of each further set-up, with the converted model in place."""
    why_not: str | None = None
    fails: str | None = None
    disturbed: float = 0.0
    """Seconds that other load adds to its first answer."""
    raises: Exception | None = None
    """Error of its answers."""
    too_large: bool = False
    """True if a copy of the model does not fit the GPU."""
    prepared: int = field(default=0, init=False)
    clock: list[float] = field(default_factory=list, init=False)

    def unavailable(self, model: Any, machine: Machine) -> str | None:
        return self.why_not

    def prepare(self, model: Any, sample: Sequence[Batch], folder: Path) -> ForwardPass:
        self.prepared += 1
        self.clock[0] += self.setup if self.prepared == 1 else self.loading
        if self.fails is not None:
            raise NotAvailable(self.fails)
        if self.too_large:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return cast(ForwardPass, FakePass(self))


@dataclass
class FakePass:
    backend: FakeBackend

    def __call__(self, **inputs: torch.Tensor) -> Any:
        return None


@dataclass
class FakeGpu:
    """Meter of a GPU, on which work takes its time only once the host waits for it."""

    clock: list[float]
    gpu: str = "NVIDIA L4"
    queued: float = 0.0
    released: int = 0
    """Times that memory was given back."""

    def wait(self) -> None:
        self.clock[0] += self.queued
        self.queued = 0.0

    def begin(self) -> None:
        """Begin to measure."""

    def taken(self) -> int:
        return 7

    def release(self) -> None:
        self.released += 1


class Bench:
    """Backends, rows and a clock that the backends move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *backends: FakeBackend) -> None:
        self.clock = [0.0]
        self.answered = 0
        """Times that the sample was answered."""
        self.cold = 0
        """Initial answers that take twice as long."""
        self.gpu: FakeGpu | None = None
        """Device of the model; None: a CPU."""
        for backend in backends:
            backend.clock = self.clock
        known: dict[str, Backend] = {backend.name: backend for backend in backends} | {"none": PLAIN}
        monkeypatch.setattr("finetune_trainer.predict.backends.choosing.time.perf_counter", lambda: self.clock[0])
        monkeypatch.setattr(
            choosing, "backends_of", lambda name, **_: list(backends) if name == "measured" else [known[name]]
        )
        monkeypatch.setattr(choosing, "backend_by_name", lambda name, *_: known[name])

    def sample(self) -> Sample:
        def answers(forward: ForwardPass | None) -> list[dict[str, Any]]:
            self.answered += 1
            if self.answered <= self.cold:
                self.clock[0] += PLAIN_SECONDS
            backend = forward.backend if isinstance(forward, FakePass) else None
            if backend is not None and backend.raises is not None:
                raise backend.raises
            self.spend(PLAIN_SECONDS if backend is None else backend.seconds + backend.disturbed)
            if backend is not None:
                backend.disturbed = 0.0
            wrong = 0 if backend is None else backend.wrong
            return [{"label": "b" if at < wrong else "a", "score": 0.5 + wrong / 1000} for at in range(ROWS)]

        def metrics(forward: ForwardPass | None) -> dict[str, float]:
            return {"accuracy": 0.5, "f1": forward.backend.f1 if isinstance(forward, FakePass) else 0.9}

        return Sample(ROWS, [{"input_ids": torch.ones(2, 3)}], answers, metrics)

    def choose(
        self,
        optimization: str = "measured",
        tolerance: float | None = None,
        metric_tolerance: float | None = None,
        remaining: int = 100_000,
        workers: int = 1,
    ) -> Chosen:
        request = BackendRequest(optimization, tolerance, metric_tolerance)
        return choose(request, MODEL, self.sample(), remaining, Path(), MACHINE, workers, self.gpu)

    def spend(self, seconds: float) -> None:
        """Do work of so many seconds."""
        if self.gpu is None:
            self.clock[0] += seconds
        else:
            self.gpu.queued += seconds


def test_set_up_of_further_workers_counts_against_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def bench() -> Bench:
        quick = FakeBackend("quick to load", 8.0, setup=1.0, loading=0.5)
        return Bench(monkeypatch, quick, FakeBackend("fast", 5.0, setup=1.0, loading=90.0))

    assert bench().choose(remaining=20 * ROWS).name == "fast"
    chosen = bench().choose(remaining=20 * ROWS, workers=4)
    assert chosen.name == "quick to load"
    assert whys(chosen)["fast"] == "slower than quick to load with 90 s of set-up in each worker"
    assert {row.name: row.worker_setup_seconds for row in chosen.table.backends}["fast"] == 90.0
    assert bench().choose(remaining=200 * ROWS, workers=4).name == "fast"


def whys(chosen: Chosen) -> dict[str, str]:
    return {row.name: row.why for row in chosen.table.backends}


def test_the_fastest_backend_with_equal_labels_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast, wrong = FakeBackend("slow", 4.0), FakeBackend("fast", 2.0), FakeBackend("wrong", 1.0, wrong=1)
    chosen = Bench(monkeypatch, slow, fast, wrong).choose()
    assert (chosen.name, cast(FakePass, chosen.forward).backend) == ("fast", fast)
    assert whys(chosen) == {
        "none": "the reference",
        "slow": "slower than fast",
        "fast": "5.00 times as fast as the plain model on 100 rows",
        "wrong": "99.00% of its labels are equal, less than 100.00%",
    }
    rows = {row.name: (row.rows_per_second, row.agreement, row.chosen) for row in chosen.table.backends}
    assert rows["fast"] == (50.0, 1.0, True)
    assert rows["wrong"] == (100.0, 0.99, False)


def test_other_load_while_a_backend_is_timed_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = FakeBackend("fast", 2.0, disturbed=50.0)
    assert Bench(monkeypatch, FakeBackend("slow", 4.0), fast).choose().name == "fast"


def test_plain_model_is_timed_after_the_backends_of_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds if no further round fits, too: a cold machine's time only decides which backends are measured."""
    bench = Bench(monkeypatch, FakeBackend("slow", PLAIN_SECONDS + 2))
    bench.cold = 2
    chosen = bench.choose(remaining=12 * ROWS)
    assert (chosen.name, bench.answered) == ("none", 4)
    assert chosen.table.backends[0].rows_per_second == ROWS / PLAIN_SECONDS


def test_without_a_gain_the_plain_model_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Bench(monkeypatch, FakeBackend("slow", PLAIN_SECONDS + 1)).choose()
    assert (chosen.name, chosen.forward) == ("none", None)
    assert chosen.table.reason == "no backend that is accurate enough was faster on 100 rows"


def test_backend_with_different_labels_needs_a_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    lossy = FakeBackend("lossy", 1.0, lossy=True, wrong=1)
    bench = Bench(monkeypatch, lossy)
    chosen = bench.choose()
    assert (chosen.name, lossy.prepared) == ("none", 0)
    assert "predict.tolerance is not set" in whys(chosen)["lossy"]
    assert bench.choose(tolerance=0.99).name == "lossy"
    assert bench.choose(tolerance=0.995).name == "none"


def test_metric_bound_allows_label_changes_and_refuses_a_worse_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    worse = FakeBackend("worse", 1.0, lossy=True, wrong=9, f1=0.88)
    better = FakeBackend("better", 2.0, lossy=True, wrong=9, f1=0.91)
    bench = Bench(monkeypatch, worse, better)
    chosen = bench.choose(metric_tolerance=0.01)
    assert (chosen.name, whys(chosen)["worse"]) == ("better", "f1 is 0.0200 worse, more than 0.0100")
    found = {row.name: (row.metric, row.metric_worse_by) for row in chosen.table.backends}
    assert found == {"none": ("accuracy", 0.0), "worse": ("f1", pytest.approx(0.02)), "better": ("accuracy", 0.0)}
    assert bench.choose(metric_tolerance=0.03).name == "worse"
    assert bench.choose(metric_tolerance=0.03, tolerance=0.95).name == "none"
    with pytest.raises(StageError, match=r"f1 is 0\.0200 worse") as refused:
        bench.choose("worse", metric_tolerance=0.0)
    assert refused.value.reason == "BackendNotRightEnough"


def test_metric_that_is_better_when_lower_or_no_number_counts_as_worse() -> None:
    plain = {"r2": 0.5, "mse": 1.0}
    assert worst_metric(plain, {"r2": 0.6, "mse": 1.25}) == ("mse", 0.25)
    assert worst_metric(plain, {"r2": float("nan"), "mse": 0.5}) == ("r2", float("inf"))
    assert worst_metric({}, {}) is None


def test_a_small_job_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend("fast", 0.1)
    chosen = Bench(monkeypatch, backend).choose(remaining=ROWS)
    assert (chosen.name, backend.prepared) == ("none", 0)
    assert chosen.table.reason == "the plain model ends within 10 s, too short to gain from measuring"


def test_measuring_ends_when_it_has_taken_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    costly, next_one = FakeBackend("costly", 9.0, setup=200.0), FakeBackend("next", 1.0)
    chosen = Bench(monkeypatch, costly, next_one).choose(remaining=10_000)
    assert (chosen.name, next_one.prepared) == ("costly", 0)
    assert whys(chosen)["next"].startswith("not measured: measuring has taken 209 s of the 1000 s")


def test_unavailable_backend_gives_its_reason_and_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    absent, broken = FakeBackend("absent", 1.0, why_not="no units"), FakeBackend("broken", 1.0, fails="no operator")
    chosen = Bench(monkeypatch, absent, broken, FakeBackend("good", 5.0)).choose()
    assert chosen.name == "good"
    assert whys(chosen) | {"good": ""} == {
        "none": "the reference",
        "absent": "not available: no units",
        "broken": "not available: no operator",
        "good": "",
    }


def on_gpu(monkeypatch: pytest.MonkeyPatch, *backends: FakeBackend) -> Bench:
    bench = Bench(monkeypatch, *backends)
    bench.gpu = FakeGpu(bench.clock)
    return bench


def test_time_on_a_gpu_ends_when_its_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = on_gpu(monkeypatch, FakeBackend("slow", 20.0), FakeBackend("fast", 5.0))
    chosen = bench.choose()
    assert chosen.name == "fast"
    found = {row.name: (row.rows_per_second, row.memory_bytes) for row in chosen.table.backends}
    assert found == {"none": (ROWS / PLAIN_SECONDS, None), "slow": (5.0, 7), "fast": (20.0, 7)}


def test_job_on_a_gpu_is_measured_from_five_minutes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute of torch.compile would be too much for a job of two."""
    rows = int(choosing.GPU_SMALL_SECONDS / PLAIN_SECONDS * ROWS)
    bench = on_gpu(monkeypatch, FakeBackend("fast", 5.0))
    assert bench.choose(remaining=rows - ROWS).name == "none"
    assert bench.choose(remaining=rows + ROWS).name == "fast"
    bench.gpu = None
    assert bench.choose(remaining=rows - ROWS).name == "fast"


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
ROW_TOO_LONG = StageError(FailureClass.OUT_OF_MEMORY, "RowTooLong", "A row does not fit.", "Shorten it.")
NO_KERNEL = RuntimeError("CUDA error: no kernel image is available\nFor debugging consider ...")
FAILING = {
    "copy does not fit": (FakeBackend("x", 1.0, too_large=True), "do not fit the GPU's memory"),
    "batch does not fit": (FakeBackend("x", 1.0, raises=OUT_OF_MEMORY), "do not fit the GPU's memory"),
    "row does not fit": (FakeBackend("x", 1.0, raises=ROW_TOO_LONG), "do not fit the GPU's memory"),
    "kernel fails": (FakeBackend("x", 1.0, raises=NO_KERNEL), "RuntimeError: CUDA error: no kernel image is available"),
}


@pytest.mark.parametrize("case", FAILING)
def test_failing_backend_is_refused_and_the_next_is_measured(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    backend, why = FAILING[case]
    bench = on_gpu(monkeypatch, backend, FakeBackend("good", 5.0))
    chosen = bench.choose()
    assert chosen.name == "good"
    assert whys(chosen)["x"].startswith("not available: ")
    assert why in whys(chosen)["x"]
    assert bench.gpu is not None
    assert bench.gpu.released == 2


def test_backend_without_room_in_a_further_round_keeps_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of all backends are on the GPU then; of the chosen backend alone there was room."""
    fast = FakeBackend("fast", 2.0)
    bench = on_gpu(monkeypatch, fast, FakeBackend("slow", 4.0))
    answers, rounds = bench.sample().answers, []

    def answered(forward: Any) -> Any:
        if isinstance(forward, FakePass) and forward.backend is fast:
            rounds.append(forward)
            fast.raises = OUT_OF_MEMORY if len(rounds) > 1 else None
        return answers(forward)

    sample = Sample(ROWS, [{"input_ids": torch.ones(2, 3)}], answered)
    chosen = choose(BackendRequest("measured", None), MODEL, sample, 100_000, Path(), MACHINE, 1, bench.gpu)
    assert (chosen.name, len(rounds)) == ("fast", 1 + choosing.ROUNDS)
    assert {row.name: row.rows_per_second for row in chosen.table.backends}["fast"] == ROWS / 2.0


def test_backend_by_name_that_does_not_fit_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = on_gpu(monkeypatch, FakeBackend("x", 1.0, lossy=True, too_large=True))
    for tolerance in (None, 0.9):
        with pytest.raises(StageError, match="do not fit the GPU's memory") as refused:
            bench.choose("x", tolerance=tolerance)
        assert refused.value.reason == "BackendNotAvailable"
    with pytest.raises(StageError, match="do not fit the GPU's memory"):
        by_name("x", MODEL, bench.sample(), Path(), MACHINE)


def test_backend_by_name_that_fails_ends_the_stage_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="no kernel image"):
        on_gpu(monkeypatch, FakeBackend("x", 1.0, raises=NO_KERNEL)).choose("x", tolerance=0.9)


def test_backend_with_wrong_labels_is_timed_once_and_its_copy_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = FakeBackend("wrong", 1.0, wrong=1)
    bench = on_gpu(monkeypatch, wrong, FakeBackend("good", 5.0))
    held: list[int] = []
    answers = bench.sample().answers
    sample = Sample(
        ROWS, [{"input_ids": torch.ones(2, 3)}], lambda forward: held.append(copies(wrong)) or answers(forward)
    )
    request = BackendRequest("measured", None)
    assert choose(request, MODEL, sample, 100_000, Path(), MACHINE, 1, bench.gpu).name == "good"
    assert held == [0, 0, 1, *[0] * (len(held) - 3)]


def copies(backend: FakeBackend) -> int:
    """Return the number of forward passes of a backend that are held."""
    gc.collect()
    return sum(isinstance(each, FakePass) and each.backend is backend for each in gc.get_objects())


@pytest.mark.parametrize(
    "backend", [FakeBackend("x", 1.0, why_not="no units"), FakeBackend("x", 1.0, fails="no units")]
)
def test_backend_requested_by_name_is_used_or_refused(monkeypatch: pytest.MonkeyPatch, backend: FakeBackend) -> None:
    bench = Bench(monkeypatch, backend)
    with pytest.raises(StageError, match="no units") as refused:
        bench.choose("x")
    assert refused.value.reason == "BackendNotAvailable"
    with pytest.raises(StageError, match="no units"):
        by_name("x", MODEL, bench.sample(), Path(), MACHINE)


def test_backend_requested_by_name_is_used_although_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, FakeBackend("x", PLAIN_SECONDS * 2, lossy=True, wrong=3))
    assert bench.choose("x", remaining=ROWS).name == "x"
    assert bench.answered == 0, "nothing depends on figures"
    assert bench.choose("x", tolerance=0.97).name == "x"
    with pytest.raises(StageError, match=r"97\.00%") as refused:
        bench.choose("x", tolerance=0.98)
    assert refused.value.reason == "BackendNotRightEnough"


def test_table_of_a_backend_by_name_reports_that_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend("x", 1.0, setup=3.0)
    table = Bench(monkeypatch, backend).choose("x").table
    assert (table.chosen, table.reason, backend.prepared) == ("x", "requested by name", 1)
    rows = {row.name: row for row in table.backends}
    assert (rows["x"].chosen, rows["x"].setup_seconds) == (True, 3.0)
    for row in rows.values():
        assert (row.rows_per_second, row.agreement, row.largest_difference) == (None, None, None)
        assert "not measured" in row.why


def test_of_several_ways_by_one_name_the_fastest_is_found_by_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = FakeBackend("slow", 4.0, lossy=True, wrong=9), FakeBackend("fast", 2.0, lossy=True, wrong=9)
    bench = Bench(monkeypatch)
    monkeypatch.setattr(choosing, "backends_of", lambda _name, **_: [slow, fast])
    slow.clock = fast.clock = bench.clock
    assert bench.choose("int8").name == "fast"


CPUINFO = """processor\t: 0
model name\t: Some CPU
flags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16 amx_tile

processor\t: 1
model name\t: Some CPU
flags\t\t: fpu avx2
"""


def test_a_machine_is_known_by_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    whole = Machine.here(lambda: CPUINFO)
    assert (whole.cpu, whole.avx2, whole.avx512, whole.vnni, whole.bf16, whole.amx) == ("Some CPU", *[True] * 5)
    assert not Machine.here(lambda: "").avx2
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    narrow = Machine.here(lambda: CPUINFO)
    assert (narrow.avx2, narrow.avx512, narrow.vnni, narrow.bf16, narrow.amx) == (True, *[False] * 4)


def test_units_and_compilers_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = torch.nn.Linear(1, 1)
    model.dtype, model.device = torch.float32, torch.device("cpu")
    assert BF16.unavailable(model, Machine()) == "the CPU has no bfloat16 units (AMX or AVX512-BF16)"
    assert BF16.unavailable(model, Machine(amx=True)) is None
    model.dtype = torch.bfloat16
    assert BF16.unavailable(model, Machine(amx=True)) == "the plan computes in bf16 already"
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "no C++ compiler" in str(COMPILE.unavailable(model, Machine()))


def test_copy_in_bf16_keeps_the_model_and_its_tied_weights() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("positions", torch.arange(5))
            self.register_buffer("scales", torch.ones(5))

    model = Tied().eval()
    copied: Any = copied_in(model, torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in copied.state_dict().items()} == {
        "embedding.weight": torch.bfloat16,
        "head.weight": torch.bfloat16,
        "positions": torch.int64,
        "scales": torch.bfloat16,
    }
    assert copied.head.weight is copied.embedding.weight
    assert torch.equal(copied.head.weight, model.head.weight.to(torch.bfloat16))
    assert (model.head.weight.dtype, copied.training) == (torch.float32, False)
    copied.positions.zero_()
    assert model.positions.tolist() == [0, 1, 2, 3, 4]


def test_units_and_compilers_of_a_gpu_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"))
    capability = SimpleNamespace(major=7, minor=5)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: capability)
    assert str(BF16.unavailable(model, Machine(amx=True))).startswith("the GPU has no bfloat16 units")
    capability.major = 8
    assert BF16.unavailable(model, Machine()) is None
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "no C compiler" in str(COMPILE.unavailable(model, Machine()))


@pytest.mark.parametrize("name", sorted(set(get_args(BackendName)) - {*GPU_BACKENDS, *FAMILIES}))
def test_backends_for_cpus_are_not_available_on_a_gpu(name: str) -> None:
    model: Any = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"))
    assert backend_by_name(name).unavailable(model, Machine()) == "it is for CPUs, and the model is on a GPU"


def test_numbers_without_labels_agree_when_they_are_close() -> None:
    plain = [{"value": 1.0}, {"value": -250.0}]
    assert agreement(plain, [{"value": 1.0 + 1e-5}, {"value": -250.001}]) == 1
    assert agreement(plain, [{"value": 9.0}, {"value": -250.0}]) == 0.5


def test_label_with_a_score_that_is_no_number_does_not_agree() -> None:
    plain = [{"label": "a", "score": 0.9, "scores": {"a": 0.9, "b": 0.1}}]
    assert agreement(plain, [{"label": "a", "score": float("nan"), "scores": {"a": 0.9, "b": 0.1}}]) == 0
    assert agreement(plain, [{"label": "a", "score": 0.7, "scores": {"a": 0.7, "b": 0.3}}]) == 1


def test_a_backend_that_another_image_has_chosen_is_refused_by_name() -> None:
    sample = Sample(0, [], lambda _: [])
    with pytest.raises(StageError, match="this image does not have it") as refused:
        by_name("of-a-later-image", MODEL, sample, Path(), MACHINE)
    assert refused.value.reason == "BackendNotAvailable"
