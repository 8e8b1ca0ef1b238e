"""kp.lower and kp.load: whole programs against eager, what is delegated and why not, what is refused at run time."""

import subprocess

import pytest
import torch
from torch.export import Dim

import kernel_pytorch as kp
from kernel_pytorch.cli import main
from kernel_pytorch.lowering import KernelPartitioner, KernelQuantizer, PartitionerOptions
from kernel_pytorch.lowering.build import _run, _tool, build, executorch_root
from kernel_pytorch.lowering.difference import difference
from kernel_pytorch.lowering.rewrite import recognised_mask
from lowering_models import Block

OURS = "KernelPyTorchBackend"
ATTENTION = "kernel_pytorch_lowering::attention"
LEAST_SNR = (
    100.0  # decibels; two float32 programs that add in other orders differ by far less than 60 dB would allow
)


@pytest.fixture(scope="module")
def dynamic_block() -> tuple[torch.nn.Module, kp.lowering.LoweredProgram]:
    torch.manual_seed(0)
    model = Block(kp.masks.causal() & (kp.masks.window(9) | kp.masks.sinks(2))).eval()
    shapes = ({1: Dim("length", min=2, max=100)},)
    return model, kp.lower(model, (torch.randn(2, 12, 64),), dynamic_shapes=shapes)


@pytest.mark.parametrize("length", [2, 3, 12, 37, 100])
def test_one_program_serves_every_length(dynamic_block, length: int) -> None:
    _, program = dynamic_block
    (found,) = program.compare(torch.randn(2, length, 64))
    assert found.snr > LEAST_SNR, found


def test_the_whole_block_is_delegated(dynamic_block) -> None:
    report = dynamic_block[1].report
    assert report.left == (), report
    assert report.count(OURS, ATTENTION) == 1
    assert report.count(OURS, "kernel_pytorch_lowering::rms_norm") == 1
    assert report.count(OURS, "aten::native_layer_norm") == 1
    assert report.count(OURS, "aten::linear") == 6
    assert len(report.delegates) == 1
    assert "KernelPyTorchBackend" in str(report)


def test_masks_of_batches_and_gaps_are_delegated() -> None:
    """Padding, intervals and dilated windows, which are data of the program as other masks are."""
    torch.manual_seed(0)
    scattered = kp.masks.from_dense(torch.rand(12, 12) < 0.6)
    mask = kp.masks.padding([5, 12], "left") & (kp.masks.dilated(2, 3) | scattered)
    program = kp.lower(Block(mask).eval(), (torch.randn(2, 12, 64),))
    assert program.report.count(OURS, ATTENTION) == 1
    assert program.compare()[0].snr > LEAST_SNR


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_linears_are_summed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 70), torch.nn.GELU(), torch.nn.Linear(70, 33)).eval()
    x = torch.randn(5, 300).to(dtype)
    program = kp.lower(model.to(dtype), (x,))
    assert program.report.left == (), program.report
    assert [delegate.backend for delegate in program.report.delegates] == [OURS]
    # Still narrow, though outputs are padded to panels: in float32 it would be more than twice as many.
    assert len(program.buffer) < 1.6 * sum(weight.nbytes for weight in model.parameters())
    with torch.no_grad():
        exact = model.double()(x.double())
    error = (program(x).double() - exact).abs().max() / exact.abs().max()
    assert error < 4 * torch.finfo(dtype).eps, error


def test_a_length_it_was_not_lowered_for_is_refused_by_name(dynamic_block) -> None:
    with pytest.raises(
        ValueError, match=r"input 0 is float32\[2, 101, 64\]; it was lowered for float32\[2, 100, 64\]"
    ):
        dynamic_block[1].load()(torch.randn(2, 101, 64))
    with pytest.raises(ValueError, match="lowered for 2 to 100"):
        dynamic_block[1].load()(torch.randn(2, 1, 64))


@pytest.mark.parametrize(
    "wrong", [torch.randn(2, 12, 63), torch.randn(2, 12, 64).double(), torch.randn(12, 64), torch.randn(3, 12, 64)]
)
def test_wrong_inputs_are_refused_by_name(dynamic_block, wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="input 0 is"):
        dynamic_block[1].load()(wrong)
    with pytest.raises(ValueError, match="takes 1 inputs, and 2 were given"):
        dynamic_block[1].load()(wrong, wrong)


