"""The delegate's kernels against the definitions, through payloads made by hand: every case, format and target."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction import registered_op
from kernel_pytorch.lowering.constants import Constants
from kernel_pytorch.lowering.direct import DirectProgram
from kernel_pytorch.lowering.emitter import Emitter
from kernel_pytorch.lowering.packing import pack_quantized_weights
from kernel_pytorch.lowering.payload import OpCode, Reduction, Step
from kernel_pytorch.lowering.rules import packed_weights
from kernel_pytorch.lowering.strided import Storage, Strided, contiguous_strides
from kernel_pytorch.testing import compare

FORMATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ATTENTION = registered_op("attention")
RMS_NORM = registered_op("rms_norm")
ATTENTION_CASES = [
    case
    for case in ATTENTION.cases
    if not case.benchmark and case.name not in ("parts", "few-queries-padded")  # masks that the runtime refuses
]


class Payloads:
    """An emitter whose inputs are tensors at hand instead of a graph's."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        self.emitter = Emitter(Constants.__new__(Constants), {})
        self.inputs = [tensor.contiguous() for tensor in inputs]
        self.views = []
        for tensor in self.inputs:
            node = torch.fx.Graph().placeholder(f"input_{len(self.views)}")
            node.meta["val"] = tensor
            self.emitter.add_input(node)
            self.views.append(self.emitter.result(node))

    def run(self, code: OpCode, out: torch.Tensor, ints=(), floats=(), operands=None) -> torch.Tensor:
        dims = tuple(out.shape)
        into = Strided(Storage(out.dtype, out.numel()), dims, contiguous_strides(dims))
        self.emitter.emit(code, self.views if operands is None else operands, [into], ints, floats)
        DirectProgram(self.emitter.finish([("out", into)]))(self.inputs, [out])
        return out


def run_attention(q, k, v, mask, scale, wanted):
    made = Payloads(q, k, v)
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype)
    made.run(OpCode.ATTENTION, out, tuple(mask.code.tolist()), (scale,), [*made.views, None])
    return out


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_attention_is_within_its_budget(case, number_format: str) -> None:
    arguments = case.arguments(FORMATS[number_format], torch.device("cpu"))

    def run(*values):
        lse = ATTENTION.reference(*(x.double() if isinstance(x, torch.Tensor) else x for x in values))[1]
        return run_attention(*values), lse.float()  # the delegate gives out alone

    for comparison in compare(ATTENTION, run, arguments, gradients=False):
        assert comparison.ok, comparison


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize(
    "case", [case for case in RMS_NORM.cases if not case.benchmark], ids=lambda case: case.name
)
def test_rms_norm_is_within_its_budget(case, number_format: str) -> None:
    arguments = case.arguments(FORMATS[number_format], torch.device("cpu"))

    def run(x, weight, eps):
        rstd = torch.rsqrt(x.double().square().mean(dim=-1) + eps).float()
        if x.numel() == 0:
            return x.contiguous(), rstd
        made = Payloads(x, *([] if weight is None else [weight]))
        operands = [*made.views, None][:2]
        return made.run(OpCode.RMS_NORM, torch.empty_like(x).contiguous(), (), (eps,), operands), rstd

    for comparison in compare(RMS_NORM, run, arguments, gradients=False):
        assert comparison.ok, comparison


SCALES = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([-200.0, -88.0, -1e-6, 0.0, 1e-30, 88.0, 200.0])])
UNARY = {
    Step.EXP: torch.exp,
    Step.SIGMOID: torch.sigmoid,
    Step.TANH: torch.tanh,
    Step.ERF: torch.erf,
    Step.SILU: torch.nn.functional.silu,
    Step.GELU: torch.nn.functional.gelu,
    Step.GELU_TANH: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    Step.NEGATE: torch.neg,
    Step.ABSOLUTE: torch.abs,
    Step.RELU: torch.relu,
    Step.SIN: torch.sin,
    Step.COS: torch.cos,
    Step.SQRT: torch.sqrt,
    Step.RSQRT: torch.rsqrt,
    Step.LOG: torch.log,
    Step.RECIPROCAL: torch.reciprocal,
}


@pytest.mark.parametrize("step", UNARY, ids=lambda step: step.name.lower())
def test_a_step_is_as_exact_as_float32_allows(step: Step) -> None:
    positive = step in (Step.SQRT, Step.RSQRT, Step.LOG, Step.RECIPROCAL)
    x = (SCALES.abs() + 1e-20) if positive else SCALES
    found = Payloads(x).run(OpCode.POINTWISE, torch.empty_like(x), (step, 1, 0, 0, 1)).double()
    exact = UNARY[step](x.double())
    finite = exact.float().isfinite()
    assert torch.equal(found.float()[~finite], exact.float()[~finite])
    # Where results underflow in float32 their last bits are gone; elsewhere four roundings are the most, and one
    # more for each power of two in the argument of a function that grows like one.
    error = (found - exact).abs()[finite]
    allowed = exact.abs()[finite] * 2.0**-24 * (8 + 2 * x.abs().double()[finite]) + 1e-37
    if step in (Step.SIN, Step.COS, Step.GELU, Step.GELU_TANH, Step.ERF):
        allowed = allowed + 1e-7 * exact.abs()[finite].clamp(max=1.0) + 1e-9
    worst = (error / allowed).argmax()
    assert bool((error <= allowed).all()), (x[finite][worst], found[finite][worst], exact[finite][worst])


