"""benchmarks/fp8_compiled_profile.py: kinds of kernels, the table of differences, and calls of generated code."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
from tools.evidence_gpu import ROOT


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location(
        "fp8_compiled_profile", ROOT / "benchmarks" / "fp8_compiled_profile.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", "other GEMM"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n", "FP8 GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("_cast", "FP8 quantize"),
        ("_settle", "FP8 quantize"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "fused reduction"),
        ("triton_poi_fused_mul_silu_5", "fused pointwise"),
        ("triton_poi_fused_clone_7", "copy or fill"),
        ("Memcpy DtoD (Device -> Device)", "copy or fill"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "torch pointwise"),
        ("something", "other"),
    ],
)
def test_kernels_have_kinds(program: ModuleType, name: str, kind: str) -> None:
    assert program.kind_of(name) == kind


def test_the_table_and_the_differences_add_up(program: ModuleType) -> None:
    eager, compiled = program.Profile(wall=0.010), program.Profile(wall=0.012)
    eager.add("nvjet_a", 3, 0.004)
    eager.add("_cast", 2, 0.001)
    compiled.add("nvjet_a", 3, 0.004)
    compiled.add("fmha_b", 1, 0.003)
    lines = program.table(eager, compiled)
    assert [line.split()[0] for line in lines[1:]] == ["attention", "FP8", "other", "GPU", "wall"]
    assert lines[1].endswith("+3.00 ms")
    assert lines[-2].endswith("+2.00 ms")
    assert lines[-1].endswith("+2.00 ms")
    gaps = program.differences(eager, compiled, most=2)
    assert [gap.split()[-1] for gap in gaps] == ["fmha_b", "_cast"]


def test_calls_of_generated_code_are_counted_once(program: ModuleType) -> None:
    code = """
def helper(): extern_kernels.mm(a)
def call(args):
    buf0 = torch.ops.kernel_pytorch.fp8_linear_forward.default(x, w)
    assert_size_stride(buf0, (4,), (1,), 'torch.ops.kernel_pytorch.fp8_linear_forward.default')
    extern_kernels.mm(buf0, w, out=buf1)
    triton_poi_fused_clone_3.run(buf1, buf2, 4, stream=s)
    cpp_fused_add_mul_0(buf1, buf2)
    buf2.copy_(buf1)
"""
    assert program.calls_of(code) == {
        "op fp8_linear_forward": 1,
        "library mm": 1,
        "fused triton_poi_fused_clone": 1,
        "fused cpp_fused_add_mul": 1,
        "moves copy_": 1,
    }
