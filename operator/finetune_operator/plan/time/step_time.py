"""Time of one optimizer step on GPUs: computation, communication, streams of offload and the optimizer.

A step takes the longest of computation, its input and the communication that runs beside it, and the sum of what cannot
overlap: exchanges inside layers, reductions after the last pass, the optimizer's step, transfers to a CPU's optimizer,
and the idle time of a pipeline. Products take the time that their shapes reach (`product_times`). All constants have a
source; those that no data sheet has were set with the calibration rows of published runs, as their comments say
(`tests/planning_support/published_speed.py`), and are kept there by a test.

Not counted: loading, saving, evaluation, reading rows from storage, imbalance between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune_contract.choices import OptimizerName
from finetune_contract.facts import ModelFacts
from finetune_contract.trainer_job import Strategy
from finetune_operator.plan.memory.model_parallel_plan import bubble
from finetune_operator.plan.time.pass_time import MEMORY_SHARE, host_seconds, pass_seconds
from finetune_operator.plan.time.step_work import LINK_SECONDS, NETWORK_SHARE, Machine, StepWork

MESSAGE_BYTES = 8
"""Bytes to copy an fp32 weight into a message, or out of it: read 4, write 4. With ZeRO-1 over replicas an owner copies
its weights in, and the others copy them out.
"""
OPTIMIZER_BYTES: dict[OptimizerName, int] = {"adamw": 44, "sgd": 24, "adafactor": 44}
"""Bytes that a step reads and writes for each parameter: fused AdamW reads weight, gradient and two moments and writes
three (28) and a 16-bit copy, clipping reads and scales the gradient (12). torch's Adafactor keeps sums of rows and
columns only, but builds the update in memory.
"""
HIDING_SHARE = 0.5
"""Share of the computation that copies from and to the host hide behind. Assumed: no measurement is known. A module's
kernels wait for its weights, so that launches do not run ahead, and a form with offload that looks as quick as one
without is not to be chosen.
"""
ROW_SECONDS, TOKEN_SECONDS = 6e-6, 5e-9
"""Time of a CPU core to read a prepared row and put it into a batch, for each row and each token of it: 5 to 15 us for
rows of 30 to 1,900 tokens of classification and generation, measured on one core with rows in the page cache. Reading
them from storage is not counted: its speed is not known, and rows are 8 bytes a token at most.
"""
CPU_ADAM_SECONDS = 0.25e-9
"""Time of DeepSpeed's CPU Adam for a parameter on a node with `CPU_ADAM_CORES` cores or more, bound by host memory:
2.57 s for 10 billion (Ren et al., "ZeRO-Offload", 2021, table 4).
"""
TORCH_ADAM_SECONDS = 1.4e-9
"""Time of torch's AdamW on CPU, which `fsdp` steps with: 14.76 s for 10 billion (the same table)."""
DISK_BYTES = 3e9
"""Bytes a second of a node's disks for offload to files: one NVMe drive of PCIe 3.0 or 4.0. Assumed: no fact has it."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by part."""

    computing: float
    """Forward and backward passes of all micro-batches."""
    sending: float = 0.0
    """Part of gathering weights and reducing gradients that computation does not hide."""
    streaming: float = 0.0
    """Part of the copies from and to host memory that nothing hides."""
    exchanging: float = 0.0
    """Exchanges inside layers: of split layers, of slices of rows, and between stages of a pipeline."""
    idle: float = 0.0
    """Idle time of a pipeline."""
    stepping: float = 0.0
    """Step of the optimizer."""
    waiting: float = 0.0
    """Part of reading rows and collating batches that computation does not hide."""
    exchanged_bytes: float = 0.0
    """Bytes that one process sends to exchange heads for tokens."""

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return sum(seconds for _, seconds in self.parts())

    def share(self, seconds: float) -> str:
        """Return a part's share of the total as text."""
        share = seconds / self.total
        return "less than 1%" if share < 0.01 else f"{share:.0%}"

    @property
    def exchanging_share(self) -> str:
        """Return the share of exchanges as text."""
        return self.share(self.exchanging)

    def parts(self) -> tuple[tuple[str, float], ...]:
        """Return the parts with their names."""
        return (
            ("computation", self.computing),
            ("communication", self.sending + self.exchanging),
            ("copies from and to the host", self.streaming),
            ("idle pipeline", self.idle),
            ("optimizer", self.stepping),
            ("wait for data", self.waiting),
        )


