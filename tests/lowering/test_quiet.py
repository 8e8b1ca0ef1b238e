"""Lowering is quiet: warnings of the libraries underneath are shown where they are asked for."""

import warnings

import torch

import kernel_pytorch as kp
from kernel_pytorch.lowering.quiet import quiet_libraries


class Warns(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("of a library underneath", stacklevel=1)
        return torch.nn.functional.gelu(x)


def messages(*, loud: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as seen, quiet_libraries(not loud):
        warnings.simplefilter("always")
        kp.lower(Warns().eval(), (torch.randn(2, 8),))
    return [str(one.message) for one in seen]


def test_lowering_is_quiet_unless_asked() -> None:
    assert messages(loud=False) == []
    assert "of a library underneath" in messages(loud=True)
