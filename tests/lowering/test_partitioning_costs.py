"""Never slower than XNNPACK alone: activations stay with convolutions, and measure=True keeps the fastest program."""

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.lowering import PartitionerOptions, measured
from kernel_pytorch.lowering.target import CPU

OURS = "KernelPyTorchBackend"


class SqueezeExcite(torch.nn.Module):
    """As in EfficientNet and MobileNetV3: convolutions, batch norms and activations between them, and a gate."""

    def __init__(self, activation: torch.nn.Module, gate: torch.nn.Module, linear: bool) -> None:
        super().__init__()
        self.wide, self.norm, self.activation = (
            torch.nn.Conv2d(4, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8),
            activation,
        )
        self.narrow, self.gate = torch.nn.Conv2d(8, 4, 1), gate
        layers = [torch.nn.Linear(8, 2), torch.nn.Linear(2, 8)] if linear else None
        self.down, self.up = layers or [torch.nn.Conv2d(8, 2, 1), torch.nn.Conv2d(2, 8, 1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.activation(self.norm(self.wide(x)))
        mean = x.mean((2, 3), keepdim=True)
        if isinstance(self.down, torch.nn.Linear):
            share = self.up(self.activation(self.down(mean.flatten(1))))[:, :, None, None]
        else:
            share = self.up(self.activation(self.down(mean)))
        return self.narrow(x * self.gate(share))


@pytest.mark.parametrize(
    ("activation", "gate", "linear"),
    [
        (torch.nn.SiLU, torch.nn.Sigmoid, False),
        (torch.nn.SiLU, torch.nn.Sigmoid, True),
        (torch.nn.Hardswish, torch.nn.Hardsigmoid, False),
        (torch.nn.GELU, torch.nn.Sigmoid, False),
    ],
)
def test_work_between_convolutions_stays_with_them(activation, gate, linear: bool) -> None:
    torch.manual_seed(0)
    model, x = SqueezeExcite(activation(), gate(), linear).eval(), (torch.randn(1, 4, 8, 8),)
    program = kp.lower(model, x)
    alone = kp.lower(model, x, options=CPU.alternatives["XNNPACK alone"])
    assert len(program.report.delegates) <= len(alone.report.delegates), program.report
    assert not program.report.ours, program.report
    assert program.compare()[0].snr > 100
    reasons = {refusal.reason for refusal in program.report.passed_on}
    assert "stands beside work of another backend; a delegate of its own costs more than it gains" in reasons


def test_a_classifier_stays_with_the_convolutions_before_it() -> None:
    torch.manual_seed(0)
    head = torch.nn.Flatten(), torch.nn.Linear(8, 16), torch.nn.Hardswish(), torch.nn.Linear(16, 4)
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.AdaptiveAvgPool2d(1), *head).eval()
    program = kp.lower(model, (torch.randn(1, 4, 8, 8),))
    assert [delegate.backend for delegate in program.report.delegates] == ["XnnpackBackend"], program.report
    assert program.compare()[0].snr > 100


def test_norms_between_convolutions_are_taken() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv1d(4, 8, 3), torch.nn.LayerNorm(6), torch.nn.Conv1d(8, 4, 3)).eval()
    program = kp.lower(model, (torch.randn(1, 4, 8),))
    assert len(program.report.ours) == 1, program.report
    assert program.compare()[0].snr > 100


class ConvNext(torch.nn.Module):
    """A block of ConvNeXt: a norm over channels and two linears between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (torch.nn.Conv2d(8, 8, 7, padding=3, groups=8) for _ in range(2))
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x).permute(0, 2, 3, 1))
        y = self.down(torch.nn.functional.gelu(self.up(y)))
        return self.last(x + y.permute(0, 3, 1, 2))


def test_linears_between_convolutions_stay_with_them_and_their_norm_does_not() -> None:
    torch.manual_seed(0)
    program = kp.lower(ConvNext().eval(), (torch.randn(1, 8, 20, 20),))
    (ours,) = program.report.ours
    assert dict(ours.operators).keys() == {"aten::permute_copy", "aten::native_layer_norm"}, program.report
    assert program.report.count("XnnpackBackend", "aten::linear") == 2, program.report
    reasons = {refusal.reason for refusal in program.report.passed_on}
    assert "stands between convolutions; their backend runs it as fast" in reasons
    assert program.compare()[0].snr > 100


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