# -------------------------------------------------------------------------------------------------------- communication


def exchanged_bytes(model: ModelFacts, strategy: Strategy, tokens: float, width: int) -> float:
    """Return the bytes that one process sends in attention while its group reads `tokens` tokens, forward and backward.

    Each layer exchanges queries, keys, values and attention outputs, N h elements each for N tokens of width h, of
    which a P-th belongs to one process: 4 N h / P (Jacobs et al., "DeepSpeed Ulysses", 2023, section on the analysis of
    communication). Shared (grouped-query) keys and values are narrower, and a process keeps a P-th of its part.
    Gradients are exchanged likewise; recomputation repeats the forward pass.
    """
    degree = strategy.sequence
    elements = tokens * 2 * (model.hidden_size + model.key_value_width) / degree * (degree - 1) / degree
    passes = 3 if strategy.activation_checkpointing == "full" else 2
    return elements * width * model.layers * passes


def _exchange_seconds(work: StepWork, machine: Machine) -> tuple[float, float]:
    """Return the seconds of exchanges inside layers over all micro-batches, and the bytes of those of slices.

    Tensor parallelism reduces the outputs of attention and feed-forward layer, forward and backward: 4 all-reduces of
    N h elements a layer (Shoeybi et al., "Megatron-LM", 2019, section 3). A pipeline sends N h elements between stages.
    """
    strategy, model, width = work.strategy, work.model, work.width
    seconds = 0.0
    group = work.micro_rows * work.row_tokens * work.accumulation
    sent = exchanged_bytes(model, strategy, group, width) if strategy.sequence > 1 else 0.0
    if sent:
        inside = machine.gpus_per_node % strategy.sequence == 0
        seconds += sent / (machine.link_rate if inside else machine.network * NETWORK_SHARE)
    stages = 1 if strategy.pipeline is None else strategy.pipeline.stages
    if strategy.tensor > 1:
        reduces = 6 if strategy.activation_checkpointing == "full" else 4
        share = 2 * (strategy.tensor - 1) / strategy.tensor
        processes = 1 if strategy.pipeline is None else strategy.pipeline.degree
        reduced = reduces * share * group * model.hidden_size * width * model.layers / processes
        inside = strategy.tensor <= machine.gpus_per_node
        seconds += reduced / (machine.link_rate if inside else machine.network * NETWORK_SHARE)
    if stages > 1 and strategy.pipeline is not None:
        passed = 2 * strategy.pipeline.stages_per_process * group * model.hidden_size * width
        rate = machine.link_rate if machine.nodes == 1 else machine.network * NETWORK_SHARE
        seconds += passed / rate
    return seconds, sent


