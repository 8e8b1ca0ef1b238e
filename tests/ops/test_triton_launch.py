"""Launching Triton kernels: the memory that they are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_pytorch.fp8.quantize import QuantizeSpec, quantize
from kernel_pytorch.ops import triton_launch
from kernel_pytorch.ops.fp8_cast import fp8_cast
from kernel_pytorch.ops.triton_launch import Place, empty, number_beside, zeros
from kernel_pytorch.testing import poisoned

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current stream of a GPU that is not there, whose memory is the CPU's."""
    current = [0]
    active = SimpleNamespace(get_current_stream=lambda index: current[index - 7])
    monkeypatch.setattr(triton_launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(triton_launch, "_zeros", {})
    monkeypatch.setattr(triton_launch, "_numbers", {})
    return current


class OnGpu:
    is_cuda, device = True, torch.device("cpu")

    def __init__(self, address: int = 0) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return 7

    def new_zeros(self, size: int, **options: Any) -> torch.Tensor:
        return torch.zeros(size, **options)


def pieces(number: int, size: int = 48) -> list[Place]:
    return [zeros(OnGpu(), size) for _ in range(number)]  # type: ignore[arg-type]


def test_every_scratch_buffer_is_zero_and_unshared(stream: list[int]) -> None:
    taken = pieces(1500)
    bytes_taken: set[int] = set()
    for piece in taken:
        memory = piece.at(0, torch.uint8).view()[:96]
        assert piece.data_ptr() % 16 == 0
        assert memory.numel() == 96
        assert not memory.any()
        assert memory.data_ptr() == piece.data_ptr()
        addresses = set(range(piece.data_ptr(), piece.data_ptr() + 96))
        assert not addresses & bytes_taken
        bytes_taken |= addresses
        memory.fill_(255)
    assert len({piece.tensor.data_ptr() for piece in taken}) == 3  # a piece of memory lasts for 512


def test_other_streams_and_larger_sizes_get_memory_of_their_own(stream: list[int]) -> None:
    first = pieces(1)[0]
    large = pieces(1, 4096)[0]
    assert large.first_byte == 0
    assert large.tensor.numel() == 1024
    stream[0] = 5
    assert {piece.tensor.numel() for piece in pieces(3)} == {12}
    stream[0] = 0
    assert pieces(1)[0].tensor is first.tensor


def test_zeros_that_were_made_in_inference_mode_serve_training(stream: list[int]) -> None:
    with torch.inference_mode():
        assert not pieces(1)[0].tensor.is_inference()


def test_beside_a_tensor_of_a_cpu() -> None:
    one, other = zeros(torch.ones(2), 48), zeros(torch.ones(2), 48)
    assert one.tensor.tolist() == [0] * 12
    assert one.data_ptr() != other.data_ptr()


def number(address: int) -> Place | None:
    return number_beside(OnGpu(address))  # type: ignore[arg-type]


def test_a_scalar_persists_for_its_address_until_evicted(stream: list[int]) -> None:
    numbers = [number(address) for address in range(4096)]
    assert [number(address) for address in range(4096)] == numbers
    number(5000)
    assert number(1) is numbers[1]
    assert number(0) is not numbers[0]
    stream[0] = 5
    assert number(7) is None


def test_a_scalar_is_float32_and_usable_in_training(stream: list[int]) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.inference_mode():
            found = number(3)
    finally:
        torch.set_default_dtype(default)
    assert found is not None
    assert (found.tensor.dtype, found.tensor.tolist()) == (torch.float32, [0.0])
    assert not found.tensor.is_inference()


SHAPES = [(), (5,), (3, 4), torch.Size((3, 4)), (0, 0)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_empty_tensors_equal_torchs(shape: tuple[int, ...], device: str) -> None:
    x = torch.ones(2, device=device)
    for dtype in (torch.float8_e4m3fn, torch.float32):
        found, wanted = empty(x, shape, dtype), x.new_empty(shape, dtype=dtype)
        assert (found.shape, found.dtype, found.device) == (wanted.shape, wanted.dtype, wanted.device)
        assert found.is_contiguous()
        with torch.inference_mode():
            assert empty(x, shape, dtype).is_inference()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_empty_allocations_can_be_poisoned(device: str) -> None:
    x = torch.ones(2, device=device)
    with poisoned():
        assert empty(x, (3, 4), torch.float32).isnan().all()


@needs_cuda
def test_a_graph_that_is_replayed_finds_zeros_every_time() -> None:
    """Each replay launches with the same addresses; the scale must be that of its own x."""
    x = torch.empty(96, 160, device="cuda", dtype=torch.bfloat16)
    counts = torch.zeros(1, 2, 4, device="cuda", dtype=torch.int64)

    def run() -> Any:
        return quantize(x, QuantizeSpec("e4m3fn", "tensor", True, False), counts, 0)

    x.fill_(1.0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for amplitude in (8.0, 0.5, 3.0):
        x.normal_().mul_(amplitude)
        graph.replay()
        torch.cuda.synchronize()
        eager = fp8_cast(x, transposed=True, kernel="torch")
        assert torch.equal(found.inverse, eager.inverse)
        for one, other in ((found.data, eager.data), (found.data_t, eager.data_t)):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
