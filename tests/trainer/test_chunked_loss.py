"""A decoder's loss that is computed for some tokens at a time is the loss of all, and so are its gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.trainer_pt_utils import LabelSmoother

from finetune_contract import plans
from finetune_contract.choices import Stage
from finetune_contract.plans import CHUNKED_LOSS_FAMILIES
from finetune_contract.trainer_job import Strategy, Training
from finetune_trainer.tasks.preference_tuning import DirectPreference, chunked_likelihoods, likelihoods
from finetune_trainer.training.passes import chunked_loss
from finetune_trainer.training.passes.objective import ModelLoss, SmoothedLoss
from process_support.sliced import decoder
from trainer_support.forking import fork_server
from trainer_support.tasks import WORDS, task_job, training_of, write_decoder, write_lines

LOGITS = 41 * 5
"""Five tokens at a time of the small vocabulary."""


def training(**changes: Any) -> Training:
    body = training_of(steps=1, **changes)
    return Training.model_validate(
        task_job("text-generation", "file:///m", Path("/d"), ["text"], training=body).training
    )


@pytest.fixture
def few_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plans, "LOSS_LOGITS", LOGITS)
    return


def rows() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 41, (3, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = labels[2, 6:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def loss_and_gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    model.train()
    model.zero_grad()
    torch.manual_seed(7)  # for dropout
    loss = model(**batch).loss
    loss.backward()
    return float(loss), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("family", CHUNKED_LOSS_FAMILIES)
@pytest.mark.usefixtures("few_logits")
def test_loss_and_gradients_of_a_family_are_those_of_all_logits(family: str) -> None:
    model = decoder(family)
    expected, gradients = loss_and_gradients(model, rows())
    chunked = chunked_loss.chunk_loss(model, training())
    assert chunked is not None
    found, mine = loss_and_gradients(model, rows())
    assert chunked.chunks == 6  # 27 tokens, 5 at a time
    assert found == pytest.approx(expected, rel=1e-6)
    assert mine.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("chunked", [True, False], ids=["in chunks", "at once"])
@pytest.mark.usefixtures("few_logits")
def test_smoothed_loss_is_that_of_the_label_smoother(family: str, chunked: bool, monkeypatch) -> None:
    if not chunked:
        monkeypatch.setattr(plans, "LOSS_LOGITS", 1 << 26)
    model, batch = decoder(family).eval(), rows()
    model.zero_grad()
    answer = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    expected = LabelSmoother(epsilon=0.3)(answer, batch["labels"], shift_labels=True)
    expected.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

    whole = SmoothedLoss(model, 0.3, "next").loss(model, batch)
    assert float(whole) == pytest.approx(float(expected), rel=1e-6)
    computed = chunked_loss.chunk_loss(model, training(label_smoothing=0.3))
    assert computed is not None
    model.zero_grad()
    loss = ModelLoss().loss(model, batch)
    loss.backward()
    assert computed.chunks == (6 if chunked else 0)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("few_logits")
def test_smoothed_labels_are_those_of_a_slice_of_rows() -> None:
    model, batch = decoder("llama").eval(), rows()
    expected = SmoothedLoss(model, 0.3, "next").loss(model, batch)
    batch["shift_labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    batch["labels"] = batch["shift_labels"]
    assert float(SmoothedLoss(model, 0.3, "next").loss(model, batch)) == pytest.approx(float(expected), rel=1e-6)
    assert chunked_loss.chunk_loss(model, training(label_smoothing=0.3)) is not None
    assert float(ModelLoss().loss(model, batch)) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_smoothed_loss_has_that_of_a_mixtures_routers(family: str) -> None:
    model, batch = decoder(family, output_router_logits=True, router_aux_loss_coef=0.5).eval(), rows()
    whole = SmoothedLoss(model, 0.3, "next").loss(model, batch)
    assert chunked_loss.chunk_loss(model, training(label_smoothing=0.3)) is not None
    assert float(ModelLoss().loss(model, batch)) == pytest.approx(float(whole), rel=1e-6)


def test_validation_has_no_smoothed_labels() -> None:
    model, batch = decoder("llama").eval(), rows()
    expected = float(model(**batch).loss)
    assert chunked_loss.chunk_loss(model, training(label_smoothing=0.3)) is not None
    with torch.no_grad():
        assert float(model(**batch).loss) == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------------------------------------- preference tuning


def preferences() -> dict[str, torch.Tensor]:
    """Return two pairs: all chosen sequences, then all rejected ones."""
    batch = {name: torch.cat([value[:2], value[1:]]) for name, value in rows().items()}
    return batch | {
        "reference_chosen": torch.tensor([-20.0, -30.0]),
        "reference_rejected": torch.tensor([-25.0, -31.0]),
    }


@pytest.mark.parametrize("family", CHUNKED_LOSS_FAMILIES)
@pytest.mark.parametrize("chunks", [8, 0], ids=["in chunks", "at once"])
def test_preference_loss_and_gradients_are_those_of_all_logits(family: str, chunks: int, monkeypatch) -> None:
    monkeypatch.setattr(plans, "LOSS_LOGITS", LOGITS if chunks else 1 << 26)
    model, batch = decoder(family).eval(), preferences()
    objective = DirectPreference(0.01)

    def gradients(objective: DirectPreference) -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        loss = objective.loss(model, batch)
        loss.backward()
        return float(loss), {
            name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
        }

    likely = [each.detach().double() for each in likelihoods(model, batch)]
    expected, of_all = gradients(objective)
    chunked = chunked_loss.chunk_loss(model, training(), of_rows=True)
    assert chunked is not None
    found, mine = gradients(objective.of_rows)
    assert chunked.chunks == chunks  # 36 tokens, 5 at a time
    assert found == pytest.approx(expected, rel=1e-6)
    for name, gradient in of_all.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6)
    in_chunks = [each.detach().double() for each in chunked_likelihoods(model, batch)]
    torch.testing.assert_close(in_chunks, likely, rtol=1e-6, atol=0.0)
    with torch.no_grad():  # the reference and validation read logits
        torch.testing.assert_close([each.double() for each in likelihoods(model, batch)], likely, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("family", CHUNKED_LOSS_FAMILIES)
def test_nothing_stands_between_head_and_loss_of_a_family(family: str) -> None:
    """Guards the list against a version of transformers that changes a model."""
    source = getsource(type(decoder(family)).forward)
    between = re.search(
        r"self\.lm_head\(.*?\)\n(.*?)self\.loss_function\(", source.replace("embed_out", "lm_head"), re.DOTALL
    )
    assert between is not None
    code = [line.strip() for line in between[1].splitlines() if line.strip() and not line.strip().startswith("#")]
    assert code == ["loss = None", "if labels is not None:", "loss ="]


@pytest.mark.usefixtures("few_logits")
def test_logits_are_computed_outside_of_training() -> None:
    model = decoder("llama")
    plain = model(**rows()).logits.detach()
    chunked = chunked_loss.chunk_loss(model, training())
    assert chunked is not None
    batch = rows()
    model.train()
    with torch.no_grad():
        answer = model(**batch)
    assert torch.equal(answer.logits, plain)
    assert (answer.loss is not None, chunked.chunks) == (True, 0)
    del batch["labels"]
    assert torch.equal(model(**batch).logits, plain)
    torch.testing.assert_close(model(**batch, logits_to_keep=1).logits, plain[:, -1:])


def test_a_small_vocabulary_is_computed_at_once() -> None:
    model = decoder("llama")
    chunked = chunked_loss.chunk_loss(model, training())
    assert chunked is not None
    assert model(**rows()).logits.shape == (3, 9, 41)
    assert chunked.chunks == 0


@pytest.mark.usefixtures("few_logits")
def test_labels_that_are_shifted_already_are_taken_as_they_are() -> None:
    model = decoder("qwen2")
    batch = rows()
    batch["shift_labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    batch["labels"] = batch["shift_labels"]
    expected, _ = loss_and_gradients(model, batch)
    assert chunked_loss.chunk_loss(model, training()) is not None
    assert loss_and_gradients(model, batch)[0] == pytest.approx(expected, rel=1e-6)


def test_other_losses_and_models_compute_all_logits() -> None:
    assert chunked_loss.chunk_loss(decoder("llama"), training(arguments={"use_liger_kernel": True})) is None
    assert chunked_loss.chunk_loss(decoder("gemma2", head_dim=8), training()) is None
    config = AutoConfig.for_model("llama", vocab_size=41, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    assert chunked_loss.chunk_loss(AutoModelForSequenceClassification.from_config(config), training()) is None


class ScaledForCausalLM(LlamaForCausalLM):
    """A model with code of its own and the `model_type` of a known family."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **others: Any) -> Any:
        logits = self.lm_head(self.model(input_ids, **others)[0]) * 0.5
        return CausalLMOutputWithPast(loss=self.loss_function(logits, labels, self.vocab_size), logits=logits)


