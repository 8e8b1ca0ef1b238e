"""Cross-compile Triton kernels for devices that are not present.

The kernel's launcher runs on meta tensors for a pretended device, and each launch is intercepted and compiled instead
of run. So exactly the launched specialisations are compiled, without a second list of signatures.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kernel_pytorch.evidence import Compilation
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.op import Case, Kernel, registered_op
from kernel_pytorch.testing.devices import interpreting

__all__ = ["cross_compile"]

_TRITON_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2fnuz: "fp8e5b16",
}


def cross_compile(kernel: Kernel, device: Device, case: Case, number_format: str) -> list[Compilation]:
    """Compile every launch of a kernel's forward and backward for a device, and return the resources of each.

    Raises the compiler's error if a kernel does not compile.
    """
    if interpreting():
        raise RuntimeError("TRITON_INTERPRET=1 is set: kernels imported under it cannot be compiled; unset it")
    op = registered_op(kernel.op)
    arguments = tuple(case.arguments(getattr(torch, number_format), torch.device("meta")).values())
    outputs = op.fake(*arguments)
    with _caught_launches() as launches:
        kernel.function("forward")(device, *arguments)
        if kernel.backward:
            saved = function_of(op).gather_saved(arguments, outputs)
            named = dict(zip(op.outputs, outputs, strict=True))
            upstream = [torch.empty_like(named[name]) for name in op.differentiable_outputs]
            kernel.function("backward")(device, *upstream, *saved)
    rows: list[Compilation] = []
    for launch in launches:
        row = _compile(launch, kernel, device, case.name, number_format)
        if row not in rows:  # a backward may repeat a launch of the forward
            rows.append(row)
    return rows


@contextlib.contextmanager
def _caught_launches() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    from triton.runtime.jit import JITFunction

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    original = JITFunction.run

    def catch(self: Any, *arguments: Any, **keywords: Any) -> None:
        launch = {name: value for name, value in keywords.items() if name not in ("grid", "warmup")}
        launches.append((self, arguments, launch))

    JITFunction.run = catch
    try:
        yield launches
    finally:
        JITFunction.run = original


def _compile(launch: Any, kernel: Kernel, device: Device, case: str, number_format: str) -> Compilation:
    import triton
    from triton.compiler import ASTSource

    function, positional, keywords = launch
    options = {name: value for name, value in keywords.items() if name not in function.arg_names}
    named = {name: value for name, value in keywords.items() if name in function.arg_names}
    bound = inspect.signature(function.fn).bind(*positional, **named)
    bound.apply_defaults()
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, (parameter, value) in enumerate(zip(function.params, bound.arguments.values(), strict=True)):
        # Specialise like Triton's launcher: None and 1 are constants, and multiples of 16 are marked.
        aligned = isinstance(value, torch.Tensor)
        one = isinstance(value, int) and not isinstance(value, bool) and value == 1
        if parameter.is_constexpr or value is None or one:
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TRITON_TYPES[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0
        if aligned and signature[parameter.name] != "constexpr":
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=_target(device), options=options)
    registers, spills = _nvidia_resources(compiled) if "ptx" in compiled.asm else _amd_resources(compiled)
    return Compilation(
        kernel=kernel.name,
        function=function.__name__,
        arch=device.arch,
        case=case,
        format=number_format,
        registers=registers,
        shared_memory_bytes=int(compiled.metadata.shared),
        spill_bytes=spills,
    )


def _target(device: Device) -> Any:
    from triton.backends.compiler import GPUTarget

    if device.arch.startswith("sm_"):
        return GPUTarget("cuda", int(device.arch.removeprefix("sm_")), device.warp_size)
    if device.arch.startswith("gfx"):
        return GPUTarget("hip", device.arch, device.warp_size)
    raise ValueError(f"device={device.name!r}: Triton here compiles for sm_* and gfx*, not for {device.arch!r}")


def _nvidia_resources(compiled: Any) -> tuple[int, int]:
    """Return registers and spilled bytes per thread, from the assembler's report."""
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = compiled.asm["ptx"]
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    if target is None:
        raise RuntimeError("the compiled PTX names no target")
    arch = target.group(1)
    tool = get_ptxas(int(re.sub(r"\D", "", arch)))  # Triton ships two; 3.9 chooses another one for sm_90 than 3.8
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        report = subprocess.run(
            [tool.path, "-v", f"--gpu-name={arch}", str(source), "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        launched = Path(folder) / "launched.cubin"
        launched.write_bytes(compiled.asm["cubin"])
        instructions = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-sass", str(launched)], capture_output=True, text=True, check=True
        ).stdout
    wrong = stores_of_nothing(instructions)
    if wrong:
        raise RuntimeError(
            f"for {arch} the assembler {tool.version} makes a kernel that stores a register nothing was written to: "
            f"{wrong[0]}; let the kernel refuse such calls"
        )
    registers = max(int(number) for number in re.findall(r"Used (\d+) registers", report))
    spills = sum(int(number) for number in re.findall(r"(\d+) bytes spill", report))
    return registers, spills


def stores_of_nothing(instructions: str) -> list[str]:
    """Return the instructions of a disassembled kernel that store register 1, the stack pointer.

    No kernel stores it on purpose. CUDA 12.8's assembler emits such a store instead of a value that it has lost.

    Example:
        >>> stores_of_nothing("/*3060*/  @P6 STG.E.U8 desc[UR20][R22.64], R1 ;")
        ['@P6 STG.E.U8 desc[UR20][R22.64], R1']
        >>> stores_of_nothing("/*3060*/  @P6 STG.E.U8 desc[UR20][R22.64], R11 ;\\n/*3070*/  STL [R1], R2 ;")
        []
    """
    return [found.strip() for found in re.findall(r"\*/([^;*\n]*\bST[A-Z]*\b[^;*\n]*, R1) *;", instructions)]


def _amd_resources(compiled: Any) -> tuple[int, int]:
    """Return vector registers and spilled bytes per lane, from the code object's metadata."""
    text = compiled.asm["amdgcn"]
    registers = max(int(number) for number in re.findall(r"\.vgpr_count:\s+(\d+)", text))
    spills = sum(int(number) for number in re.findall(r"\.vgpr_spill_count:\s+(\d+)", text))
    return registers, 4 * spills