def _sending(work: StepWork, machine: Machine, computing: float) -> float:
    """Return the seconds of gathering weights and reducing gradients that computation does not hide.

    Rajbhandari et al., "ZeRO" (2020), section 7. An all-reduce sends 2 elements a parameter. ZeRO-1 and 2 all-reduce
    gradients too (DeepSpeed 0.19: `use_multi_rank_bucket_allreduce`), stage 2 with every micro-batch, and gather the
    weights after the step. Stage 3 and fsdp gather the weights before each pass, forward and backward, and
    reduce-scatter gradients, which fsdp does in fp32.
    """
    strategy, ranks = work.strategy, work.data_ranks
    if ranks == 1:
        return 0.0
    micros, split, share = work.accumulation, strategy.model_ranks, (ranks - 1) / ranks
    shards = machine.gpus_per_node if strategy.fsdp_sharding == "hybrid" else ranks
    held, trained = work.gathered_bytes(shards) / split, work.trained / split
    last_backward = computing / micros * 2 / 3
    rate = machine.ring_rate
    if strategy.name == "fsdp" and strategy.pipeline is not None:
        return _gathering_stages(work, machine, computing, held, trained)
    if strategy.name == "fsdp" or strategy.zero_stage == 3:
        return _gathering(work, machine, computing, held, trained)
    if strategy.name == "deepspeed" and strategy.zero_stage in (1, 2):
        reducing = 2 * share * trained * work.width / rate + machine.latency * 2
        hidden = computing * 2 / 3 if strategy.zero_stage == 2 else last_backward
        times = micros if strategy.zero_stage == 2 else 1
        gathering = share * trained * work.width / rate + machine.latency
        return max(0.0, reducing * times - hidden) + gathering
    # ddp and ZeRO-0: in the last backward pass; beside tensor or pipeline parallelism after it.
    width = work.width if strategy.name == "deepspeed" else 4
    if split > 1:
        rate = _replica_rate(machine)
    # ZeRO-1 over replicas reduces gradients to the owners of weights, and gets the weights from them: as many bytes.
    reducing = 2 * share * trained * width / rate + 2 * machine.latency
    # The bucket of the first layers is reduced when nothing is left to compute.
    tail = reducing / work.model.layers
    return reducing if split > 1 else tail + max(0.0, reducing - tail - last_backward)


def _replica_rate(machine: Machine) -> float:
    """Return the rate at which replicas of a spread model average gradients: each rank with its like of other nodes."""
    if machine.nodes == 1:
        return machine.link_rate
    return machine.network * NETWORK_SHARE


def _gathering(work: StepWork, machine: Machine, computing: float, held: float, trained: float) -> float:
    """Return the seconds of ZeRO-3's and fsdp's gathers and reductions that computation does not hide; `held`: bytes of
    the weights, `trained`: their number.
    """
    strategy, layers, micros = work.strategy, work.model.layers, work.accumulation
    hybrid = strategy.fsdp_sharding == "hybrid"
    inside = machine.link_rate
    rate = inside if hybrid else machine.ring_rate if strategy.model_ranks == 1 else _replica_rate(machine)
    ranks = machine.gpus_per_node if hybrid else work.data_ranks
    share = (ranks - 1) / ranks
    # grad-op keeps the blocks gathered from forward to backward; ZeRO++ gathers inside a node in the backward pass.
    again = 0.0 if strategy.fsdp_sharding == "grad-op" else held / (inside if work.secondary_shards > 1 else rate)
    reduced = work.reduced_bytes if strategy.name == "fsdp" else work.width
    once = share * (held / rate + again + trained * reduced / rate)
    waits = 3 * layers * (LINK_SECONDS * (machine.gpus_per_node - 1) if hybrid else machine.latency)
    total = micros * (once + waits)
    # Nothing computes beside the first gather and the last reduction.
    ends = once / layers
    between = 0.0
    if hybrid and machine.nodes > 1:
        nodes = machine.nodes
        between = 2 * trained * 4 / machine.gpus_per_node * (nodes - 1) / nodes / (machine.network * NETWORK_SHARE)
    return max(ends, total - computing) + between


