"""Dropout from shared random numbers equals torch's own in effect, and a job trains with it on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from finetune_trainer.training.passes.dropout import SharedBitsDropout, share_random_bits

COUNT = 1_000_003
"""Elements, no multiple of four; shares are accurate to a thousandth."""


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_so_many_are_dropped_and_the_rest_keeps_the_expectation(share: float):
    torch.manual_seed(1)
    ones = torch.ones(COUNT)
    out = SharedBitsDropout(share)(ones)
    kept = out[out != 0]
    assert 1 - len(kept) / COUNT == pytest.approx(share, abs=2e-3)
    assert kept.unique().tolist() == pytest.approx([1 / (1 - share)], rel=2e-4)
    # Exact for the share that is really dropped.
    dropped = round(share * 65536) / 65536
    assert kept[0].item() * (1 - dropped) == pytest.approx(1, rel=1e-6)


def test_neighbours_are_dropped_independently():
    torch.manual_seed(2)
    gone = (SharedBitsDropout(0.5)(torch.ones(COUNT - 3).view(-1, 4)) == 0).double()
    between = torch.corrcoef(gone.T) - torch.eye(4)
    assert between.abs().max() < 0.01
    assert (gone.mean(0) - 0.5).abs().max() < 0.01
    later = torch.corrcoef(torch.stack([gone[:-1, 0], gone[1:, 0]]))[0, 1]
    assert abs(later) < 0.01


def test_dropout_gradient_follows_the_mask_under_recomputation():
    torch.manual_seed(3)
    layer = SharedBitsDropout(0.3)
    given = torch.randn(64, 33, requires_grad=True)
    out = checkpoint(lambda each: layer(each).sin(), given, use_reentrant=False)
    out.sum().backward()
    kept = out != 0
    scale = 65536 / (65536 - round(0.3 * 65536))
    expected = torch.where(kept, scale * (given * scale).cos(), 0)
    assert 0.6 < kept.double().mean() < 0.8
    torch.testing.assert_close(given.grad, expected)


def test_dropout_uses_the_generator_of_torch_and_is_off_in_evaluation():
    layer, given = SharedBitsDropout(0.5), torch.randn(1000).to(torch.bfloat16)
    torch.manual_seed(4)
    first, second = layer(given), layer(given)
    torch.manual_seed(4)
    assert torch.equal(layer(given), first)
    assert not torch.equal(first, second)
    assert first.dtype == torch.bfloat16
    assert layer.eval()(given) is given
    assert torch.equal(SharedBitsDropout(1.0)(given), torch.zeros_like(given))
    assert torch.equal(SharedBitsDropout(0.0)(given), given)


def test_other_tensors_are_left_to_torch():
    layer = SharedBitsDropout(0.5)
    assert layer(torch.ones(8, device="meta")).device.type == "meta"
    torch.manual_seed(5)
    here = SharedBitsDropout(0.5, inplace=True)(torch.ones(1000))
    torch.manual_seed(5)
    assert torch.equal(here, nn.Dropout(0.5)(torch.ones(1000)))


def test_only_plain_dropout_layers_are_replaced():
    class Own(nn.Dropout):
        pass

    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.ModuleDict({"a": nn.Dropout(0.3)}), Own(0.4))
    model[2].eval()
    assert share_random_bits(model) == 2
    assert [(type(each).__name__, each.p, each.training) for each in model.modules() if hasattr(each, "p")] == [
        ("SharedBitsDropout", 0.2, True),
        ("SharedBitsDropout", 0.3, False),
        ("Own", 0.4, True),
    ]


@pytest.mark.parametrize(("arguments", "shared"), [({}, True), ({"torch_compile": True}, False)], ids=["", "compiled"])
def test_a_job_on_a_cpu_trains_with_it_unless_compiled(
    arguments: dict[str, object], shared: bool, dropout_bench, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[bool] = []
    original = SharedBitsDropout.forward

    def noticed(self: SharedBitsDropout, input: torch.Tensor) -> torch.Tensor:
        seen.append(self.training)
        return original(self, input)

    monkeypatch.setattr(SharedBitsDropout, "forward", noticed)
    if arguments:
        # This backend compiles nothing, so the test waits for no compiler.
        arguments = {**arguments, "torch_compile_backend": "eager"}
    dropout_bench.at(tmp_path / "w").with_training(max_steps=1, arguments=arguments).train_here()
    assert any(seen) == shared
