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

from finetune_contract.choices import OptimizerName, Precision
from finetune_contract.facts import ModelFacts
from finetune_contract.trainer_job import Strategy
from finetune_operator.planning.activation_shapes import activation_shape
from finetune_operator.planning.adapter_sizes import FOUR_BIT_BYTES, PACKED_BYTES
from finetune_operator.planning.model_parallel_plan import bubble
from finetune_operator.planning.product_times import ProductSpeed, efficiency, products_of

MATMUL_SHARE = 0.48
"""Share of the dense 16-bit peak in large matrix products of a step (`product_times` has the small ones). Calibration:
torchtitan's Llama 3.1 8B on 8 H100 takes 150 us a token and GPU compiled and 174 us eager; 115 us of both are these
products, once the terms below are taken off. Assumed for other chips without a share of their own.
"""
A100_MATMUL_SHARE = 0.71
"""Share on an A100, whose power allows more of its lower peak. Calibration: Qwen 7B with LoRA on one A100, rows of 512
to 8,192 tokens.
"""
A100_CAPABILITY = "8.0"
"""Compute capability of the A100 and the chips cut from it (A30, A800)."""
FP8_SHARE = 0.305
"""Share of the fp8 peak (twice that of bf16) with torch.compile, including the conversions: a whole step is then 1.25
times as fast as in bf16, as torchao measured with 8 billion parameters on 8 GPUs.
"""
FP8_EAGER_SHARE = 0.14
"""Share without torch.compile: 0.7 of the speed in bf16. Each tensor is read and written several times to be rounded;
on an H100 two layers took 1.4 times as long as in bf16 (pytorch/ao, issue 2262).
"""
FP32_SHARE = 0.6
"""Share of the plain fp32 peak; it is higher, as there are no matrix units that wait for data."""
ATTENTION_SHARE = 0.32
"""Share of the 16-bit peak in fused attention, forward and backward together: FlashAttention-2, which torch has,
reaches at most 335 of an H100's 989 TFLOP/s (Dao, "FlashAttention-2", 2023, figure 7).
"""
A100_ATTENTION_SHARE = 0.6
"""Share on an A100: 189 of 312 TFLOP/s with a causal mask and heads of 128 (the same, figure 4)."""
MEMORY_SHARE = 0.8
"""Share of a memory's bandwidth that kernels over large tensors reach, as copies do on an A100 and an H100."""
RMS_NORM_BYTES, GATE_BYTES = 100.0, 10.0
"""Bytes that the eager kernels of one layer's forward pass between matrix products read and write for a token, for each
element of the hidden and of the feed-forward width, in Llama and its kin: two norms 64 (seven kernels, most in fp32),
residuals 12, rotary embeddings 24; activation and gate 10. The backward pass has twice as many.
"""
LAYER_NORM_BYTES, ACTIVATION_BYTES = 60.0, 4.0
"""Bytes of layers whose norms are one kernel: two norms 16, two dropouts 18, two residuals 24; and for each
intermediate of the activation function (`ActivationShape.feed_forward`).
"""
COMPILED_BYTES = (17.0, 6.0)
"""Bytes with torch.compile, which fuses each norm, residual, rotation and gated activation into one kernel."""
SCORE_BYTES = 24
"""Bytes that attention without a fused kernel reads and writes for each score in the forward pass: product, mask,
softmax in fp32 and its conversion, six passes of 2 to 4 bytes each.
"""
LOGIT_BYTES = 30
"""Bytes for each logit: written in 16 bits, converted to fp32, read for the softmax, and its gradient likewise."""
KERNELS_OF_A_LAYER = 167
"""Kernels of one layer's forward and backward pass: some 2,000 for a 12-layer encoder. A third of them compiled."""
GATED_KERNELS_OF_A_LAYER = 219
"""Kernels of a layer of Llama and its kin: 1.31 times those of BERT (152 and 116 operations of torch 2.15, without
views, counted under autocast).
"""
ADAPTER_KERNELS = 29
"""Kernels that an adapter with dropout adds to a linear layer: 20 of those operations (peft 0.21)."""
ADAPTER_BYTES = 13.0
"""Bytes that the eager kernels of an adapter's forward pass read and write for a token, for each element of the inputs
and outputs of a linear layer: the input is converted to fp32, which the adapter's weights have, and back, and read
(14); the adapter's output is written, scaled and added (12). Products of so small a rank take no more than that.
"""
REPEATED_LAUNCHES = 1.9
"""Factor of the host's time with full recomputation, which has hooks on each saved tensor: 1.9 for Llama and 2.0 with
LoRA, measured on a CPU with layers so narrow (64) that nothing else counts.
"""
LAUNCH_SECONDS = 6.8e-6
"""Time to launch a kernel from Python: 5 to 10 us. Launches run ahead of the GPU, so they count where they take longer
than the kernels. Calibration: Qwen 7B with LoRA, rows of 256 tokens, 4.7 ms a layer with recomputation.
"""
HOOK_SECONDS: dict[str, float] = {
    "single": 0.0,
    "ddp": 0.05e-3,
    "ddp-zero1": 0.05e-3,
    "fsdp": 1.7e-3,
    "deepspeed-zero0": 0.7e-3,
    "deepspeed-zero1": 0.7e-3,
    "deepspeed-zero2": 0.7e-3,
    "deepspeed-zero3": 7e-3,
}
"""Time of Python code of a strategy for a layer's passes and its share of the step, beside that of the model itself
(which took 0.8 ms, as its 167 kernels do). Measured with torch 2.15 and DeepSpeed 0.19 on one process of a CPU whose
BERT of 4 and 12 layers is so narrow (16) that nothing else counts. Like launches, it runs ahead of the GPU.
"""
MESSAGE_BYTES = 8
"""Bytes to copy an fp32 weight into a message, or out of it: read 4, write 4. With ZeRO-1 over replicas an owner copies
its weights in, and the others copy them out.
"""
CAST_BYTES = 6
"""Bytes to convert one fp32 weight to 16 bits under autocast: read 4, write 2."""
ACCUMULATE_BYTES = 10
"""Bytes to add one gradient to the sum of earlier micro-batches."""
OPTIMIZER_BYTES: dict[OptimizerName, int] = {"adamw": 44, "sgd": 24, "adafactor": 44}
"""Bytes that a step reads and writes for each parameter: fused AdamW reads weight, gradient and two moments and writes
three (28) and a 16-bit copy, clipping reads and scales the gradient (12). torch's Adafactor keeps sums of rows and
columns only, but builds the update in memory.
"""
NVLINK_SHARE = 0.8
"""Share of NVLink's bandwidth that collectives of large messages reach: nccl-tests show some 230 of 300 GB/s a
direction on 8 A100, and 360 of 450 on 8 H100.
"""
PCIE_SHARE = 0.4
"""Share of PCIe's bandwidth in collectives without NVLink: messages go through host memory, and GPUs share switches;
nccl-tests show 9 to 12 of 32 GB/s on g5.48xlarge.
"""
NVLINK_FROM = 65.0
"""Bandwidth above which a link is NVLink or its like: 16 lanes of PCIe 5.0 have 64 GB/s."""
NETWORK_SHARE = 0.8
"""Share of a network's bandwidth that collectives reach: nccl-tests over EFA and InfiniBand show 75 to 90 %."""
HOST_SHARE = 0.75
"""Share of PCIe's bandwidth in copies from page-locked memory: 24 of 32 GB/s."""
HIDING_SHARE = 0.5
"""Share of the computation that copies from and to the host hide behind. Assumed: no measurement is known. A module's
kernels wait for its weights, so that launches do not run ahead, and a form with offload that looks as quick as one
without is not to be chosen.
"""
UPLINK_GPUS = 2
"""GPUs that share one uplink to the host on boards with 8 of them (block diagrams of DGX A100 and H100)."""
HOP_SECONDS = 8e-6
"""Latency of a message between nodes, of which a ring collective waits for one for each node."""
LINK_SECONDS = 1.5e-6
"""Latency of a message between GPUs of a node."""
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
CPU_ADAM_CORES = 12
"""Cores that saturate the memory of a socket, at some 10 GB/s each."""
DISK_BYTES = 3e9
"""Bytes a second of a node's disks for offload to files: one NVMe drive of PCIe 3.0 or 4.0. Assumed: no fact has it."""
DEQUANTIZE_BYTES = FOUR_BIT_BYTES + 2 + 2
"""Bytes to dequantize a 4-bit weight for a product: read, written in 16 bits, and read once more by the product."""


