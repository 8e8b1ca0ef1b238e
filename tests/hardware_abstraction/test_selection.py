"""Selection: a pure function of call, device and policy, and an explanation that runs nothing."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction import registry
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import forget_choices
from kernel_pytorch.hardware_abstraction.op import Call, Kernel, TensorSpec
from kernel_pytorch.hardware_abstraction.selection import Choice, Policy, UnsupportedCallError, Verdict, select

X = torch.ones(4, 64)
H200 = kp.device("nvidia/h200")
Install = Callable[..., None]


def call(dtype: torch.dtype = torch.float32, hidden: int = 64, needs_grad: bool = False) -> Call:
    x = TensorSpec((4, hidden), (hidden, 1), dtype, "cuda:0")
    return Call("rms_norm", "forward", (("x", x), ("weight", None), ("eps", 1e-6)), needs_grad)


def serves(call: Call, device: Device) -> None:
    return None


def refuses(reason: str) -> Callable[[Call, Device], str]:
    return lambda *_: reason


def kernel(
    name: str,
    supports: Callable[[Call, Device], str | None] = serves,
    *,
    backward: bool = True,
    deterministic: bool = True,
    module: str = "a_module_that_does_not_exist",
) -> Kernel:
    return Kernel(
        op="rms_norm",
        name=name,
        module=module,
        supports=supports,
        language="native",
        backward=backward,
        deterministic=deterministic,
    )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Replace a backend's kernels during a test."""

    def put(*kernels: Kernel, backend: str = "nvidia") -> None:
        record = dataclasses.replace(registry.backend(backend), kernels=kernels)
        monkeypatch.setitem(registry._load().backends, backend, record)
        forget_choices()

    yield put
    monkeypatch.undo()
    forget_choices()


def test_the_same_arguments_give_the_same_choice() -> None:
    forget_choices()
    first = select(call(), H200, Policy())
    forget_choices()  # so that the second is not from the cache
    second = select(call(), H200, Policy())
    assert second == first
    assert second is not first
    assert select(call(), H200, Policy()) is second


@pytest.mark.parametrize("name", ["nvidia/a100", "amd/mi300x", "intel/b580"])
def test_a_device_that_is_not_here(name: str) -> None:
    choice = select(call(), kp.device(name))
    assert choice.kernel.name == "triton"
    assert choice.device.name == name
    assert [verdict.kernel for verdict in choice.verdicts] == ["triton", "torch"]


def test_selection_reads_the_call() -> None:
    for asked, refused in ((call(torch.float64), "x is float64"), (call(hidden=65536), "65536 numbers exceed")):
        choice = select(asked, H200)
        assert choice.kernel.name == "torch"
        assert refused in choice.verdicts[1].reason


def test_the_backends_order_decides(install: Install) -> None:
    install(kernel("second"), kernel("first"))
    assert select(call(), H200).kernel.name == "second"
    assert select(call(), H200).verdicts == (
        Verdict("second", True, "the first in the backend's order that fits"),
        Verdict("first", False, "fits; ranked after second"),
    )


def test_pinned_kernel() -> None:
    choice = select(call(), H200, Policy(kernel="torch"))
    assert choice.kernel.name == "torch"
    assert choice.verdicts == (
        Verdict("torch", True, "pinned by the policy"),
        Verdict("triton", False, "the policy pins 'torch'"),
    )


def test_a_pinned_kernel_that_cannot_serve_is_an_error() -> None:
    with pytest.raises(UnsupportedCallError, match="triton: computes in float32, and x is float64"):
        select(call(torch.float64), H200, Policy(kernel="triton"))


def test_an_unknown_pinned_kernel_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(
        ValueError, match="kernel='cuddn': rms_norm has no such kernel on nvidia; it has triton, torch"
    ):
        select(call(), H200, Policy(kernel="cuddn"))


def test_an_op_without_kernels_says_so(install: Install) -> None:
    install()
    with pytest.raises(UnsupportedCallError, match="the backend has no kernel for this op"):
        select(call(), H200)
    with pytest.raises(ValueError, match="kernel='x': rms_norm has no such kernel on nvidia; it has none"):
        select(call(), H200, Policy(kernel="x"))


def test_a_deterministic_policy_refuses_a_kernel_that_is_not(install: Install) -> None:
    install(kernel("atomic", deterministic=False), kernel("ordered"))
    assert select(call(), H200).kernel.name == "atomic"
    choice = select(call(), H200, Policy(deterministic=True))
    assert choice.kernel.name == "ordered"
    assert choice.verdicts[1] == Verdict("atomic", False, "is not deterministic, and the policy demands it")
    with pytest.raises(UnsupportedCallError, match="atomic: is not deterministic"):
        select(call(), H200, Policy(deterministic=True, kernel="atomic"))


