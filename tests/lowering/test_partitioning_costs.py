"""Never slower than XNNPACK alone: activations stay with convolutions, and measure=True keeps the fastest program."""

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.lowering import PartitionerOptions, measured

OURS = "KernelPyTorchBackend"


class SqueezeExcite(torch.nn.Module):
    """As in EfficientNet: convolutions with SiLU between them, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.Conv2d(8, 4, 1)
        self.down, self.up = torch.nn.Conv2d(8, 2, 1), torch.nn.Conv2d(2, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.silu(self.wide(x))
        gate = self.up(torch.nn.functional.silu(self.down(x.mean((2, 3), keepdim=True))))
        return self.narrow(x * gate.sigmoid())


def test_activations_stay_with_the_convolutions_around_them() -> None:
    torch.manual_seed(0)
    program = kp.lower(SqueezeExcite().eval(), (torch.randn(1, 4, 8, 8),))
    assert [delegate.backend for delegate in program.report.delegates] == ["XnnpackBackend"], program.report
    assert program.compare()[0].snr > 100
    reasons = {refusal.reason for refusal in program.report.passed_on}
    assert "stands beside a convolution; a delegate of its own costs more than it gains" in reasons


def test_the_fastest_way_is_kept(monkeypatch) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)).eval()
    real = measured.seconds_of({"it": kp.lower(model, (torch.randn(2, 16),))})
    assert real["it"] > 0
    for best in ("XNNPACK alone", "KernelPyTorchBackend as asked"):
        monkeypatch.setattr(measured, "seconds_of", lambda made, best=best: {n: 1.0 + (n != best) for n in made})
        program = kp.lower(model, (torch.randn(2, 16),), measure=True)
        assert program.report.measured[0] == (best, 1.0)
        assert len(program.report.measured) == 3
        assert bool(program.report.ours) == (best != "XNNPACK alone")
        assert program.compare()[0].snr > 100
        assert f"kept: {best}, 1000.000 ms" in str(program.report)


class Attends(torch.nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return kp.attention(q, q, q, kp.masks.causal())


def test_a_way_that_cannot_be_lowered_is_left_out() -> None:
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(ValueError, match=r"no kernel for \(kernel_pytorch::attention: no rule for this operator\)"):
        kp.lower(Attends().eval(), (q,), options=PartitionerOptions(attention=False))
    program = kp.lower(Attends().eval(), (q,), measure=True)
    assert "XNNPACK alone" not in dict(program.report.measured)
    assert len(program.report.ours) == 1