@dataclass(frozen=True)
class Machine:
    """Speeds that a step runs with. Bandwidths are those of data sheets, in bytes a second; 0: unknown."""

    nodes: int
    gpus_per_node: int
    half_flops: float
    """Dense 16-bit peak of one GPU, in operations a second."""
    fp32_flops: float
    memory: float
    link: float
    """Bandwidth of one GPU to others of its node, in one direction."""
    network: float
    """Share of one GPU in the network of its node, in one direction."""
    host: float
    """Bandwidth between one GPU and host memory, in one direction."""
    cores_per_node: int
    tf32_flops: float = 0.0
    """Peak of products in TF32; 0: the GPU has none."""
    units: int = 0
    """Multiprocessors of one GPU; 0: unknown."""
    matmul_share: float = MATMUL_SHARE
    attention_share: float = ATTENTION_SHARE

    @property
    def link_rate(self) -> float:
        """Return the rate of collectives inside a node."""
        return self.link * (NVLINK_SHARE if self.link > NVLINK_FROM * 1e9 else PCIE_SHARE)

    @property
    def ring_rate(self) -> float:
        """Return the rate of collectives over all GPUs: a ring crosses a node's network once for all of its GPUs."""
        network = self.network * NETWORK_SHARE * self.gpus_per_node
        if self.nodes == 1:
            return self.link_rate
        return min(self.link_rate, network) if self.gpus_per_node > 1 else network

    @property
    def host_rate(self) -> float:
        """Return the rate of copies between one GPU and host memory while all GPUs of the node copy."""
        shared = UPLINK_GPUS if self.gpus_per_node >= 8 and self.host <= 64e9 else 1
        return self.host * HOST_SHARE / shared

    @property
    def latency(self) -> float:
        """Return the seconds that a ring collective over all GPUs waits for messages."""
        return (self.nodes - 1) * HOP_SECONDS + (self.gpus_per_node - 1) * LINK_SECONDS

    def adam_seconds(self, parameter_seconds: float) -> float:
        """Return the seconds a parameter of all processes of a node, with its cores."""
        return parameter_seconds * max(1.0, CPU_ADAM_CORES / self.cores_per_node)


