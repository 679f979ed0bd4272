"""The memory model compared with DeepSpeed's own estimators and with torch's memory in a real backward pass."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_contract.facts import LinearWidths
from finetune_contract.plans import SAVED_PIECE_BYTES
from finetune_contract.trainer_job import Adapter, Strategy, World
from finetune_operator.plan.memory.memory_workload import activation_bytes_per_token, largest_layer
from finetune_operator.plan.memory.process_memory import CPU_PROCESS_BYTES, estimate
from finetune_operator.plan.memory.state_memory import model_states
from finetune_operator.plan.types.plan_types import MemoryTerm
from planning_support.workloads import model_of, work

GIB = 1 << 30


WORLD = World(nodes=1, processes_per_node=8, device="cuda", threads_per_process=1)
CONVERTED = 1 - 47 / 50
"""Weights of `model_of` outside its 48 blocks, of a 50th each, and those of one block."""


@pytest.mark.parametrize(
    ("settings", "changes", "loading"),
    [
        pytest.param({"name": "fsdp"}, {}, 0, id="weights stay in their files until they are on a device"),
        pytest.param({"name": "ddp"}, {}, 0, id="also where each process has all of them"),
        pytest.param({"name": "ddp", "tensor": 2}, {}, 4 * CONVERTED, id="rank 0 converts a block of a split model"),
        pytest.param(
            {"name": "ddp", "pipeline": {"degree": 2, "micro_batches": 2, "schedule": "1f1b"}},
            {},
            4 * CONVERTED,
            id="and of one in stages",
        ),
        pytest.param({"name": "ddp", "tensor": 2}, {"parameter_bytes": 4_000_000}, 0, id="no weights of fp32 files"),
        pytest.param({"name": "fsdp", "sequence": 2}, {}, 8 * 4 * CONVERTED, id="each process does for slices of rows"),
        pytest.param({"name": "fsdp"}, {"idle_parameters": 1}, 8 * 2, id="experts are merged in memory"),
        pytest.param(
            {"name": "ddp", "tensor": 2}, {"idle_parameters": 1}, 8 * 2 + 4 * CONVERTED, id="also before a split"
        ),
    ],
)
def test_loading_takes_host_memory_only_where_weights_leave_their_files(
    settings: dict[str, Any], changes: dict[str, Any], loading: float
) -> None:
    model = model_of(1_000_000).model_copy(update={"parameter_bytes": 2_000_000, **changes})
    found = model_states(work(model, Strategy.model_validate(settings), world=WORLD)).host
    assert found == pytest.approx(loading * model.parameters)


@pytest.mark.parametrize(("stored", "loading"), [(2, 8 * 4 * 1000), (4, 0)], ids=["bf16", "fp32"])
def test_loading_counts_the_layers_of_which_dora_takes_norms_in_fp32(stored: int, loading: int) -> None:
    layers = {
        "q_proj": LinearWidths(inputs=10, outputs=10, weights=1000),
        "up_proj": LinearWidths(inputs=10, outputs=40, weights=4000),
    }
    facts = {"parameter_bytes": stored * 1_000_000, "linear_layers": layers}
    model = model_of(1_000_000).model_copy(update=facts)
    dora = Adapter(method="dora", rank=4, alpha=8, dropout=0, target_modules=("q_proj",))
    assert model_states(work(model, Strategy(name="fsdp"), world=WORLD, adapter=dora)).host == loading


@pytest.mark.parametrize(
    ("strategy", "precision", "per_parameter"),
    [
        pytest.param({"name": "single"}, "fp32", (4, 4, 8), id="one process in fp32"),
        pytest.param({"name": "single"}, "bf16", (4, 4, 8), id="autocast leaves weights and gradients in fp32"),
        pytest.param({"name": "ddp"}, "bf16", (4, 4, 8), id="ddp divides nothing"),
        pytest.param({"name": "fsdp"}, "fp32", (1, 1, 2), id="fsdp divides everything"),
        pytest.param({"name": "deepspeed", "zero_stage": 0}, "bf16", (2, 2 + 4, 12), id="ZeRO-0 divides nothing"),
        pytest.param({"name": "deepspeed", "zero_stage": 1}, "bf16", (2, 2 + 1, 3), id="ZeRO-1 divides the optimizer"),
        pytest.param({"name": "deepspeed", "zero_stage": 2}, "bf16", (2, 0.5 + 1, 3), id="ZeRO-2 gradients too"),
        pytest.param({"name": "deepspeed", "zero_stage": 3}, "bf16", (0.5, 0.5 + 1, 3), id="ZeRO-3 parameters too"),
        pytest.param({"name": "deepspeed", "zero_stage": 2}, "fp32", (4, 1 + 1, 3), id="DeepSpeed copies fp32 too"),
        pytest.param(
            {"name": "deepspeed", "zero_stage": 2, "offload_optimizer": "cpu"},
            "bf16",
            (2, 0, 0),
            id="offload to the host",
        ),
        pytest.param(
            {"name": "deepspeed", "zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
            "bf16",
            (0, 0, 0),
            id="offload of everything",
        ),
        pytest.param(
            {"name": "deepspeed", "zero_stage": 3, "offload_parameters": "nvme"},
            "bf16",
            (0, 0.5 + 1, 3),
            id="offload of parameters alone",
        ),
        pytest.param(
            {"name": "fsdp", "fsdp_sharding": "grad-op"}, "fp32", (1, 1, 2), id="grad-op divides between steps"
        ),
        pytest.param(
            {"name": "fsdp", "offload_optimizer": "cpu", "offload_parameters": "cpu"},
            "fp32",
            (0, 0, 0),
            id="fsdp offloads everything",
        ),
    ],
)
def test_bytes_a_parameter_over_four_ranks(strategy, precision, per_parameter):
    world = World(nodes=1, processes_per_node=4, device="cuda", threads_per_process=1)
    states = model_states(work(model_of(1_000_000), Strategy(**strategy), precision=precision, world=world))
    assert (states.parameters, states.gradients, states.optimizer) == tuple(int(n * 1_000_000) for n in per_parameter)


def test_hybrid_sharding_divides_inside_a_node():
    world = World(nodes=4, processes_per_node=2, device="cuda", threads_per_process=1)
    states = model_states(work(model_of(1_000_000), Strategy(name="fsdp", fsdp_sharding="hybrid"), world=world))
    assert (states.parameters, states.gradients, states.optimizer) == (2_000_000, 2_000_000, 4_000_000)


def test_secondary_shards_are_a_second_copy_inside_each_node():
    world = World(nodes=2, processes_per_node=4, device="cuda", threads_per_process=1)
    strategy = Strategy(name="deepspeed", zero_stage=3)
    made = estimate(work(model_of(1_000_000), strategy, world=world, secondary_shards=4), 40 * GIB)
    assert {term.name: term.bytes for term in made.terms}["secondary shards"] == 2 * 1_000_000 // 4


def test_grad_op_sharding_keeps_all_blocks_gathered():
    world = World(nodes=1, processes_per_node=4, device="cuda", threads_per_process=1)
    full, grad_op = (
        estimate(work(model_of(1_000_000), Strategy(name="fsdp", fsdp_sharding=kind), world=world), 40 * GIB)
        for kind in ("full", "grad-op")
    )
    # 48 blocks in place of the 2 that are gathered at a time, in 16 bits.
    by_name = [{term.name: term.bytes for term in each.terms} for each in (full, grad_op)]
    assert by_name[1]["gathered blocks"] - by_name[0]["gathered blocks"] == 46 * 2 * 20_000


def test_fsdp_makes_no_copies_of_weights_besides_gathered_ones_in_16_bits():
    world = World(nodes=4, processes_per_node=8, device="cuda", threads_per_process=1)
    model = model_of(30_000_000_000)
    made = estimate(work(model, Strategy(name="fsdp"), world=world), 80 * GIB)
    terms = {term.name: term.bytes for term in made.terms}
    root, block = model.parameters - 48 * model.block_parameters, model.block_parameters
    assert "autocast copies" not in terms
    assert terms["gathered blocks"] == 2 * (root + 2 * block)
    # Gradients of the block that is reduced: those in bf16, and their fp32 form.
    assert terms["whole gradients"] == (2 + 4) * block
    wide = model.model_copy(update={"block_parameters": block // 2})
    made = estimate(work(wide, Strategy(name="fsdp"), world=world), 80 * GIB)
    terms = {term.name: term.bytes for term in made.terms}
    assert "gathered blocks" not in terms
    assert terms["whole gradients"] == (2 + 4) * (model.parameters - 48 * block // 2)


@pytest.mark.parametrize(("processes", "padding"), [(4, 1), (8, 1), (32, 4)])
def test_fsdp_pads_experts_where_there_are_more_processes(processes: int, padding: int):
    world = World(nodes=1, processes_per_node=processes, device="cuda", threads_per_process=1)
    model = model_of(1_000_000_000).model_copy(update={"experts": 8, "idle_parameters": 1})
    made = estimate(work(model, Strategy(name="fsdp"), world=world, micro_batch=32), 80 * GIB)
    terms = {term.name: term.bytes for term in made.terms}
    root, block = model.parameters - 48 * model.block_parameters, model.block_parameters
    assert terms["gathered blocks"] == 2 * (root + 2 * block * padding)
    assert terms["parameters"] == 4 * model.parameters * padding // processes


def test_autocast_keeps_no_copies_of_frozen_weights_that_are_recomputed():
    linear = {"attn.c_proj": LinearWidths(inputs=48 * 1024, outputs=48 * 1024, weights=48 * 1024 * 1024)}
    model = model_of(1_000_000_000).model_copy(update={"linear_layers": linear, "tied_embeddings": False})
    copies = {}
    for mode in ("none", "full"):
        strategy = Strategy.model_validate({"name": "single", "activation_checkpointing": mode})
        for adapter in (None, LORA):
            options = {"task": "text-generation", "adapter": adapter, "micro_batch": 32}
            made = estimate(work(model, strategy, **options), 80 * GIB)
            copies[mode, adapter is None] = {term.name: term.bytes for term in made.terms}["autocast copies"]
    every, held = model.parameters - model.embedding_parameters, 48 * 1024 * 1024 + 50257 * 1024
    assert copies["none", True] == 2 * every
    # The linear layers and the head are in 16 bits themselves.
    assert copies["none", False] == 2 * (every - held)
    assert copies["full", False] == 0


def test_a_tied_head_has_a_copy_in_16_bits_too():
    copies = []
    for tied in (False, True):
        model = model_of(1_000_000_000).model_copy(update={"tied_embeddings": tied})
        made = estimate(work(model, Strategy(name="single"), task="text-generation", micro_batch=32), 80 * GIB)
        copies.append({term.name: term.bytes for term in made.terms}["autocast copies"])
    assert copies[1] - copies[0] == 2 * 50257 * 1024


def test_ddp_holds_gradients_twice_only_with_several_micro_batches():
    world = World(nodes=1, processes_per_node=4, device="cuda", threads_per_process=1)
    model = model_of(1_000_000_000)
    made = [
        estimate(work(model, Strategy(name="ddp"), world=world, accumulates=several), 80 * GIB)
        for several in (True, False)
    ]
    several, one = ({term.name: term.bytes for term in each.terms} for each in made)
    assert several["communication buffers"] == several["gradients"] == one["gradients"] == 4 * model.parameters
    assert "communication buffers" not in one


def test_one_micro_batch_s_gradients_take_the_place_of_its_activations():
    model = model_of(1_000_000_000)
    most = [
        estimate(work(model, Strategy(name="single"), precision="fp32", micro_batch=micro, accumulates=False), 80 * GIB)
        for micro in (1, 256)
    ]
    few, many = ({term.name: term.bytes for term in each.terms} for each in most)
    assert few["gradients"] == 4 * model.parameters
    assert "activations" not in few
    assert many["gradients"] == 0
    assert many["activations"] > 4 * model.parameters


def test_deepspeed_s_step_may_be_the_fullest_moment():
    strategy = Strategy(name="deepspeed", zero_stage=2)
    made = estimate(work(model_of(1_000_000_000), strategy), 80 * GIB)
    terms = {term.name: term for term in made.terms}
    assert "activations" not in terms
    assert terms["gradients"].bytes == (2 + 4) * 1_000_000_000


ZERO3: dict[str, Any] = {"name": "deepspeed", "zero_stage": 3}
LORA = Adapter(method="lora", rank=8, alpha=16, dropout=0.0, target_modules=None)


def test_fp8_needs_the_memory_of_bf16_and_room_to_round_a_tensor():
    layers = {
        "up": LinearWidths(inputs=48 * 1024, outputs=48 * 4096, weights=48 * 1024 * 4096),
        "down": LinearWidths(inputs=48 * 4096, outputs=48 * 1024, weights=48 * 1024 * 4096),
    }
    counted = model_of(1_000_000_000).model_copy(update={"linear_layers": layers})
    for model in (counted, model_of(1_000_000_000)):
        for length, elements in ((128, 1024 * 4096), (2048, 2 * 2048 * 4096)):
            options = {"micro_batch": 2, "length": length}
            plain = {t.name: t for t in estimate(work(model, Strategy(name="single"), **options), 80 * GIB).terms}
            made = estimate(work(model, Strategy(name="single"), **options, precision="fp8"), 80 * GIB)
            terms = {term.name: term for term in made.terms}
            assert terms.pop("rounding to fp8").bytes == 12 * elements
            assert terms.keys() == plain.keys()
            assert all(terms[name] == plain[name] for name in terms if name != "allocator")


def test_fsdp_holds_gathered_layers_in_fp8_in_one_byte_a_weight():
    layers = {"up": LinearWidths(inputs=48 * 1024, outputs=48 * 4096, weights=48 * 1024 * 4096)}
    model = model_of(1_000_000_000).model_copy(update={"linear_layers": layers, "layers": 48})

    def terms(precision: Any, processes: int = 8) -> dict[str, MemoryTerm]:
        world = World(nodes=1, processes_per_node=processes, device="cuda", threads_per_process=1)
        made = work(model, Strategy(name="fsdp"), precision=precision, world=world)
        return {term.name: term for term in estimate(made, 80 * GIB).terms}

    plain, rounded = terms("bf16"), terms("fp8")
    assert plain["gathered blocks"].bytes - rounded["gathered blocks"].bytes in (1024 * 4096, 2 * 1024 * 4096)
    assert rounded["gathered blocks"].formula.endswith("x 4,194,304 in fp8")
    # torchao cannot gather shards of different sizes.
    assert terms("fp8", 6)["gathered blocks"] == terms("bf16", 6)["gathered blocks"]


PIECES = 4 * SAVED_PIECE_BYTES / 1_000_000_000
"""Bytes that four processes write at a time, for each parameter of a model of 1,000,000,000."""


@pytest.mark.parametrize(
    ("strategy", "width", "adapter", "per_parameter"),
    [
        # Weights stay in their files while they are read, and are written in pieces.
        pytest.param({"name": "ddp"}, 4, None, PIECES, id="ddp writes a checkpoint in pieces"),
        pytest.param({"name": "fsdp"}, 2, None, PIECES, id="fsdp writes a checkpoint in pieces"),
        pytest.param({"name": "ddp", "tensor": 4}, 2, None, PIECES, id="split layers are written in pieces, too"),
        pytest.param(
            {"name": "fsdp", "sequence": 4}, 2, None, 4 * 4 * CONVERTED, id="slices compute one block in fp32 each"
        ),
        pytest.param(ZERO3, 2, None, 4 + PIECES, id="ZeRO-3 copies the master copy"),
        pytest.param({"name": "deepspeed", "zero_stage": 0}, 2, None, 4 + PIECES, id="ZeRO-0 copies that of rank 0"),
        pytest.param({**ZERO3, "offload_optimizer": "cpu"}, 4, None, 16 + PIECES, id="beside what is offloaded"),
        pytest.param(
            {"name": "fsdp", "offload_optimizer": "cpu", "offload_parameters": "cpu"},
            4,
            None,
            16 + PIECES,
            id="a checkpoint written beside what is offloaded",
        ),
        pytest.param(ZERO3, 4, LORA, 4, id="an adapter is merged in fp32"),
    ],
)
def test_host_memory_holds_weights_that_are_read_or_written(
    strategy: dict[str, Any], width: int, adapter: Adapter | None, per_parameter: float
):
    count = 1_000_000_000
    one = {"attn.c_proj": LinearWidths(inputs=1024, outputs=1024)}
    model = model_of(count).model_copy(update={"parameter_bytes": width * count, "linear_layers": one})
    world = World(nodes=1, processes_per_node=4, device="cuda", threads_per_process=1)
    made = estimate(work(model, Strategy.model_validate(strategy), world=world, adapter=adapter), 80 * GIB)
    assert (made.host_bytes - 4 * CPU_PROCESS_BYTES) / count == pytest.approx(per_parameter, rel=1e-3)


def test_host_memory_for_a_checkpoint_does_not_grow_with_the_model():
    for count in (1_000_000_000, 70_000_000_000):
        model = model_of(count)
        made = estimate(work(model, Strategy(name="single")), 80 * GIB)
        assert made.host_bytes - CPU_PROCESS_BYTES == 4 * largest_layer(model)
        mixture = estimate(work(model.model_copy(update={"idle_parameters": 1}), Strategy(name="single")), 80 * GIB)
        # Experts are merged when they are read, and divided when they are written.
        assert mixture.host_bytes - CPU_PROCESS_BYTES == 4 * count


def test_state_in_files_leaves_its_buffers_in_host_memory():
    strategy = Strategy(name="deepspeed", zero_stage=3, offload_optimizer="nvme", offload_parameters="nvme")
    world = World(nodes=1, processes_per_node=2, device="cuda", threads_per_process=1)
    made = estimate(work(model_of(1_000_000_000), strategy, world=world), 40 * GIB)
    shard = 500_000_000
    # Master copy 4, moments 8, gradient 4, and the 16-bit weights.
    assert made.disk_bytes == 2 * (16 + 2) * shard
    # fp32 gradients, four buffers of a sub-group in fp32, five of the largest weight's shard in 16 bits.
    host = 4 * shard + 4 * 4 * 50_000_000 + 5 * 2 * (20_000_000 // 2)
    assert model_states(work(model_of(1_000_000_000), strategy, world=world)).offloaded == host
    terms = {term.name: term for term in made.terms}
    assert [terms[name].formula for name in ("parameters", "gradients", "optimizer state")] == [
        "in files",
        "on the host",
        "in files",
    ]


@pytest.mark.parametrize(("optimizer", "per_parameter"), [("adamw", 8.0), ("sgd", 0.0), ("adafactor", 8 / 1024)])
def test_optimizers_keep_their_known_state(optimizer, per_parameter):
    states = model_states(work(model_of(1_024_000), Strategy(name="single"), optimizer=optimizer))
    assert states.optimizer == int(1_024_000 * per_parameter)


def test_the_terms_add_up_and_show_their_numbers():
    strategy = Strategy(name="deepspeed", zero_stage=3)
    world = World(nodes=2, processes_per_node=2, device="cuda", threads_per_process=1)
    estimated = estimate(work(model_of(100_000_000), strategy, world=world, micro_batch=8), 40 * GIB)
    terms = {term.name: term.bytes for term in estimated.terms}
    layer = 1024 * (2 * 2 + 6 * 2 + 2 * 1) + 4096 * 5 * 2 + 128 * 2  # the last for the mask
    activations = 8 * 128 * (48 * layer + 3 * 1024 * 2 + 4096 * 3)  # with gradients of one and a half products
    allocated = {
        "parameters": 50_000_000,
        "gradients": 50_000_000,  # their fp32 copy is created later, when there are no activations
        "optimizer state": 300_000_000,
        "activations": activations,
        "gathered blocks": 4 * 2_000_000,
        "communication buffers": 2 * 2 * 50_000_000 + 2 * 50_000_000,
    }
    fresh = sum(allocated.values()) - allocated["parameters"] - allocated["optimizer state"]
    assert terms == {**allocated, "allocator": int(0.1 * fresh), "process": GIB}
    assert estimated.total_bytes == sum(terms.values())
    assert estimated.terms[0].formula == "2 x 100,000,000 / 4 ranks"
    assert estimated.terms[4].formula == "4 x 2,000,000 of the largest layer"


def test_on_cpu_offloaded_state_stays_in_the_same_memory():
    world = World(nodes=1, processes_per_node=2, device="cpu", threads_per_process=1)
    states = [
        estimate(
            work(
                model_of(100_000_000),
                Strategy(name="deepspeed", zero_stage=2, offload_optimizer=where),
                world=world,
                precision="fp32",
            ),
            8 * GIB,
        )
        for where in ("none", "cpu")
    ]
    here, offloaded = ({term.name: term.bytes for term in each.terms} for each in states)
    assert offloaded["offloaded state"] >= here["optimizer state"]
    assert offloaded["optimizer state"] == 0
    assert states[1].host_bytes == 2 * states[1].total_bytes


def test_full_checkpointing_keeps_layer_inputs_and_one_layer():
    model = model_of(100_000_000)
    full = work(model, Strategy(name="single", activation_checkpointing="full"), precision="fp32")
    one_layer = activation_bytes_per_token(full)
    terms = {term.name: term.bytes for term in estimate(full, GIB).terms}
    assert terms["activations"] == 128 * (48 * 1024 * 4 + one_layer + 3 * 1024 * 4)


def test_selective_checkpointing_keeps_layer_inputs_and_products():
    model = model_of(100_000_000)
    selective = work(model, Strategy(name="single", activation_checkpointing="selective"), precision="fp32")
    one_layer = activation_bytes_per_token(selective)
    terms = {term.name: term.bytes for term in estimate(selective, GIB).terms}
    # GPT-2: query, key and value, output, two of the feed-forward layer; the output of the fused attention.
    kept = 1024 * 4 + (5 * 1024 + 4096 + 1024) * 4
    assert terms["activations"] == 128 * (48 * kept + (one_layer - kept) + 3 * 1024 * 4)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_offloaded_activations_leave_one_layer_on_the_device(mode):
    model = model_of(10_000_000)
    world = World(nodes=1, processes_per_node=2, device="cuda", threads_per_process=1)
    here, moved = (
        work(
            model,
            Strategy.model_validate({"name": "ddp", "activation_checkpointing": mode, "offload_activations": where}),
            world=world,
            micro_batch=64,
        )
        for where in ("none", "cpu")
    )
    layer, tokens = activation_bytes_per_token(here), 64 * 128
    made = [estimate(each, 40 * GIB) for each in (here, moved)]
    device = [{term.name: term.bytes for term in each.terms}["activations"] for each in made]
    # Gradients of two products, and of three results of GELU that autocast has in fp32.
    passing = 3 * 1024 * 4 + 4096 * (2 * 2 + 3 * 4)
    assert device[1] == tokens * (layer + passing)
    # Offloading loses no bytes; with checkpointing, the recomputed part of a layer is beside the kept ones.
    host = made[1].host_bytes - 2 * CPU_PROCESS_BYTES
    of_layer = (host // 2) // (48 * tokens)
    again = {"none": 0, "full": layer, "selective": layer - of_layer}[mode]
    assert host == 2 * (device[0] - tokens * (again + passing))


# ---------------------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize(("precision", "of_score"), [("bf16", 4 + 2), ("fp32", 4 + 4)])
@pytest.mark.parametrize(("model_type", "dropped"), [("bert", 1), ("gpt_neox", 0)])
def test_attention_scores_count_on_gpus_for_models_that_keep_them(model_type, dropped, precision, of_score):
    """A score's bytes: the softmax in fp32, the weights of the values in `precision`, and the mask of dropout."""
    fused = model_of(1_000_000).model_copy(update={"model_type": model_type})
    taken = [
        activation_bytes_per_token(
            work(
                fused.model_copy(update={"fused_attention": each}),
                Strategy(name="single"),
                precision=precision,
                length=512,
            )
        )
        for each in (True, False)
    ]
    assert taken[1] - taken[0] == fused.attention_heads * 512 * (of_score + dropped)