def test_the_runner_gives_the_same_numbers_without_python(dynamic_block, tmp_path) -> None:
    model = Block().eval()
    x = torch.randn(1, 31, 64)
    program = kp.lower(model, (x,))
    program.save(tmp_path / "block.pte")
    (tmp_path / "x.bin").write_bytes(x.numpy().tobytes())
    command = [build().runner, "block.pte", "--input", "x.bin", "--output", "y.bin", "--repeat", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "ran 2 times" in done.stdout
    found = torch.frombuffer(bytearray((tmp_path / "y.bin").read_bytes()), dtype=torch.float32).view(1, 31, 64)
    torch.testing.assert_close(found, program(x), rtol=0, atol=0)
    (tmp_path / "x.bin").write_bytes(b"short")
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "x.bin has 5 bytes; input 0 takes 7936" in refused.stderr


def test_the_runner_links_neither_python_nor_torch() -> None:
    needed = subprocess.run(["ldd", build().runner], capture_output=True, text=True, check=True).stdout
    libraries = [line.split()[0] for line in needed.splitlines()]
    assert any(name.startswith("libkernel_pytorch_backend") for name in libraries)
    assert not [name for name in libraries if name.startswith(("libpython", "libtorch", "libc10"))]
    assert build().library.stat().st_size < 1_250_000  # kernels for five instruction sets


CONSUMER = """
cmake_minimum_required(VERSION 3.28)
project(consumer LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 17)
find_package(executorch REQUIRED)
find_package(kernel_pytorch REQUIRED)
add_executable(consumer main.cpp)
target_link_libraries(consumer PRIVATE executorch::runtime kernel_pytorch::backend)
"""
MAIN = """
#include <executorch/runtime/backend/interface.h>
#include <cstdio>
int main() {
  const auto* found = executorch::runtime::get_backend_class("KernelPyTorchBackend");
  std::puts(found != nullptr && found->is_available() ? "registered" : "missing");
}
"""


def test_a_cmake_project_links_one_target_and_has_the_delegate(tmp_path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(CONSUMER)
    (tmp_path / "main.cpp").write_text(MAIN)
    cmake, where = _tool("cmake"), f"-DCMAKE_PREFIX_PATH={build().prefix};{executorch_root()}"
    folders = ["-S", str(tmp_path), "-B", str(tmp_path / "made")]
    _run([cmake, *folders, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", where])
    _run([cmake, "--build", str(tmp_path / "made")])
    done = subprocess.run([tmp_path / "made" / "consumer"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "registered"


class Two(torch.nn.Module):
    """Attention without projections, on inputs as they come."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


sdpa = torch.nn.functional.scaled_dot_product_attention
FORMS = {
    "full": lambda q, k, v: sdpa(q, k, v),
    "causal": lambda q, k, v: sdpa(q, k, v, is_causal=True),
    "causal, fewer queries": lambda q, k, v: sdpa(q[:, :, :5], k, v, is_causal=True),
    "scaled": lambda q, k, v: sdpa(q, k, v, scale=0.5),
    "grouped": lambda q, k, v: sdpa(q, k[:, :2], v[:, :2], enable_gqa=True),
    "boolean mask": lambda q, k, v: sdpa(q, k, v, attn_mask=q[:, :1, :, :1] > k[:, :1, :, :1].transpose(-1, -2)),
    "added mask": lambda q, k, v: sdpa(q, k, v, attn_mask=q[:, :, :, :1] * 0.1),
    "three dimensions": lambda q, k, v: sdpa(q[0], k[0], v[0], is_causal=True),
    "transposed": lambda q, k, v: sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2),
    "value dim": lambda q, k, v: sdpa(q, k, v[..., :3]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_scaled_dot_product_attention_is_taken(form: str) -> None:
    torch.manual_seed(0)
    qkv = tuple(torch.randn(2, 4, 18, 8) for _ in range(3))
    program = kp.lower(Two(FORMS[form]).eval(), qkv)
    assert program.report.count(OURS, ATTENTION) == 1, program.report
    for found in program.compare():
        assert found.snr > LEAST_SNR, found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_formats_are_lowered(dtype: torch.dtype) -> None:
    x = torch.randn(1, 20, 64, dtype=dtype)

    def norm_and_attend(x):
        y = torch.nn.functional.rms_norm(x, (64,), eps=1e-6) * 1.5 + torch.nn.functional.gelu(x)
        heads = y.view(1, 20, 4, 16).transpose(1, 2)
        return kp.attention(heads, heads, heads, kp.masks.causal()).transpose(1, 2).reshape(1, 20, 64)

    program = kp.lower(Two(norm_and_attend).eval(), (x,))
    assert program.report.left == ()
    exact = norm_and_attend(x.double())
    noise = (program(x).double() - exact).square().sum()
    eager = (norm_and_attend(x).double() - exact).square().sum()
    assert noise <= 2 * eager  # rounds less often than eager does, and at most as badly


POINTWISE = {
    "chain": lambda x: torch.softmax(torch.tanh(x * 2 - 1).abs().sqrt() + torch.exp(-x), -1),
    "wide": lambda x: torch.softmax(sum(x.roll(0) * n + x.exp() / (n + 1) for n in range(9)), -1),
    "columns": lambda x: (
        torch.softmax(x, 1) + x.mean((0, 2), keepdim=True) - x.amax(1, keepdim=True) + x.sum(-1)[..., None]
    ),
    "pieces": lambda x: torch.nn.functional.silu(torch.cat([x[:, 1:4], x[:, ::2] * 2, -x[:, -1:]], dim=1)),
    "no sizes": lambda x: torch.nn.functional.gelu(x.sum((0, 1, 2)) * 0.01) + torch.softmax(x, -1),
    "reshaped": lambda x: torch.softmax(x.permute(2, 0, 1).reshape(6, -1).t().reshape(-1, 6).expand(2, -1, -1), -1),
    "powers": lambda x: torch.sigmoid(x.abs() ** 2.5 + x**2 + x.abs() ** 0.5) / (x.maximum(x * 0) + 1),
    "clamps": lambda x: torch.sigmoid(x.clamp(-1, 0.5) + x.clamp(min=0.2)) + torch.nn.functional.leaky_relu(x, 0.2),
    "hard": lambda x: torch.nn.functional.hardswish(x) * torch.nn.functional.hardsigmoid(x * 2),
    "logarithms": lambda x: torch.sigmoid(x.abs().add(x.square(), alpha=3).log2() - x.exp().log10()),
    "ends": lambda x: torch.softmax(x[:, -9:, -3:] + x[:, :, 2:100:3] * x[:, 99:].sum(), -1) + x[:, -1:, :1],
    "two outputs": lambda x: (torch.softmax(x, -1), torch.softmax(x, -1).transpose(0, 1)),
    "input as output": lambda x: (x.clone(), torch.softmax(x, -1)),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_views_and_pointwise_chains_are_exact(name: str) -> None:
    torch.manual_seed(0)
    program = kp.lower(Two(POINTWISE[name]).eval(), (torch.randn(3, 6, 10),))
    assert program.report.ours
    for found in program.compare():
        assert found.snr > LEAST_SNR, found


def test_what_is_not_taken_has_a_reason() -> None:
    class Mixed(torch.nn.Module):
        def forward(self, x):
            return torch.softmax(x.double(), -1).float() + torch.nn.functional.layer_norm(x, (8,)), x.cumsum(0)

    report = kp.lower(Mixed().eval(), (torch.randn(4, 8),)).report
    reasons = {refusal.operator: refusal.reason for refusal in report.left}
    assert "floating numbers alone" in reasons["aten::_softmax"]
    assert reasons["aten::cumsum"] == "no rule for this operator"


def test_dropout_in_attention_is_refused_with_the_remedy() -> None:
    qkv = tuple(torch.randn(1, 2, 8, 4) for _ in range(3))
    partitioner = KernelPartitioner()
    exported = torch.export.export(Two(lambda q, k, v: sdpa(q, k, v, dropout_p=0.1)).eval(), qkv)
    partitioner.transform_for_pre_decomposition(exported)
    reasons = [node.meta.get("kernel_pytorch_refusal") for node in exported.graph.nodes]
    assert "dropout_p=0.1: call model.eval() before lowering" in reasons


def test_options_leave_things_to_others() -> None:
    model = Block().eval()
    x = torch.randn(1, 9, 64)
    program = kp.lower(model, (x,), options=PartitionerOptions(attention=False, norms=False, linears=False))
    assert program.report.count(OURS, ATTENTION) == 0
    assert program.report.count("XnnpackBackend", "aten::linear") == 6
    assert any(refusal.reason == "the options leave out linear" for refusal in program.report.passed_on)
    assert program.report.count(OURS, "aten::native_layer_norm") == 0
    assert program.compare(x)[0].snr > LEAST_SNR


def test_the_partitioner_works_on_its_own(tmp_path) -> None:
    from executorch.exir import to_edge_transform_and_lower

    x = torch.randn(1, 9, 64)
    model = Block().eval()
    lowered = to_edge_transform_and_lower(torch.export.export(model, (x,)), partitioner=[KernelPartitioner()])
    (tmp_path / "alone.pte").write_bytes(lowered.to_executorch().buffer)
    torch.testing.assert_close(kp.load(tmp_path / "alone.pte")(x), model(x), rtol=1e-5, atol=1e-5)


def test_masks_are_recognised_only_where_they_say_the_same() -> None:
    lower = torch.ones(6, 6).tril().bool()
    assert recognised_mask(lower, 6, 6) == kp.masks.causal()
    assert recognised_mask(torch.where(lower, 0.0, -torch.inf)[None, None], 6, 6) == kp.masks.causal()
    assert recognised_mask(torch.where(lower, 0.0, torch.finfo().min), 6, 6) == kp.masks.causal()
    assert recognised_mask(torch.ones(1, 1, 1, 6, dtype=torch.bool), 6, 6) == kp.masks.full()
    banded = lower & ~torch.ones(6, 6).tril(-3).bool()
    assert recognised_mask(banded, 6, 6) == (kp.masks.causal() & kp.masks.window(2))
    for other in (lower.T, torch.where(lower, 0.0, -1.0), lower & (torch.arange(6) != 2), banded[-1:], lower[1:2]):
        assert recognised_mask(other, 6, 6) is None


def test_slices_from_the_end_of_a_dynamic_length() -> None:
    shapes = (({1: Dim("length", min=4, max=50)},),)
    program = kp.lower(
        Two(
            lambda x: torch.softmax(x[:, -1:] + x[:, -3:], -1) + torch.nn.functional.gelu(x[:, -1]).unsqueeze(1)
        ).eval(),
        (torch.randn(2, 9, 8),),
        dynamic_shapes=shapes,
    )
    assert program.report.left == (), program.report
    for length in (4, 9, 50):
        assert program.compare(torch.randn(2, length, 8))[0].snr > LEAST_SNR


def banded(x: torch.Tensor, width: int) -> torch.Tensor:
    """Attention under a band that the graph computes from the length."""
    i = torch.arange(x.shape[2])
    keep = (i[None, :] <= i[:, None]) & (i[None, :] >= i[:, None] - width)
    return sdpa(x, x, x, attn_mask=keep)


def changing(x: torch.Tensor, width: int) -> torch.Tensor:
    """A mask that is causal up to a length and something else after."""
    i = torch.arange(x.shape[2])
    return sdpa(x, x, x, attn_mask=(i[None, :] <= i[:, None]) & ((i[:, None] < width) | (i[None, :] > 3)))


@pytest.mark.parametrize(("function", "data"), [(banded, True), (changing, False)])
def test_a_mask_computed_from_the_length_becomes_data_where_it_is_one(function, data: bool) -> None:
    shapes = ({2: Dim("length", min=2, max=700)},)
    program = kp.lower(
        Two(lambda x: function(x, 600)).eval(), (torch.randn(1, 1, 20, 4),), dynamic_shapes=(shapes,)
    )
    assert any(refusal.operator.startswith("aten::arange") for refusal in program.report.left) != data
    for length in (2, 20, 599, 601, 602, 603, 700):
        assert program.compare(torch.randn(1, 1, length, 4))[0].snr > LEAST_SNR


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"backend": "nvidia", "runtime": "executorch"},
            r"backend='nvidia': no .pte path for this target yet; .*; runtime='aoti' makes a \.pt2 package for it",
        ),
        ({"model": torch.nn.LayerNorm(4)}, "training mode"),
        ({"model": 3}, "expected a torch.nn.Module"),
        (
            {"model": kp.fp8.convert(torch.nn.Sequential(torch.nn.Linear(4, 4)), "delayed").eval()},
            r"model trains in FP8 \(recipe delayed, layer '0'\): call kp.fp8.revert\(model\) first",
        ),
        ({"recipe": "int3"}, "recipe='int3'"),
    ],
)
def test_wrong_arguments_of_lower(change: dict, message: str) -> None:
    arguments = {"model": torch.nn.LayerNorm(4).eval(), "inputs": (torch.randn(2, 4),), **change}
    with pytest.raises((ValueError, TypeError), match=message):
        kp.lower(**arguments)


@pytest.fixture(scope="module")
def block_as_it_is() -> tuple[torch.nn.Module, torch.Tensor, int]:
    """A block, an input, and how many bytes its program has."""
    torch.manual_seed(0)
    model = Block(dim=128).eval()
    x = torch.randn(1, 24, 128)
    return model, x, len(kp.lower(model, (x,)).buffer)


@pytest.mark.parametrize(
    ("recipe", "least", "smaller"),
    [("int8-static", 20, 2), ("int8-dynamic", 30, 2), ("int4-weight", 14, 3), ("int8-weight", 30, 2)],
)
def test_a_quantized_block_has_its_linears_where_they_belong(
    block_as_it_is, recipe: str, least: int, smaller: int
) -> None:
    model, x, size = block_as_it_is
    program = kp.lower(model, (x,), recipe=recipe)
    report = program.report
    assert report.count(OURS, ATTENTION) == 1, report
    assert report.count(OURS, "aten::linear") == 0
    ours = report.count(OURS, "kernel_pytorch_lowering::linear_int8")
    assert ours == (6 if recipe == "int8-weight" else 0), report
    assert (
        report.count(OURS, "aten::native_layer_norm") + report.count(OURS, "kernel_pytorch_lowering::rms_norm") == 2
    )
    assert program.compare()[0].snr > 40  # against the quantized model in eager mode
    assert difference(0, program(x), model(x)).snr > least  # against the model as it was
    assert len(program.buffer) * smaller < size


class Positions(torch.nn.Module):
    """Positions are integers that numbers are added to, and a mask travels as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = torch.nn.Embedding(40, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1]) * 2 + 1
        x = self.linear(x + self.embedding(places))
        q = x.unflatten(-1, (4, 16)).transpose(1, 2)
        return kp.attention(q, q, q, mask=kp.masks.causal() & kp.masks.window(5)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("recipe", "least"), [("int8-static", 20), ("int8-dynamic", 30)])
def test_integers_are_not_quantized(recipe: str, least: int) -> None:
    torch.manual_seed(0)
    model, x = Positions().eval(), torch.randn(1, 16, 64)
    program = kp.lower(model, (x,), recipe=recipe)
    assert program.compare()[0].snr > 40
    assert difference(0, program(x), model(x)).snr > least
    assert len(program.buffer) < len(kp.lower(model, (x,)).buffer)


def test_a_recipe_without_a_quantizer_is_refused() -> None:
    with pytest.raises(ValueError, match="recipe='int4-weight' is made by torchao's quantize_"):
        KernelQuantizer("int4-weight")


def test_a_missing_or_foreign_file_is_an_error(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        kp.load(tmp_path / "missing.pte")
    (tmp_path / "text.pte").write_text("this is no program")
    with pytest.raises(ValueError, match=r"text\.pte is no program"):
        kp.load(tmp_path / "text.pte")


def test_a_damaged_payload_is_refused_and_named(dynamic_block) -> None:
    data = bytearray(dynamic_block[1].buffer)
    data[data.find(b"KPTPLOAD") + 100] ^= 16
    with pytest.raises(ValueError, match="its checksum is wrong"):
        kp.load(bytes(data))


def test_the_command_line_lowers_and_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "small_models.py").write_text(
        "import torch\ndef small():\n    return torch.nn.LayerNorm(8), (torch.randn(2, 8),)\n"
    )
    for arguments in (["lower", "small_models:small", "--out", "small.pte"], ["run", "small.pte", "--repeat", "3"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "KernelPyTorchBackend" in shown
    assert "output 0: float32[2, 8]" in shown
    assert "median of 3" in shown
    with pytest.raises(SystemExit):
        main(["lower", "small_models:large", "--out", "x.pte"])
    assert "has no function 'large'" in capsys.readouterr().err
