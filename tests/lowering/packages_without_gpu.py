"""What is known of GPU packages without a GPU; test_packages.py runs it in a process that does not interpret Triton.

Models are exported with fake CUDA tensors and our operators replaced, as for a package. Then each graph runs on the
CPU, every Triton launch in it in Triton's interpreter, against the model itself; and every launch is compiled for the
device. Prints a JSON object.
"""

import contextlib
import functools
import json
import sys
from typing import Any

import torch
import triton
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import kernel_pytorch as kp
from kernel_pytorch._compat.packages import launched_kernel
from kernel_pytorch.lowering.difference import differences
from kernel_pytorch.lowering.inlining import inline_kernels
from kernel_pytorch.testing.cross_compile import _compile

masks = kp.masks


class Block(torch.nn.Module):
    """Norm, rotary embedding and windowed attention with grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, x, k, v, cos, sin):
        q, k = kp.rope(kp.rms_norm(x, self.weight), k, cos, sin)
        return kp.attention(q, k, v, masks.causal() & (masks.window(20) | masks.sinks(3)))


class Decode(torch.nn.Module):
    def forward(self, q, k, v):
        return kp.attention(q, k, v, masks.causal() & masks.window(200))


TABLE = masks.blocks(torch.tensor([[True, False], [True, True]]), block=32)


class Table(torch.nn.Module):
    def forward(self, q, k, v):
        return kp.attention(q, k, v, TABLE)


class Modified(torch.nn.Module):
    def forward(self, q, k, v):
        return kp.attention(q, k, v, masks.causal(), softcap=3.0)


class Paged(torch.nn.Module):
    def forward(self, q, k, v, table, lengths):
        return kp.attention(q, k, v, masks.causal(), pages=kp.PageTable(table, lengths))


class Norm(torch.nn.Module):
    def forward(self, x):
        return kp.rms_norm(x)


def tensors(*shapes):
    return tuple(torch.randn(*shape) for shape in shapes)


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def cases():
    heads = (1, 4, 48, 64), (1, 2, 48, 64), (1, 2, 48, 64)
    square = ((1, 2, 64, 32),) * 3
    return {
        "block": (Block(), tensors(*heads, (48, 64), (48, 64))),
        "decode": (Decode(), tensors((1, 4, 1, 64), (1, 2, 2048, 64), (1, 2, 2048, 64))),
        "table": (Table(), tensors(*square)),
        "softcap": (Modified(), tensors(*square)),
        "paged": (
            Paged(),
            (
                *tensors((2, 4, 1, 64), (10, 2, 16, 64), (10, 2, 16, 64)),
                ints([[7, 2, 9], [4, 0, 0]]),
                ints([40, 5]),
            ),
        ),
        "dynamic": (Norm(), tensors((6, 64)), {"x": {0: torch.export.Dim("rows", min=2, max=4096)}}),
    }


class OnCpu(torch.fx.Interpreter):
    """Runs a graph for a GPU on the CPU, Triton launches in the interpreter."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is triton_kernel_wrapper_mutation:
            kernel = kernel_side_table.get_kernel(kwargs["kernel_idx"])
            while hasattr(kernel, "configs"):
                kernel = kernel.fn
            constants = kernel_side_table.get_constant_args(kwargs["constant_args_idx"])
            (grid,) = kwargs["grid"]
            return InterpretedFunction(kernel.fn)[grid](**kwargs["kwargs"], **constants)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return super().call_function(target, args, kwargs)


@contextlib.contextmanager
def helpers_run():
    """Functions that kernels call were not made for the interpreter in this process: make them so."""
    original = JITFunction.__call__
    interpreted = functools.cache(InterpretedFunction)
    JITFunction.__call__ = lambda self, *args, **kwargs: interpreted(self.fn)(*args, **kwargs)
    try:
        yield
    finally:
        JITFunction.__call__ = original


def packaged(model, inputs, device, dynamic=None):
    """The graph of a package for a device that is not here."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, torch.no_grad():
        there = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in inputs]
        moved = type(model).__new__(type(model))
        moved.__dict__ = {**model.__dict__, "_parameters": {}}
        for name, value in model.named_parameters():
            moved._parameters[name] = torch.nn.Parameter(torch.empty(value.shape, device="cuda"))
        exported = torch.export.export(moved, tuple(there), dynamic_shapes=dynamic)
    module = exported.module(check_guards=False)
    return module, inline_kernels(module, device)


def example(value):
    """An argument of a launch as a compiler needs it."""
    if not isinstance(value, torch.fx.Node):
        return value
    found = value.meta["val"]
    return torch.empty(1, dtype=found.dtype, device="meta") if isinstance(found, torch.Tensor) else found.node.hint


def launches_of(module):
    for node in module.graph.nodes:
        if launched_kernel(node) is not None:
            kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            (config,) = kernel.configs
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
            values = {**node.kwargs["kwargs"], **constants}
            yield launched_kernel(node), {name: example(value) for name, value in values.items()}, options


def main() -> None:
    device, found, made = kp.device(sys.argv[1]), {}, []
    for name in sys.argv[2:]:  # all are compiled before any is interpreted: that patches triton.language for good
        torch.manual_seed(0)
        model, inputs, *dynamic = cases()[name]
        module, calls = packaged(model.eval(), inputs, device, *dynamic)
        compiled = [
            _compile(
                (kernel, (), {**given, **options}),
                device=device,
                case=name,
                number_format="",
                kernel=kernel_name(kernel),
            ).function
            for kernel, given, options in launches_of(module)
        ]
        made.append((name, model, inputs, bool(dynamic), module, calls, compiled))
    for name, model, inputs, dynamic, module, calls, compiled in made:
        for key, value in model.state_dict().items():  # real weights in the place of fake ones
            module._parameters[key] = torch.nn.Parameter(value)
        if dynamic:  # a length that was not the example's
            inputs = tuple(torch.cat([x, x[:1]]) for x in inputs)
        with helpers_run(), torch.no_grad():
            result = OnCpu(module).run(*inputs)
        expected = model(*inputs)
        found[name] = {
            "calls": [
                [call.op, call.kernel, list(call.launches), [list(pair) for pair in call.passed_over]]
                for call in calls
            ],
            "compiled": compiled,
            "error": max(difference.largest for difference in differences(result, expected)),
        }
    print(json.dumps(found))


def kernel_name(kernel):
    class Named:
        name = kernel.fn.__name__

    return Named


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret is False
    main()