@pytest.mark.parametrize("step", [Step.EXP, Step.SIGMOID, Step.TANH, Step.SILU, Step.RELU, Step.ABSOLUTE])
def test_a_step_passes_nan_on(step: Step) -> None:
    x = torch.tensor([float("nan"), 1.0])
    found = Payloads(x).run(OpCode.POINTWISE, torch.empty_like(x), (step, 1, 0, 0, 1))
    assert found[0].isnan()
    assert not found[1].isnan()


@pytest.mark.parametrize("number_format", ["float16", "bfloat16"])
def test_narrow_formats_are_read_and_rounded_exactly(number_format: str) -> None:
    """Every bit pattern is read, and numbers between, at the edges and too large are rounded as torch rounds them."""
    dtype = FORMATS[number_format]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = Payloads(every).run(OpCode.POINTWISE, torch.empty(2**16), (Step.COPY, 1, 0, 0, 1))
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (2**18,), generator=generator, dtype=torch.int64).to(torch.int32)
    numbers = torch.cat([bits.view(torch.float32), torch.tensor([65519.0, 65520.0, 6e-8, 2.9e-8, -0.0])])
    narrow = Payloads(numbers).run(
        OpCode.POINTWISE, torch.empty(len(numbers), dtype=dtype), (Step.COPY, 1, 0, 0, 1)
    )
    torch.testing.assert_close(narrow, numbers.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 64), (2, 3, 1000)])
def test_softmax_layer_norm_and_reductions(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * 4 + 1
    wide = x.double()
    softmax = Payloads(x).run(OpCode.SOFTMAX, torch.empty_like(x))
    torch.testing.assert_close(softmax.double(), wide.softmax(-1), rtol=2e-6, atol=1e-12)
    weight, bias = torch.randn(shape[-1]), torch.randn(shape[-1])
    layer = Payloads(x, weight, bias).run(OpCode.LAYER_NORM, torch.empty_like(x), (), (1e-5,))
    exact = torch.nn.functional.layer_norm(wide, shape[-1:], weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(layer.double(), exact, rtol=1e-5, atol=5e-6)
    for reduction, function in (
        (Reduction.SUM, torch.sum),
        (Reduction.MEAN, torch.mean),
        (Reduction.MAXIMUM, torch.amax),
    ):
        out = Payloads(x).run(OpCode.REDUCE, torch.empty(*shape[:-1], 1), (reduction,))
        torch.testing.assert_close(out.double(), function(wide, dim=-1, keepdim=True), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 1, 1), (3, 5, 33), (13, 64, 31), (25, 300, 96), (200, 17, 64)]
)
@pytest.mark.parametrize("biased", [True, False])
def test_linear(rows: int, inputs: int, outputs: int, biased: bool) -> None:
    x, weight, bias = torch.randn(2, rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    made = Payloads(x, *([bias] if biased else []))
    bias_view = made.views[1] if biased else None
    operands = [made.views[0], made.emitter.constant(packed_weights(weight)), bias_view, None]
    found = made.run(OpCode.LINEAR, torch.full((2, rows, outputs), torch.nan), (), (), operands)
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
    eager = torch.nn.functional.linear(x, weight, bias if biased else None).double()
    slack = (x.abs().double() @ weight.abs().double().T).max() * inputs * 2**-24
    assert (found.double() - exact).abs().max() <= 2 * (eager - exact).abs().max() + slack


@pytest.mark.parametrize("rows", [1, 2, 35])
@pytest.mark.parametrize(
    ("bits", "inputs", "outputs", "group"),
    [(4, 64, 33, 32), (4, 256, 40, 128), (4, 24, 8, 24), (8, 96, 64, 96), (8, 37, 5, 37), (8, 128, 64, 32)],
)
def test_quantized_linear(rows: int, bits: int, inputs: int, outputs: int, group: int) -> None:
    x, bias = torch.randn(2, rows, inputs) + 0.5, torch.randn(outputs)
    most = 2 ** (bits - 1)
    weight = torch.randint(-most, most, (outputs, inputs), dtype=torch.int8)
    scales = torch.rand(outputs, inputs // group) / most
    packed = pack_quantized_weights(weight, scales, bits=bits)
    made = Payloads(x, bias)
    constants = [made.emitter.constant(tensor) for tensor in (packed.weights, packed.scales, packed.sums)]
    operands = [made.views[0], *constants, made.views[1]]
    out = torch.full((2, rows, outputs), torch.nan)
    found = made.run(OpCode.QUANTIZED_LINEAR, out, (packed.bits, packed.group), (), operands)

    dequantized = weight.double() * scales.double().repeat_interleave(group, dim=1)
    # torchao's dynamic per-token quantization, in float32 as it is there
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero_point = (-128 - torch.round(low / scale)).clamp(-128, 127)
    data = (torch.round(x * (1 / scale)) + zero_point).clamp(-128, 127)
    exact = ((data - zero_point).double() * scale.double()) @ dequantized.T + bias.double()
    # Products of the data and of the zero point are summed apart, each at most 255 steps.
    magnitude = 2 * 255 * scale.double() * dequantized.abs().sum(-1) + bias.abs().double()
    assert ((found.double() - exact).abs() <= magnitude * (inputs // group + 6) * 2**-24).all()


def test_quantized_linear_is_what_torchao_defines() -> None:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    linear = torch.nn.Linear(256, 48)
    quantize_(linear, Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)))
    packed = pack_quantized_weights(linear.weight.qdata, linear.weight.scale, bits=4)
    x = torch.randn(7, 256)
    made = Payloads(x, linear.bias.detach())
    constants = [made.emitter.constant(tensor) for tensor in (packed.weights, packed.scales, packed.sums)]
    operands = [made.views[0], *constants, made.views[1]]
    found = made.run(OpCode.QUANTIZED_LINEAR, torch.full((7, 48), torch.nan), (4, 32), (), operands)
    torch.testing.assert_close(found, linear(x).detach(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "bits=5: use 4 or 8"),
        ({"bits": 4, "weight": torch.full((2, 32), 9, dtype=torch.int8)}, "4 bits hold -8 to 7"),
        ({"scales": torch.ones(2, 5)}, "5 groups for 32 inputs"),
        ({"weight": torch.ones(2, 32)}, "pass the integers as torch.int8"),
    ],
)
def test_weights_that_cannot_be_packed_are_refused(changes: dict[str, object], message: str) -> None:
    arguments = {"weight": torch.ones(2, 32, dtype=torch.int8), "scales": torch.ones(2, 1), "bits": 8, **changes}
    weight, scales = arguments.pop("weight"), arguments.pop("scales")
    with pytest.raises((ValueError, TypeError), match=message):
        pack_quantized_weights(weight, scales, **arguments)


def test_softmax_of_nothing_to_choose_is_what_torch_says() -> None:
    x = torch.tensor([[float("-inf"), 0.0, float("-inf")], [float("nan"), 0.0, 1.0], [1e30, -1e30, 1e30]])
    found = Payloads(x).run(OpCode.SOFTMAX, torch.empty_like(x))
    torch.testing.assert_close(found, x.softmax(-1), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16])
