"""Efficiency of matrix products by shape: large ones reach a GPU's usual share of its peak, small ones less.

A product of m x k by k x n matrices is computed in tiles of the result, one for each multiprocessor at a time (NVIDIA,
"Matrix Multiplication Background User's Guide", sections on tile and wave quantization). The last wave of tiles fills
half of the multiprocessors on average, and a result with few tiles leaves the others idle. It takes no less time than
reading both factors and writing the result (Williams et al., "Roofline", 2009).

Calibration: Qwen 7B with LoRA on one A100, whose 512 tokens take 1.19 times as long a token as 4,096 (published runs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from finetune_contract.facts import ModelFacts

TILE = 128
"""Rows and columns of a tile; the library also has tiles of 256 x 128 and of 64 x 64."""


@dataclass(frozen=True)
class Product:
    """Linear layers of one shape. A pass of one token multiplies with each of them, or with `share` of them."""

    inputs: float
    outputs: float
    count: float
    """Number of layers of this shape in the model."""
    share: float = 1.0
    """Part of the tokens that pass one of them: less than 1 for experts of a mixture."""


@dataclass(frozen=True)
class ProductSpeed:
    """Speed of matrix products on one GPU."""

    rate: float
    """Operations a second of a large product."""
    memory: float
    """Bytes a second of its memory; 0: unknown."""
    multiprocessors: int
    """Multiprocessors, each of which computes a tile at a time; 0: unknown."""

    def seconds(self, rows: float, inner: float, columns: float, width: int) -> float:
        """Return the time to multiply rows x inner by inner x columns elements of `width` bytes."""
        computing = 2 * rows * inner * columns / self.rate / self._filled(rows, columns)
        if not self.memory:
            return computing
        moved = width * (rows * inner + inner * columns + rows * columns)
        return max(computing, moved / self.memory)

    def _filled(self, rows: float, columns: float) -> float:
        """Return the mean share of the multiprocessors that compute."""
        if not self.multiprocessors:
            return 1.0
        waves = rows * columns / TILE**2 / self.multiprocessors
        return waves / max(1.0, waves + 0.5)


@dataclass(frozen=True)
class Efficiency:
    """Speed of a model's products as a share of that of large ones."""

    passing: float
    """Products with weights: the forward pass, and the gradients of inputs."""
    weights: float
    """Gradients of weights, whose inner dimension is the tokens."""


def efficiency(products: Sequence[Product], tokens: float, speed: ProductSpeed, width: int, split: int) -> Efficiency:
    """Return the efficiency of one pass over `tokens` tokens; `split`: tensor ranks that share each layer's outputs."""
    ideal = passing = weights = 0.0
    for product in products:
        rows, outputs = max(1.0, tokens * product.share), product.outputs / split
        ideal += product.count * 2 * rows * product.inputs * outputs / speed.rate
        forward = speed.seconds(rows, product.inputs, outputs, width)
        backward = speed.seconds(rows, outputs, product.inputs, width)
        passing += product.count * (forward + backward) / 2
        weights += product.count * speed.seconds(product.inputs, rows, outputs, width)
    return Efficiency(ideal / passing, ideal / weights) if ideal else Efficiency(1.0, 1.0)


def products_of(model: ModelFacts) -> tuple[Product, ...]:
    """Return the products of a model's blocks; square ones of its width where its linear layers are not known."""
    return tuple(_products(model)) or (Product(model.hidden_size, model.hidden_size, model.layers),)


def _products(model: ModelFacts) -> Iterator[Product]:
    # The n layers of a name have one shape: sums over them are n i, n o and n i o.
    for name, layer in model.linear_layers.items():
        if layer.weights and ".experts." not in f".{name}":
            yield Product(
                inputs=layer.weights / layer.outputs,
                outputs=layer.weights / layer.inputs,
                count=layer.inputs * layer.outputs / layer.weights,
            )
    if model.experts and model.idle_parameters:
        yield from _experts(model)


def _experts(model: ModelFacts) -> Iterator[Product]:
    """Yield the products of gated experts. Of E experts a token passes c of width w, so f = c w is the width that it
    passes, and (E - c) 3 h w weights of a block are idle.
    """
    hidden, feed_forward = model.hidden_size, model.intermediate_size
    ratio = 1 + model.idle_parameters / (3 * model.layers * hidden * feed_forward)
    width, count = feed_forward * ratio / model.experts, model.layers * model.experts
    yield Product(hidden, width, 2 * count, share=1 / ratio)
    yield Product(width, hidden, count, share=1 / ratio)