def test_classes_and_losses_outside_of_transformers_compute_all_logits() -> None:
    assert chunked_loss.chunk_loss(ScaledForCausalLM(decoder("llama").config), training()) is None
    model = decoder("llama")
    model.loss_function = lambda *_: torch.zeros(())
    assert chunked_loss.chunk_loss(model, training()) is None


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.usefixtures("few_logits")
def test_the_loss_of_a_mixtures_routers_is_added_to_that_of_the_chunks(family: str) -> None:
    model = decoder(family, output_router_logits=True, router_aux_loss_coef=0.5)
    expected, gradients = loss_and_gradients(model, rows())
    assert chunked_loss.chunk_loss(model, training()) is not None
    found, mine = loss_and_gradients(model, rows())
    assert found == pytest.approx(expected, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- strategies


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp, tied": ("ddp", {}),
    "fsdp, tied": ("fsdp", {}),
    "ZeRO-2, tied": ("deepspeed", {"zero_stage": 2}),
    "ZeRO-3, tied": ("deepspeed", {"zero_stage": 3}),
    "ZeRO-3": ("deepspeed", {"zero_stage": 3}),
    "tensor": ("ddp", {"tensor": 2}),
    "tensor, tied": ("ddp", {"tensor": 2}),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function: family -> its run in one process with all logits at once."""
    made: dict[str, Any] = {}
    data = tmp_path_factory.mktemp("rows")
    for split, count in {"train": 96, "validation": 8}.items():
        lines = [" ".join(WORDS[(at * 7 + each) % len(WORDS)] for each in range(3 + at % 17)) for at in range(count)]
        write_lines(data / f"{split}.jsonl", [{"text": line} for line in lines])

    def run(family: str, bench: Any) -> Any:
        if family not in made:
            job = task_job(
                "text-generation",
                write_decoder(tmp_path_factory.mktemp("model") / family, family),
                data,
                ["text"],
                training={**training_of(steps=5, batch=8, micro=8), "arguments": {"adam_epsilon": 1e-5}},
                preparation={"max_length": 64},
                evaluation=None,
                predict=None,
            )
            made[family] = type(bench)(tmp_path_factory.mktemp("alone"), job)
            assert made[family].run(Stage.PREPARE).exit_code == 0
            made[family].train_here()
        return made[family]

    return run


def trained_in_chunks(run: Any, strategy: str, steps: int) -> str:
    """Train in two processes whose chunks are counted, and return their output: both passes of each step have some."""
    case = run.case(processes=2, deepspeed=run.deepspeed_config() if strategy == "deepspeed" else None)
    call = {"call": "process_support.chunked:train", "arguments": {"arguments": case["arguments"], "logits": 400}}
    codes, output = fork_server().run({**case, **call})
    assert codes == [0, 0], output
    counts = [int(count) for count in re.findall(r"(\d+) chunks were computed", output)]
    assert len(counts) == 2
    assert min(counts) >= 2 * 2 * steps
    assert output.count("libraries are as before: True") == 2
    return str(output)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_strategies_train_the_same_with_a_loss_in_chunks(
    way: str, alone: Any, bench: Any, tmp_path: Path, compared
) -> None:
    strategy, settings = WAYS[way]
    expected = alone("qwen3" if "tied" in way else "llama", bench)
    run = expected.at(tmp_path / "w")
    if "tensor" in settings:
        run = run.in_replicas(Strategy.model_validate({"name": strategy, **settings}), 1, 8)
    else:
        run = run.spread(strategy, 2, **settings)
    output = trained_in_chunks(run, strategy, steps=5)
    assert output.count(f"divided over the vocabulary: {int('tensor' in settings)}") == 2
    assert max(compared(run, expected)) <= 1e-5


SMOOTHED_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("ddp", {"tensor": 2}),
    "pipeline": ("ddp", {"pipeline": {"degree": 2, "micro_batches": 4, "schedule": "1f1b"}}),
    "sequence": ("ddp", {"sequence": 2}),
    "ZeRO-3": ("deepspeed", {"zero_stage": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", SMOOTHED_WAYS)
def test_strategies_train_the_same_with_smoothed_labels(way: str, alone: Any, tmp_path: Path, bench: Any) -> None:
    name, settings = SMOOTHED_WAYS[way]
    expected = alone("llama", bench).at(tmp_path / "alone").with_training(label_smoothing=0.3, max_steps=3)
    expected.train_here()
    strategy = Strategy.model_validate({"name": name, **settings})
    replicas = 2 // strategy.replica_ranks
    run = expected.at(tmp_path / "w").in_replicas(strategy, replicas, 2, label_smoothing=0.3, max_steps=3)
    ended = run.run(processes=2, deepspeed=run.deepspeed_config() if name == "deepspeed" else None)
    assert ended.exit_code == 0, ended.output
    assert run.losses() == pytest.approx(expected.losses(), rel=1e-4)


PREFERENCE_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "ZeRO-2": ("deepspeed", {"zero_stage": 2}),
    "ZeRO-3": ("deepspeed", {"zero_stage": 3}),
}


@pytest.fixture(scope="module")
def preferring(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of `bench`: the run of preference tuning in one process with all logits at once."""
    made: list[Any] = []

    def run(bench: Any) -> Any:
        if not made:
            data = tmp_path_factory.mktemp("pairs")
            texts = [" ".join(WORDS[(at * 7 + each) % len(WORDS)] for each in range(3 + at % 9)) for at in range(96)]
            lines = [{"prompt": f"{one} ", "chosen": one, "rejected": texts[at - 5]} for at, one in enumerate(texts)]
            write_lines(data / "train.jsonl", lines)
            write_lines(data / "validation.jsonl", lines[:8])
            job = task_job(
                "preference-tuning",
                write_decoder(tmp_path_factory.mktemp("model") / "llama", "llama"),
                data,
                ["prompt", "chosen", "rejected"],
                training={**training_of(steps=4, batch=8, micro=8), "arguments": {"adam_epsilon": 1e-5}},
                preparation={"max_length": 64},
                evaluation=None,
                predict=None,
            )
            made.append(type(bench)(tmp_path_factory.mktemp("preferring"), job))
            assert made[0].run(Stage.PREPARE).exit_code == 0
            made[0].train_here()
        return made[0]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("way", PREFERENCE_WAYS)
def test_strategies_tune_the_same_preferences_in_chunks(
    way: str, preferring: Any, bench: Any, tmp_path: Path, compared
) -> None:
    strategy, settings = PREFERENCE_WAYS[way]
    expected = preferring(bench)
    run = expected.at(tmp_path / "w").spread(strategy, 2, **settings)
    trained_in_chunks(run, strategy, steps=4)
    assert max(compared(run, expected)) <= 1e-5