def kernel_shares(capability: str) -> dict[str, float]:
    """Return the fields of a machine with the shares of the peak that its GPUs reach, by their compute capability."""
    if capability == A100_CAPABILITY:
        return {"matmul_share": A100_MATMUL_SHARE, "attention_share": A100_ATTENTION_SHARE}
    return {"matmul_share": MATMUL_SHARE, "attention_share": ATTENTION_SHARE}


@dataclass(frozen=True)
class StepWork:
    """Operations and messages of one step."""

    model: ModelFacts
    strategy: Strategy
    precision: Precision
    optimizer: OptimizerName
    micro_rows: int
    """Rows of one micro-batch of one rank."""
    accumulation: int
    row_tokens: float
    """Tokens of a row, over all of its sequences."""
    length: float
    """Tokens of one sequence."""
    world: int
    trained: int
    """Parameters with gradients and optimizer state."""
    tied_head: int = 0
    """Embedding parameters that the head multiplies with, too."""
    scores_vocabulary: bool = False
    """True if each token has logits over the vocabulary."""
    added: int = 0
    """Parameters of an adapter and of the head's initial state, beside the model's own."""
    adapted: int = 0
    """Linear layers that an adapter goes into, over all blocks."""
    adapted_width: int = 0
    """Sum of their inputs and outputs."""
    adapter_bytes: float = ADAPTER_BYTES
    """Bytes a token for each element of `adapted_width`; that of this project's trainer by default."""
    four_bit: int = 0
    """Frozen weights in 4 bits."""
    chunked_loss: bool = False
    """True if the loss is computed for some tokens at a time: the head's products are computed twice."""
    compiled: bool = False
    loader_workers: int = 0
    """Processes that read batches beside the training; 0: the training's own process does."""
    causal: bool = False
    """True if attention skips the half of the scores that a causal mask hides."""
    secondary_shards: int = 1
    """Processes of a node over which ZeRO++ shards the parameters a second time; 1 without it."""
    recomputed_products: float = 0.0
    """Share of the matrix products that selective checkpointing repeats; 0 in this project's trainer."""
    split_norms: bool = False
    """True if tensor ranks share what lies between split layers, too (`SLICED_NORM_FAMILIES`)."""
    tf32: bool = False
    """True if a training in fp32 multiplies in TF32 on GPUs that have it."""
    reduced_bytes: int = 4
    """Bytes of an element of the gradients that fsdp reduces; 4 in this project's trainer."""

    @property
    def width(self) -> int:
        """Return the bytes of one element of a matrix product."""
        return 4 if self.precision == "fp32" else 2

    def held_bytes(self, width: int) -> float:
        """Return the bytes of one copy of all weights, those that are not in 4 bits with `width` bytes each."""
        return (self.model.parameters + self.added - self.four_bit) * width + PACKED_BYTES * self.four_bit

    @property
    def slice(self) -> float:
        """Return the part of each row that one process computes on."""
        return 1 / self.strategy.sequence

    @property
    def data_ranks(self) -> int:
        """Return the processes that share one copy of sharded state: those with other rows, or other slices of rows."""
        return self.world // self.strategy.model_ranks

    @property
    def tokens(self) -> float:
        """Return the tokens of one pass of one process."""
        return self.micro_rows * self.row_tokens * self.slice


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