def test_a_kernel_without_a_backward_refuses_gradients(install: Install) -> None:
    install(kernel("infer", backward=False), kernel("train"))
    assert select(call(), H200).kernel.name == "infer"
    choice = select(call(needs_grad=True), H200)
    assert choice.kernel.name == "train"
    assert choice.verdicts[1].reason == "has no backward, and the call needs gradients"
    assert select(dataclasses.replace(call(), phase="backward"), H200).kernel.name == "train"


def test_an_unsupported_call_gives_every_reason(install: Install) -> None:
    install(
        kernel("one", refuses("x is too wide")),
        kernel("two", refuses("the moon is full")),
        kernel("three", backward=False),
        kernel("four", deterministic=False),
    )
    with pytest.raises(UnsupportedCallError) as caught:
        select(call(needs_grad=True), H200, Policy(deterministic=True))
    message = str(caught.value)
    for reason in (
        "one: x is too wide",
        "two: the moon is full",
        "three: has no backward, and the call needs gradients",
        "four: is not deterministic, and the policy demands it",
        "nvidia/h200",
        "rms_norm.forward(x=float32[4, 64], weight=None, eps=1e-06) with gradients",
    ):
        assert reason in message
    assert isinstance(caught.value, NotImplementedError)


def test_timings_choose_the_fastest(install: Install) -> None:
    install(kernel("slow"), kernel("fast"), kernel("wrong", refuses("no")))
    timings = (("fast", 2e-6), ("slow", 5e-6), ("wrong", 1e-9))
    choice = select(call(), H200, Policy(measure=True), timings)
    assert choice.kernel.name == "fast"
    reasons = {verdict.kernel: verdict.reason for verdict in choice.verdicts}
    assert "2.0 us" in reasons["fast"]
    assert reasons["slow"] == "fits; measured 5.0 us"
    assert reasons["wrong"] == "no"


def test_timings_do_not_undo_a_pin(install: Install) -> None:
    install(kernel("slow"), kernel("fast"))
    timings = (("fast", 2e-6), ("slow", 5e-6))
    assert select(call(), H200, Policy(kernel="slow"), timings).kernel.name == "slow"


def test_explain_gives_the_choice_and_every_other_reason(install: Install) -> None:
    install(kernel("best"), kernel("next"), kernel("never", refuses("because")))
    choice = kp.explain(kp.rms_norm, X, device="nvidia/h200")
    assert choice.kernel.name == "best"
    assert str(choice).splitlines() == [
        "rms_norm.forward(x=float32[4, 64], weight=None, eps=1e-06)",
        "on nvidia/h200 (sm_90)",
        "-> best   the first in the backend's order that fits",
        "   next   fits; ranked after best",
        "   never  because",
    ]
    assert repr(choice) == str(choice)


def test_explain_runs_no_kernel(install: Install) -> None:
    install(kernel("absent"), kernel("torch"), backend="cpu")
    assert kp.explain(kp.rms_norm, X).kernel.name == "absent"
    with kp.policy(measure=True):  # nor does it measure
        choice = kp.explain(kp.rms_norm, X)
    assert choice.kernel.name == "absent"
    assert choice.verdicts[0].reason.endswith("not measured here")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_does_not_exist"):
        kp.rms_norm(X)


def test_explain_sees_gradients_pins_and_policies(install: Install) -> None:
    install(kernel("infer", backward=False), kernel("atomic", deterministic=False), kernel("torch"), backend="cpu")
    x = X.clone().requires_grad_()
    assert kp.explain(kp.rms_norm, X).kernel.name == "infer"
    assert kp.explain(kp.rms_norm, x).kernel.name == "atomic"
    with torch.no_grad():
        assert kp.explain(kp.rms_norm, x).kernel.name == "infer"
    assert kp.explain(kp.rms_norm, x, kernel="torch").kernel.name == "torch"
    with kp.policy(deterministic=True):
        assert kp.explain(kp.rms_norm, x).kernel.name == "torch"


def test_explain_follows_a_policy_inside_the_function() -> None:
    def pinned(x: torch.Tensor) -> torch.Tensor:
        with kp.policy(kernel="torch"):
            return kp.rms_norm(x)

    assert kp.explain(pinned, X, device="nvidia/h200").policy == Policy(kernel="torch")


def test_explain_checks_the_arguments() -> None:
    with pytest.raises(ValueError, match="eps=-1"):
        kp.explain(kp.rms_norm, X, None, -1.0)
    assert kp.rms_norm(X).shape == X.shape, "an error must not leave explaining switched on"


