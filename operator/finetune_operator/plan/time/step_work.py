"""Work of one process in a step, and the rates of the machine that does it."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_contract.choices import OptimizerName, Precision
from finetune_contract.facts import ModelFacts
from finetune_contract.trainer_job import Strategy
from finetune_operator.plan.memory.adapter_sizes import PACKED_BYTES
from finetune_operator.plan.memory.memory_workload import rounded_weights

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
ATTENTION_SHARE = 0.32
"""Share of the 16-bit peak in fused attention, forward and backward together: FlashAttention-2, which torch has,
reaches at most 335 of an H100's 989 TFLOP/s (Dao, "FlashAttention-2", 2023, figure 7).
"""
A100_ATTENTION_SHARE = 0.6
"""Share on an A100: 189 of 312 TFLOP/s with a causal mask and heads of 128 (the same, figure 4)."""
ADAPTER_KERNELS = 29
"""Kernels that an adapter with dropout adds to a linear layer: 20 of those operations (peft 0.21)."""
ADAPTER_BYTES = 13.0
"""Bytes that the eager kernels of an adapter's forward pass read and write for a token, for each element of the inputs
and outputs of a linear layer: the input is converted to fp32, which the adapter's weights have, and back, and read
(14); the adapter's output is written, scaled and added (12). Products of so small a rank take no more than that.
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
UPLINK_GPUS = 2
"""GPUs that share one uplink to the host on boards with 8 of them (block diagrams of DGX A100 and H100)."""
HOP_SECONDS = 8e-6
"""Latency of a message between nodes, of which a ring collective waits for one for each node."""
LINK_SECONDS = 1.5e-6
"""Latency of a message between GPUs of a node."""
CPU_ADAM_CORES = 12
"""Cores that saturate the memory of a socket, at some 10 GB/s each."""


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

    def gathered_bytes(self, ranks: int) -> float:
        """Return the bytes of one copy of all weights as `ranks` processes gather them: those of layers in fp8 have
        one.
        """
        rounded = rounded_weights(self.model, self.strategy, self.precision, ranks)
        return self.held_bytes(self.width) - (self.width - 1) * rounded

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