# ---------------------------------------------------------------------------------------------------------- computation


def matrix_parameters(model: ModelFacts, tied: int = 0) -> int:
    """Return the weights that a token is multiplied with: without looked-up embeddings and experts that it passes by;
    `tied`: embeddings that the head multiplies with, too.
    """
    return model.parameters - model.embedding_parameters - model.idle_parameters + tied


def pass_seconds(work: StepWork, machine: Machine) -> float:
    """Return the seconds of the forward and backward pass of one micro-batch, for a process with its part of the
    layers.

    Matrix products take 6 operations a parameter and token (2 forward, 4 backward, of which frozen weights save 2),
    attention 12 x layers x hidden x length (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters", 2021, appendix). Full recomputation repeats the forward pass of the blocks; selective recomputation
    repeats what lies between the products.
    """
    strategy, model = work.strategy, work.model
    full = strategy.activation_checkpointing == "full"
    split = strategy.model_ranks
    attention = 12 * model.layers * model.hidden_size * work.length * work.tokens * (4 / 3 if full else 1)
    fused = activation_shape(model.model_type).fused_attention and model.fused_attention
    if work.causal and fused:
        attention /= 2
    in_fp32 = work.precision == "fp32"
    peak = machine.fp32_flops * FP32_SHARE if in_fp32 else machine.half_flops * machine.attention_share
    seconds = _product_seconds(work, machine) / split + attention / peak / split
    if machine.memory:
        passes = 3 if strategy.activation_checkpointing == "none" else 4
        moved = _elementwise_bytes(work, passes, fused) + _weight_bytes_moved(work)
        seconds += moved / (machine.memory * MEMORY_SHARE)
    return max(seconds, _host_seconds(work))


def _repeated(work: StepWork) -> float:
    """Return the share of the blocks' products that activation checkpointing repeats."""
    match work.strategy.activation_checkpointing:
        case "full":
            return 1.0
        case "selective":
            return work.recomputed_products
        case "none":
            return 0.0


def _host_seconds(work: StepWork) -> float:
    """Return the seconds in which the host launches the kernels of one pass and runs a strategy's hooks."""
    strategy, layers, repeated = work.strategy, work.model.layers, _repeated(work)
    of_layer = GATED_KERNELS_OF_A_LAYER if _is_gated(work.model) else KERNELS_OF_A_LAYER
    kernels = float(of_layer * layers + ADAPTER_KERNELS * work.adapted)
    kernels *= (1 + repeated * (REPEATED_LAUNCHES - 1)) / (3 if work.compiled else 1)
    hooks = HOOK_SECONDS[strategy.sharding] * layers * (1 + repeated / 3)
    pipeline = 1 if strategy.pipeline is None else strategy.pipeline.degree
    return (kernels * LAUNCH_SECONDS + hooks) / pipeline


def _product_seconds(work: StepWork, machine: Machine) -> float:
    """Return the seconds of the matrix products of one pass over all layers."""
    matrix = matrix_parameters(work.model, work.tied_head)
    head = work.model.vocabulary_size * work.model.hidden_size if work.scores_vocabulary else 0
    # Blocks with their adapters, and the head, which is neither repeated nor in fp8.
    blocks = max(0, matrix - head)
    trained = work.added or min(blocks, max(0, work.trained - head))
    rate, width = _product_rate(work, machine)
    speed = ProductSpeed(rate, machine.memory * MEMORY_SHARE, machine.units)
    reached = efficiency(products_of(work.model), work.tokens, speed, width, work.strategy.tensor)
    passing = (4 + 2 * _repeated(work)) * (blocks + work.added) * work.tokens / rate / reached.passing
    gradients = 2 * trained * work.tokens / rate / (1 if work.added else reached.weights)
    of_head = ((6 if work.chunked_loss else 4) * head + 2 * min(head, work.trained)) * work.tokens
    # The head is not in fp8.
    of_fp8 = work.precision == "fp8"
    return passing + gradients + of_head / (machine.half_flops * machine.matmul_share if of_fp8 else rate)