def test_explain_takes_facts_and_meta_tensors() -> None:
    own = dataclasses.replace(H200, name="my/gpu", formats=frozenset({"float32"}), matrix_formats=frozenset())
    choice = kp.explain(kp.rms_norm, torch.empty(1 << 20, 8192, dtype=torch.bfloat16, device="meta"), device=own)
    assert choice.kernel.name == "torch"
    assert choice.verdicts[1].reason == "sm_90 does not compute in bfloat16"


def test_explain_of_a_function_that_calls_no_op() -> None:
    with pytest.raises(TypeError, match="function=relu: it called no op of the registry"):
        kp.explain(torch.relu, X)


def test_explain_of_what_is_no_function() -> None:
    with pytest.raises(TypeError, match="function='rms_norm': explain takes the function itself"):
        kp.explain("rms_norm", X)  # type: ignore[arg-type]


def test_a_device_of_another_type_is_named() -> None:
    x = torch.ones(2, 64)
    with pytest.raises(TypeError, match="name=3: use a torch device, a name of the catalogue, or None"):
        kp.explain(kp.rms_norm, x, device=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name=0: use a torch device"):
        kp.device(0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kernel": 3}, "kernel=3: use a kernel's name, a mapping from ops to names, or None"),
        ({"kernel": {"rms_norm": 3}}, "kernel={'rms_norm': 3}: use the name of a kernel"),
        ({"deterministic": 1}, "deterministic=1: use True, False or None"),
        ({"measure": "x"}, "measure='x': use True, False or None"),
    ],
)
def test_arguments_of_a_policy_of_another_type_are_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"), kp.policy(**arguments):
        pass
    assert kp.explain(kp.rms_norm, X).kernel is not None, "the outer policy is in force"


def test_explain_in_one_thread_does_not_affect_others() -> None:
    inside, done = threading.Event(), threading.Event()
    found: list[object] = []

    def slow(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert done.wait(10)
        return kp.rms_norm(x)

    thread = threading.Thread(target=lambda: found.append(kp.explain(slow, X)))
    thread.start()
    assert inside.wait(10)
    with kp.policy(deterministic=True):
        assert torch.equal(kp.rms_norm(X), X * torch.rsqrt(torch.tensor(1 + 1e-6)))
        done.set()
        thread.join(10)
    assert isinstance(found[0], Choice)
    assert kp.rms_norm(X).shape == X.shape


@given(st.builds(Policy, kernel=st.none() | st.text(), deterministic=st.booleans(), measure=st.booleans()))
def test_a_policy_round_trips_as_a_string(policy: Policy) -> None:
    assert Policy.decode(policy.encoded) == policy


@given(st.builds(Policy, kernel=st.sampled_from([None, "a", "a,measure", "kernel=a", ""])), st.text(max_size=3))
def test_different_policies_have_different_strings(policy: Policy, name: str) -> None:
    other = Policy(kernel=name)
    assert (other.encoded == policy.encoded) == (other == policy)


@pytest.mark.parametrize("text", ["kernel", "fast", "deterministic,quick", "measure=1", " measure", ",measure"])
def test_a_string_that_is_not_a_policy(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*; write it with Policy\.encoded"):
        Policy.decode(text)


def test_the_default_policys_string_is_empty() -> None:
    assert Policy().encoded == ""


@pytest.fixture
def torch_determinism() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("torch_determinism")
def test_torchs_own_switch_demands_determinism(install: Install) -> None:
    install(kernel("atomic", deterministic=False), kernel("torch"), backend="cpu")
    assert kp.explain(kp.rms_norm, X).kernel.name == "atomic"
    torch.use_deterministic_algorithms(True)
    assert kp.explain(kp.rms_norm, X).kernel.name == "torch"
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert kp.explain(kp.rms_norm, X).kernel.name == "atomic"


def current() -> Policy:
    return kp.explain(kp.rms_norm, X).policy


def test_nested_policies_add_up_and_are_restored() -> None:
    assert current() == Policy()
    with kp.policy(deterministic=True) as outer:
        assert outer == current() == Policy(deterministic=True)
        with kp.policy(kernel="torch", measure=True):
            assert current() == Policy(kernel="torch", deterministic=True, measure=True)
            with kp.policy(deterministic=False):
                assert current() == Policy(kernel="torch", measure=True)
        assert current() == Policy(deterministic=True)
    assert current() == Policy()


def test_a_policy_is_restored_after_an_error() -> None:
    with pytest.raises(KeyError), kp.policy(kernel="torch"):
        raise KeyError
    assert current() == Policy()


def test_an_argument_outranks_the_policy() -> None:
    with kp.policy(kernel="torch"):
        choice = kp.explain(kp.rms_norm, X, kernel="triton", device="nvidia/h200")
    assert choice.kernel.name == "triton"