def test_attention_with_a_mask_tensor(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(2, 4, 33, 16), torch.randn(2, 2, 47, 16), torch.randn(2, 2, 47, 24)
    bias = torch.rand(2, 4, 33, 47) < 0.5 if dtype == torch.bool else torch.randn(2, 4, 33, 47).to(dtype)
    if dtype == torch.bool:
        bias[0, 0, 3] = False  # a row that attends to nothing
    made = Payloads(q, k, v, bias)
    mask = kp.masks.causal() & kp.masks.window(20)
    out = torch.full((2, 4, 33, 24), torch.nan)
    made.run(OpCode.ATTENTION, out, tuple(mask.code.tolist()), (0.3,))
    keep = mask.dense(33, 47)
    if dtype == torch.bool:
        scores_bias = torch.where(keep & bias, 0.0, -torch.inf).double()
    else:
        scores_bias = torch.where(keep, bias.double(), -torch.inf)
    wide = [x.double().repeat_interleave(4 // x.shape[1], dim=1) for x in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(-1, -2) * 0.3 + scores_bias
    exact = scores.softmax(-1).nan_to_num(0.0) @ wide[2]
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_attention_passes_nan_on_and_keeps_it_in_its_row() -> None:
    q, k, v = (torch.randn(1, 1, 40, 16) for _ in range(3))
    q[0, 0, 5, 3] = torch.nan
    out = run_attention(q, k, v, kp.masks.causal(), 0.25, "out")
    assert out[0, 0, 5].isnan().all()
    assert not out[0, 0, torch.arange(40) != 5].isnan().any()


TARGETS = """
import json, torch
import kernel_pytorch as kp
from test_lowering_kernels import run_attention
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 77, 40) for _ in range(3))
mask = kp.masks.causal() & (kp.masks.window(20) | kp.masks.sinks(3))
errors = []
for some in (q, q[:, :, 74:], q[:, :, 75:], q[:, :, 76:]):  # few rows have kernels of their own
    found = run_attention(some, k, v, mask, 0.2, "out").double()
    exact = kp.attention(some.double(), k.double(), v.double(), mask, scale=0.2)
    errors.append((found - exact).abs().max().item())
print(json.dumps(max(errors)))
"""


@pytest.mark.parametrize("target", ["avx512", "avx2", "baseline"])
def test_every_target_of_this_processor_computes_the_same(target: str) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])  # the package that this process has imported
    environment = {**os.environ, "KERNEL_PYTORCH_TARGET": target, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", TARGETS], env=environment, capture_output=True, text=True)
    if "has no such target" in done.stderr:
        pytest.skip(f"this processor has no {target}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) < 2e-6