def _product_rate(work: StepWork, machine: Machine) -> tuple[float, int]:
    """Return the operations a second of large products in the blocks, and the bytes of an element."""
    match work.precision:
        case "fp32" if work.tf32 and machine.tf32_flops:
            # Not attention: torch's fused kernels for fp32 do not follow the setting.
            return machine.tf32_flops * machine.matmul_share, 4
        case "fp32":
            return machine.fp32_flops * FP32_SHARE, 4
        case "fp8":
            return 2 * machine.half_flops * (FP8_SHARE if work.compiled else FP8_EAGER_SHARE), 1
        case _:
            return machine.half_flops * machine.matmul_share, 2


def _elementwise_bytes(work: StepWork, passes: int, fused: bool) -> float:
    """Return the bytes that a pass moves between its matrix products."""
    model, strategy = work.model, work.strategy
    hidden, feed_forward = _eager_bytes(model) if not work.compiled else COMPILED_BYTES
    # Split layers share the feed-forward width; the hidden width is whole on each tensor rank.
    norms = hidden * model.hidden_size / (strategy.tensor if work.split_norms else 1)
    of_layer = norms + feed_forward * model.intermediate_size / strategy.tensor
    of_layer += work.adapter_bytes * work.adapted_width / model.layers / strategy.tensor
    if not fused:
        of_layer += SCORE_BYTES * model.attention_heads * work.length / strategy.tensor
    stages = 1 if strategy.pipeline is None else strategy.pipeline.degree
    total = passes * of_layer * model.layers / stages
    if work.scores_vocabulary:
        total += LOGIT_BYTES * model.vocabulary_size / strategy.tensor
    return total * work.tokens


def _eager_bytes(model: ModelFacts) -> tuple[float, float]:
    """Return the bytes that eager kernels move for each element of the hidden and of the feed-forward width."""
    if _is_gated(model):
        return RMS_NORM_BYTES, GATE_BYTES
    return LAYER_NORM_BYTES, ACTIVATION_BYTES * activation_shape(model.model_type).feed_forward


def _is_gated(model: ModelFacts) -> bool:
    """Return whether the layers are like Llama's, whose norm is several kernels in transformers, and keeps its
    normalised input.
    """
    return activation_shape(model.model_type).norm_inputs > 2


def _weight_bytes_moved(work: StepWork) -> float:
    """Return the bytes of conversions of weights and sums of gradients in one pass."""
    strategy = work.strategy
    held = work.model.parameters / strategy.model_ranks
    # Under autocast; frozen weights of an adapter in bf16 are held in 16 bits.
    converts = strategy.name in ("single", "ddp") and work.precision != "fp32"
    wide = work.trained if work.added and work.precision == "bf16" else held - work.four_bit
    passes = 3 if strategy.activation_checkpointing == "full" else 2
    return (
        (CAST_BYTES * wide if converts else 0.0)
        + ACCUMULATE_BYTES * work.trained / strategy.model_ranks
        + DEQUANTIZE_BYTES * passes * work.four_bit
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
    held, trained = work.held_bytes(work.width) / split, work.trained / split
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
    own = trained / (work.data_ranks if sharded else 1)
    if strategy.name == "fsdp" and strategy.fsdp_sharding == "hybrid":
        own = trained / machine.gpus_per_node
    if strategy.offload_optimizer == "none" and strategy.offload_parameters == "none":
        if not machine.memory:
            return 0.0, 0.0
        moved = OPTIMIZER_BYTES[work.optimizer] * own
        if strategy.name == "ddp" and sharded:
            moved += MESSAGE_BYTES * trained
        return moved / (machine.memory * MEMORY_SHARE), 0.0
    torch_steps = strategy.name == "fsdp"
    of_node = own * machine.gpus_per_node
    seconds = of_node * machine.adam_seconds(TORCH_ADAM_SECONDS if torch_steps else CPU_ADAM_SECONDS)
    if strategy.offload_optimizer == "nvme":
        # Master copy and moments are read and written, the gradient is read.
        seconds += of_node * 28 / DISK_BYTES
    # DeepSpeed's updated weights go to the device at once; fsdp's stay on the host, and are counted as streams.
    copied = 0.0 if torch_steps or strategy.offload_parameters != "none" else own * work.width
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
    return max(0.0, reading + work.accumulation * _host_seconds(work) - computing)
