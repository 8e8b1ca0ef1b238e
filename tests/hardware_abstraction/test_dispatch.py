"""From a call to a kernel: bad arguments, gradients, tracing, threads and policies, on rms_norm."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction import dispatch, policy_scope, registry
from kernel_pytorch.hardware_abstraction.dispatch import forget_choices
from kernel_pytorch.hardware_abstraction.op import Kernel
from kernel_pytorch.ops.rms_norm import torch_kernel
from kernel_pytorch.testing import interpreting, pretend

OP = torch.ops.kernel_pytorch.rms_norm.default
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

needs_interpreter = pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")
cpu_and_interpreter = pytest.mark.parametrize(
    "where", ["cpu", pytest.param("nvidia/h200", marks=needs_interpreter)]
)

X, W = torch.randn(6, 32), torch.randn(32)


def reference(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def leaves(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return X.to(dtype, copy=True).requires_grad_(), W.to(dtype, copy=True).requires_grad_()


def gradients(function: Callable[..., torch.Tensor], dy: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    x, weight = leaves()
    return torch.autograd.grad(function(x, weight), (x, weight), torch.ones_like(x) if dy is None else dy)


def through_custom_op(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return OP(x, weight, 1e-6, "")[0]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Puts a kernel called 'other' behind 'torch' on the CPU; holds the phases it ran."""
    phases: list[str] = []
    module = ModuleType("other_rms_norm")

    def recorded(phase: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            phases.append(phase)
            return getattr(torch_kernel, phase)(*arguments)

        return run

    module.forward, module.backward = recorded("forward"), recorded("backward")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    other = Kernel(op="rms_norm", name="other", module=module.__name__, supports=lambda *_: None, language="native")
    cpu = registry.backend("cpu")
    monkeypatch.setitem(registry._load().backends, "cpu", dataclasses.replace(cpu, kernels=(*cpu.kernels, other)))
    forget_choices()
    yield phases
    monkeypatch.undo()
    forget_choices()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Bad arguments: each error names the argument, its value and the remedy.

BAD: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "weight-shape": ((X, W[:31]), ValueError, r"weight has shape \[31\]: .* must have shape \[32\]"),
    "weight-2d": ((X, X), ValueError, r"weight has shape \[6, 32\]: .* must have shape \[32\]"),
    "int-x": ((X.int(),), TypeError, "x has dtype int32: use float64, float32, float16 or bfloat16"),
    "complex-x": ((X.to(torch.complex64),), TypeError, "x has dtype complex64: use float64"),
    "weight-dtype": ((X, W.half()), TypeError, "weight has dtype float16 and x float32: use x's dtype or float32"),
    "weight-wider": ((X, W.double()), TypeError, "weight has dtype float64 and x float32: use x's dtype"),
    "eps-negative": ((X, W, -1e-6), ValueError, "eps=-1e-06: use a finite number that is not negative"),
    "eps-nan": ((X, W, math.nan), ValueError, "eps=nan: use a finite number"),
    "eps-inf": ((X, W, math.inf), ValueError, "eps=inf: use a finite number"),
    "eps-bool": ((X, W, True), ValueError, "eps=True: use a finite number"),
    "eps-text": ((X, W, "1e-6"), ValueError, "eps='1e-6': use a finite number"),
    "eps-tensor": ((X, W, torch.tensor(1e-6)), ValueError, "eps=.*: use a finite number"),
    "eps-none": ((X, W, None), ValueError, "eps=None: use a finite number"),
    "no-numbers": ((X[:, :0],), ValueError, r"x has shape \[6, 0\]: the last dimension must hold"),
    "scalar": ((torch.tensor(1.0),), ValueError, r"x has shape \[\]: the last dimension must hold"),
    "weight-elsewhere": ((X, W.to("meta")), ValueError, r"weight is on meta and x on cpu: move one with \.to\(\)"),
    "x-list": (([1.0, 2.0],), TypeError, r"x=\[1\.0, 2\.0\]: expected a tensor"),
    "x-number": ((1.0,), TypeError, r"x=1\.0: expected a tensor"),
    "x-array": ((np.ones(3),), TypeError, r"x=array.*: expected a tensor"),
    "weight-list": ((X, [1.0] * 32), TypeError, r"weight=\[1\.0, .*: expected a tensor or None"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kp.rms_norm(*arguments)


def test_unknown_kernel() -> None:
    with pytest.raises(ValueError, match="kernel='cuddn': rms_norm has no such kernel on cpu; it has torch"):
        kp.rms_norm(X, kernel="cuddn")


@pytest.mark.parametrize("name", ["", "torch,deterministic"])
def test_a_strange_kernel_name_is_unknown_on_every_path(name: str) -> None:
    with pytest.raises(ValueError, match="has no such kernel on cpu"):
        kp.rms_norm(X, kernel=name)
    with pytest.raises(ValueError, match="has no such kernel on cpu"):
        OP(X, None, 1e-6, kp.Policy(kernel=name).encoded)


def test_a_good_call_before_does_not_let_a_bad_one_pass() -> None:
    kp.rms_norm(X, W, 1.0)
    with pytest.raises(ValueError, match="eps=True"):  # equal to 1.0 in a dictionary
        kp.rms_norm(X, W, True)
    kp.rms_norm(X, W, 1)


def test_the_custom_op_checks_too() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \[31\]"):
        OP(X, W[:31], 1e-6, "")
    with pytest.raises(ValueError, match="policy='fastest': cannot read"):
        OP(X, W, 1e-6, "fastest")


# Gradients.


def test_gradcheck() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: kp.rms_norm(x, w, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(lambda x: kp.rms_norm(x, None, 1e-3), (x,))
    assert torch.autograd.gradcheck(lambda x, w: OP(x, w, 1e-3, "")[0], (x, weight))


@pytest.mark.parametrize(
    "dy",
    [
        torch.ones(()).expand(6, 32),
        torch.randn(32).expand(6, 32),
        torch.randn(32, 6).t(),
        torch.randn(6, 64)[:, ::2],
    ],
    ids=["scalar", "row", "transposed", "every-other"],
)
@cpu_and_interpreter
def test_output_gradient_of_any_strides(dy: torch.Tensor, where: str) -> None:
    with contextlib.nullcontext() if where == "cpu" else pretend(where):
        found = gradients(kp.rms_norm, dy)
    for ours, expected in zip(found, gradients(reference, dy.contiguous()), strict=True):
        torch.testing.assert_close(ours, expected)


@every_dtype
def test_eager_and_custom_op_agree_to_the_bit(dtype: torch.dtype) -> None:
    results = []
    for function in (kp.rms_norm, through_custom_op):
        x, weight = leaves(dtype)
        y = function(x, weight)
        results.append((y, *torch.autograd.grad(y, (x, weight), X.to(dtype))))
    for eager, custom in zip(*results, strict=True):
        assert torch.equal(eager, custom)
        assert eager.dtype == dtype


@pytest.mark.parametrize("function", [kp.rms_norm, through_custom_op], ids=["eager", "custom"])
def test_gradients_flow_where_required(function: Callable[..., torch.Tensor]) -> None:
    both = gradients(function)
    x, weight = leaves()
    (dx,) = torch.autograd.grad(function(x, weight.detach()).sum(), x)
    (dweight,) = torch.autograd.grad(function(x.detach(), weight).sum(), weight)
    assert torch.equal(dx, both[0])
    assert torch.equal(dweight, both[1])
    assert function(x, None).requires_grad
    assert not function(x.detach(), weight.detach()).requires_grad


def test_no_grad_and_inference_mode() -> None:
    x, weight = leaves()
    expected = kp.rms_norm(x, weight).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = kp.rms_norm(x, weight)
        assert not y.requires_grad
        assert torch.equal(y, expected)
    assert kp.rms_norm(x, weight).requires_grad, "a choice made without gradients must not serve a call with them"


@pytest.mark.parametrize("function", [kp.rms_norm, through_custom_op], ids=["eager", "custom"])
def test_changing_x_before_the_backward_is_an_error(function: Callable[..., torch.Tensor]) -> None:
    x, weight = leaves()
    inner = x * 1
    y = function(inner, weight)
    inner.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("head", [torch.sum, lambda y: y.sin().sum()], ids=["linear", "curved"])
@pytest.mark.parametrize("function", [kp.rms_norm, through_custom_op], ids=["eager", "custom"])
def test_a_second_derivative_raises(
    function: Callable[..., torch.Tensor], head: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Also in a sum with a term that has one: a gradient penalty must not be dropped silently."""
    x, weight = leaves()
    loss = head(function(x, weight))
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(dx, torch.autograd.grad(loss, x, retain_graph=True)[0])
    with pytest.raises(NotImplementedError, match="rms_norm has no second derivative"):
        torch.autograd.grad(loss + dx.square().sum(), (x, weight), allow_unused=True)


def test_activation_checkpointing() -> None:
    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return kp.rms_norm(x, weight).tanh()

    plain = gradients(block)
    for ours, expected in zip(
        gradients(lambda x, w: checkpoint(block, x, w, use_reentrant=False)), plain, strict=True
    ):
        assert torch.equal(ours, expected)


def test_batched_output_gradients() -> None:
    x, weight = leaves()
    y = kp.rms_norm(x, weight)
    several = torch.randn(3, 6, 32)
    batched = torch.autograd.grad(y, (x, weight), several, retain_graph=True, is_grads_batched=True)
    single = [torch.autograd.grad(y, (x, weight), dy, retain_graph=True) for dy in several]
    for ours, expected in zip(batched, zip(*single, strict=True), strict=True):
        assert torch.equal(ours, torch.stack(expected))


@cpu_and_interpreter
def test_a_view_that_negates_is_read_with_its_sign(where: str) -> None:
    z = torch.randn(6, 1, dtype=torch.complex64)
    negated, weight = z.conj().imag, torch.randn(1)
    assert negated.is_neg()
    with contextlib.nullcontext() if where == "cpu" else pretend(where):
        assert torch.equal(kp.rms_norm(negated, weight), kp.rms_norm(negated.resolve_neg(), weight))
        x = torch.randn(6, 1).requires_grad_()
        y = kp.rms_norm(x, weight, 0.1)
        (found,) = torch.autograd.grad(y, x, negated, retain_graph=True)
        assert torch.equal(found, torch.autograd.grad(y, x, negated.resolve_neg())[0])


# Tracing, compiling, exporting.


class Norm(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(W.to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kp.rms_norm(x * 2, self.weight) + 1


@every_dtype
@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_op_whole(dtype: torch.dtype, strict: bool) -> None:
    module, x = Norm(dtype), X.to(dtype)
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: rows},), strict=strict)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    outer = [torch.ops.aten.mul.Tensor, OP, torch.ops.aten.add.Tensor]
    assert [target for target in targets if target is not operator.getitem] == outer
    for other in (x, torch.randn(9, 32).to(dtype)):
        assert torch.equal(program.module()(other), module(other))


@every_dtype
@pytest.mark.usefixtures("fresh_dynamo")
def test_compile(dtype: torch.dtype) -> None:
    results = []
    function = lambda x, w: kp.rms_norm(x, w) * 2  # noqa: E731
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        x, weight = leaves(dtype)
        y = run(x, weight)
        results.append((y, *torch.autograd.grad(y, (x, weight), X.to(dtype))))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_with_inductor_and_changing_shapes() -> None:
    compiled = torch.compile(lambda x, w: kp.rms_norm(x + 1, w) * 2, fullgraph=True)
    for rows in (6, 7, 9):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(compiled(x, W), kp.rms_norm(x + 1, W) * 2)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_obeys_the_policy_of_each_call(ran: list[str]) -> None:
    compiled = torch.compile(lambda x: kp.rms_norm(x) + 1, fullgraph=True, backend="aot_eager")
    compiled(X)
    assert ran == []
    with kp.policy(kernel="other"):
        compiled(X)
    assert ran == ["forward"]
    compiled(X)
    assert ran == ["forward"]
    with kp.policy(kernel="cuddn"), pytest.raises(Exception, match="kernel='cuddn': rms_norm has no such kernel"):
        compiled(X)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_backward_keeps_the_policy_of_its_forward(ran: list[str]) -> None:
    compiled = torch.compile(kp.rms_norm, fullgraph=True, backend="aot_eager")
    x, weight = leaves()
    with kp.policy(kernel="other"):
        y = compiled(x, weight)
    y.sum().backward()
    assert ran == ["forward", "backward"]


def test_fake_tensors_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        y = kp.rms_norm(torch.empty(32, 6, dtype=torch.bfloat16).t())
    assert isinstance(y, FakeTensor)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((6, 32), torch.bfloat16, True)

    x, weight = (tensor.detach().to("meta").requires_grad_() for tensor in leaves(torch.float16))
    y = kp.rms_norm(x, weight)
    assert (y.device.type, y.shape, y.dtype) == ("meta", x.shape, torch.float16)
    y.sum().backward()
    assert weight.grad is not None
    assert (weight.grad.device.type, weight.grad.shape) == ("meta", weight.shape)
    with pytest.raises(ValueError, match="weight has shape"):
        kp.rms_norm(x, weight[1:])


def test_make_fx_records_the_op() -> None:
    x, weight = leaves()

    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(kp.rms_norm(x, weight).sum(), (x, weight))

    graph = make_fx(step)(x, weight)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count(OP) == 1
    assert targets.count(torch.ops.kernel_pytorch.rms_norm_backward.default) == 1
    for traced, expected in zip(graph(x, weight), step(x, weight), strict=True):
        assert torch.equal(traced, expected)


def test_a_dispatch_mode_sees_the_op_and_its_backward() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[object] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, weight = leaves()
    before = kp.rms_norm(x, weight)
    with Watch():
        kp.rms_norm(x, weight)
        before.sum().backward()  # an eager forward's backward is seen too
    assert seen.count(OP) == 1
    assert seen.count(torch.ops.kernel_pytorch.rms_norm_backward.default) == 1


def test_a_tensor_subclass_sees_the_op() -> None:
    seen: list[object] = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    y = kp.rms_norm(X.as_subclass(Watched), W)
    assert any("rms_norm" in str(function) for function in seen)
    assert torch.equal(y.as_subclass(torch.Tensor), kp.rms_norm(X, W))


@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_vmap() -> None:
    xs, weights = torch.randn(3, 6, 32), torch.randn(3, 32)
    over_x = torch.vmap(lambda x: kp.rms_norm(x, W))(xs)
    assert torch.equal(over_x, torch.stack([kp.rms_norm(x, W) for x in xs]))
    over_weight = torch.vmap(lambda w: kp.rms_norm(X, w))(weights)
    assert torch.equal(over_weight, torch.stack([kp.rms_norm(X, w) for w in weights]))


def right_or_an_error(found: Callable[[], torch.Tensor], expected: torch.Tensor) -> None:
    """What torch.func cannot do with a custom op today it may do tomorrow; wrong numbers it may never give."""
    try:
        out = found()
    except (RuntimeError, NotImplementedError) as error:
        message = str(error)
    else:
        torch.testing.assert_close(out, expected)
        return
    assert any(word in message for word in ("functorch transforms", "forward-mode", "second derivative")), message


def test_torch_func_is_right_or_an_error() -> None:
    ours = lambda x: kp.rms_norm(x, W).sin().sum()  # noqa: E731
    theirs = lambda x: reference(x, W).sin().sum()  # noqa: E731
    right_or_an_error(lambda: torch.func.grad(ours)(X), torch.func.grad(theirs)(X))
    right_or_an_error(lambda: torch.func.vjp(ours, X)[1](torch.tensor(1.0))[0], torch.func.grad(theirs)(X))
    batch = torch.randn(2, 6, 32)
    per_sample = torch.stack([torch.func.grad(theirs)(x) for x in batch])
    right_or_an_error(lambda: torch.vmap(torch.func.grad(ours))(batch), per_sample)
    right_or_an_error(lambda: torch.func.hessian(ours)(X), torch.func.hessian(theirs)(X))


def test_forward_mode_is_refused() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        for function in (kp.rms_norm, through_custom_op):
            with pytest.raises(NotImplementedError, match="rms_norm has no forward-mode derivative"):
                function(dual)
            with pytest.raises((NotImplementedError, RuntimeError), match="forward"):
                function(dual, leaves()[1])
        assert torch.equal(kp.rms_norm(X, W), through_custom_op(X, W)), "a call without tangents goes on"
    batch = torch.stack([X, X])
    for function, x in ((kp.rms_norm, X), (torch.vmap(kp.rms_norm), batch)):
        with pytest.raises(NotImplementedError, match="rms_norm has no forward-mode derivative"):
            torch.func.jvp(function, (x,), (x,))
    _, tangent = torch.func.jvp(lambda x: kp.rms_norm(W) + 3 * x, (X,), (X,))
    assert torch.equal(tangent, 3 * X)


# Selection: which kernel runs, how often, and where.


def test_the_backward_keeps_the_policy_of_its_forward(ran: list[str]) -> None:
    x, weight = leaves()
    with kp.policy(kernel="other"):
        y = kp.rms_norm(x, weight)
    y.sum().backward()
    assert ran == ["forward", "backward"]
    y = kp.rms_norm(x, weight)
    with kp.policy(kernel="other"):
        y.sum().backward()
    assert ran == ["forward", "backward"], "and one without a policy keeps that"


def test_a_kernel_argument_holds_for_the_backward(ran: list[str]) -> None:
    x, weight = leaves()
    kp.rms_norm(x, weight, kernel="other").sum().backward()
    assert ran == ["forward", "backward"]


def test_endless_shapes_do_not_grow_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MOST_CHOICES", 10)
    forget_choices()
    for rows in range(1, 60):
        assert kp.rms_norm(torch.ones(rows, 8)).shape == (rows, 8)
        assert 1 <= len(policy_scope._NO_POLICY.choices) <= 10
    forget_choices()


def test_threads() -> None:
    inputs = [torch.randn(5 + number % 7, 48) for number in range(200)]

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = kp.rms_norm(leaf)
        (dx,) = torch.autograd.grad(y.sum(), leaf)
        return y.detach(), dx

    expected = [step(x) for x in inputs]
    forget_choices()
    with ThreadPoolExecutor(4) as pool:
        for ours, theirs in zip(pool.map(step, inputs), expected, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])


@cpu_and_interpreter
def test_the_same_bits_each_time(where: str) -> None:
    with contextlib.nullcontext() if where == "cpu" else pretend(where):
        first = (kp.rms_norm(X, W), *gradients(kp.rms_norm))
        for _ in range(4):
            for again, before in zip((kp.rms_norm(X, W), *gradients(kp.rms_norm)), first, strict=True):
                assert torch.equal(again, before)


def test_a_kernel_runs_with_its_tensors_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def device(where: torch.device) -> Iterator[None]:
        entered.append(str(where))
        yield
        entered.append("left")

    count = 2
    cuda = SimpleNamespace(device=device, device_count=lambda: count)
    monkeypatch.setattr(torch, "get_device_module", lambda _: cuda)
    run = dispatch.placed(torch.device("cuda:1"), lambda x: (entered.append("ran"), x)[1])
    assert run(5) == 5
    assert entered == ["cuda:1", "ran", "left"]
    count = 1  # one GPU is always the current one, and the guard would cost time
    entered.clear()
    assert dispatch.placed(torch.device("cuda:0"), abs)(-5) == 5
    assert dispatch.placed(torch.device("cpu"), abs)(-5) == 5
    assert entered == []


def test_autocast_does_not_reach_into_kernels() -> None:
    """Autocast of the caller must not round a kernel's float32 arithmetic."""
    x = [torch.randn(1, 2, 50, 32, generator=torch.Generator().manual_seed(n)) for n in range(3)]

    def run(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        leaves = [value.clone().requires_grad_() for value in x]
        out = kp.attention(*(leaf.to(dtype) for leaf in leaves), kp.masks.causal(), kernel="tiled")
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    plain = run(torch.bfloat16)  # as autocast converts the arguments
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run()
        compiled = torch.compile(
            lambda q, k, v: kp.attention(q, k, v, kp.masks.causal(), kernel="tiled"), backend="eager"
        )
        inside_graph = compiled(*x)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))
    assert torch.equal(inside_graph, plain[0])


def test_a_policy_holds_for_its_thread_alone(ran: list[str]) -> None:
    x = torch.randn(2, 8)
    with kp.policy(kernel="other"):
        thread = threading.Thread(target=lambda: kp.rms_norm(x))
        thread.start()
        thread.join()
        assert ran == []
        kp.rms_norm(x)
    assert ran == ["forward"]


def test_a_kernel_is_pinned_for_one_op(ran: list[str]) -> None:
    x = torch.randn(2, 8)
    q = torch.randn(1, 1, 4, 8)
    with kp.policy(kernel={"rms_norm": "other"}):
        kp.rms_norm(x)
        kp.attention(q, q, q)  # has no kernel of that name, and is not pinned
        assert ran == ["forward"]
        with kp.policy(kernel={"attention": "tiled"}):
            kp.rms_norm(x)
            assert kp.explain(kp.attention, q, q, q).kernel.name == "tiled"
        torch.compile(kp.rms_norm, backend="eager", fullgraph=True)(x)
    assert ran == ["forward"] * 3
    with pytest.raises(ValueError, match="op='rmsnorm': no such op"), kp.policy(kernel={"rmsnorm": "torch"}):
        pass


def test_compiled_calls_are_refused_where_threads_pin_different_kernels(ran: list[str]) -> None:
    compiled = torch.compile(kp.rms_norm, backend="eager", fullgraph=True)
    inside, done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with kp.policy(kernel="torch"):
            inside.set()
            done.wait()

    thread = threading.Thread(target=elsewhere)
    with kp.policy(kernel="other"):
        thread.start()
        inside.wait()
        try:
            with pytest.raises(Exception, match="of several threads: pass kernel= to the call"):
                compiled(torch.randn(2, 8))
        finally:
            done.set()
            thread.join()
        compiled(torch.randn(2, 8))
    assert ran == ["forward"]


def test_explain_takes_a_torch_device() -> None:
    choice = kp.explain(kp.rms_norm, torch.ones(2, 8), device=torch.device("cpu"))
    assert choice.device.backend == "cpu"