def _gathering_stages(work: StepWork, machine: Machine, computing: float, held: float, trained: float) -> float:
    """Return the seconds of fsdp's gathers and reductions over the stages of a pipeline that computation does not hide.

    A stage gathers its weights once a pass, while it computes the first micro-batch; the next stage begins after that.
    It reduces its gradients after the last micro-batch, when nothing is left to compute; the first stage is the last.
    """
    pipeline = work.strategy.pipeline
    assert pipeline is not None
    layers, ranks, rate = max(1, work.model.layers // pipeline.degree), work.data_ranks, _replica_rate(machine)
    share, forward = (ranks - 1) / ranks, computing / work.accumulation / 3
    gathering = share * held / rate + layers * machine.latency
    reducing = share * trained * work.reduced_bytes / rate + layers * machine.latency
    passes = max(1, work.accumulation // pipeline.micro_batches)
    return passes * (pipeline.degree * max(gathering / layers, gathering - forward) + reducing)


# --------------------------------------------------------------------------------------------------- optimizer, offload


def _optimizer(work: StepWork, machine: Machine) -> tuple[float, float]:
    """Return the seconds of the optimizer's step, and those of copying gradients and weights that nothing hides."""
    strategy = work.strategy
    trained = work.trained / strategy.model_ranks
    sharded = strategy.name == "fsdp" or bool(strategy.zero_stage)
    updated = trained / (work.data_ranks if sharded else 1)
    if strategy.name == "fsdp" and strategy.fsdp_sharding == "hybrid":
        updated = trained / machine.gpus_per_node
    if strategy.offload_optimizer == "none" and strategy.offload_parameters == "none":
        if not machine.memory:
            return 0.0, 0.0
        moved = OPTIMIZER_BYTES[work.optimizer] * updated
        if strategy.name == "ddp" and sharded:
            moved += MESSAGE_BYTES * trained
        return moved / (machine.memory * MEMORY_SHARE), 0.0
    torch_steps = strategy.name == "fsdp"
    of_node = updated * machine.gpus_per_node
    seconds = of_node * machine.adam_seconds(TORCH_ADAM_SECONDS if torch_steps else CPU_ADAM_SECONDS)
    if strategy.offload_optimizer == "nvme":
        # Master copy and moments are read and written, the gradient is read.
        seconds += of_node * 28 / DISK_BYTES
    # DeepSpeed's updated weights go to the device at once; fsdp's stay on the host, and are counted as streams.
    copied = 0.0 if torch_steps or strategy.offload_parameters != "none" else updated * work.width
    return seconds, copied / machine.host_rate


def _streaming(work: StepWork, machine: Machine, computing: float) -> float:
    """Return the seconds of copies of weights and gradients beside the passes that computation does not hide."""
    strategy, micros = work.strategy, work.accumulation
    if strategy.offload_optimizer == "none" and strategy.offload_parameters == "none":
        return 0.0
    ranks = work.data_ranks
    width = 4 if strategy.name == "fsdp" else work.width
    # Gradients leave as they are reduced, with every micro-batch; both directions of PCIe work at once.
    gradients = micros * work.trained / ranks * width / machine.host_rate
    weights = 0.0
    if strategy.offload_parameters != "none":
        held = work.held_bytes(width) / ranks
        weights = 2 * micros * held / machine.host_rate
        if strategy.offload_parameters == "nvme":
            weights = max(weights, 2 * micros * held * machine.gpus_per_node / DISK_BYTES)
    return max(0.0, max(weights, gradients) - computing * HIDING_SHARE)


def time_of_step(work: StepWork, machine: Machine) -> StepTime:
    """Return the time of a step on `machine`."""
    computing = work.accumulation * pass_seconds(work, machine)
    exchanging, sent = _exchange_seconds(work, machine)
    stepping, copying = _optimizer(work, machine)
    pipeline = work.strategy.pipeline
    share = 0.0 if pipeline is None else bubble(pipeline)
    return StepTime(
        computing=computing,
        sending=_sending(work, machine, computing),
        streaming=_streaming(work, machine, computing) + copying,
        exchanging=exchanging,
        idle=(computing + exchanging) * share / (1 - share),
        stepping=stepping,
        waiting=_waiting(work, computing),
        exchanged_bytes=sent,
    )


def _waiting(work: StepWork, computing: float) -> float:
    """Return the seconds of a step's input that computation does not hide. Without workers, the host reads between
    launches of kernels; while it does, the GPU computes what was launched before.
    """
    rows = work.micro_rows * work.accumulation
    reading = rows * (ROW_SECONDS + TOKEN_SECONDS * work.row_tokens)
    if work.loader_workers:
        return max(0.0, reading / work.loader_workers - computing)
    return max(0.0, reading + work.accumulation * host_seconds(work) - computing)
