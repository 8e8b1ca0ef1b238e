"""The recorded contract run: it lists passed cases, and ends if a kernel exceeds its budget."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.evidence import EvidenceError
from kernel_pytorch.hardware_abstraction import registered_op
from kernel_pytorch.ops.rms_norm import KERNEL_TORCH, torch_kernel
from kernel_pytorch.testing import contract_run
from kernel_pytorch.testing.contract_run import run_tests


def test_every_small_case_is_listed() -> None:
    rows = run_tests(KERNEL_TORCH, kp.device("cpu"))
    cases = {case.name for case in registered_op("rms_norm").cases if not case.benchmark}
    assert {row.kernel for row in rows} == {"rms_norm/torch"}
    assert {name for row in rows for name in row.cases} == cases
    assert {"float32", "bfloat16"} <= {row.format for row in rows}


def test_refused_cases_are_left_out() -> None:
    refusing = replace(KERNEL_TORCH, supports=lambda _call, _device: "never")
    assert run_tests(refusing, kp.device("cpu")) == []


def test_a_wrong_kernel_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_kernel.forward

    def wrong(*arguments: object) -> tuple[torch.Tensor, ...]:
        y, *rest = right(*arguments)
        return y * 1.01, *rest

    monkeypatch.setattr(torch_kernel, "forward", wrong)
    from kernel_pytorch.hardware_abstraction.dispatch import forget_choices

    forget_choices()
    try:
        with pytest.raises(EvidenceError, match="rms_norm/torch on "):
            run_tests(KERNEL_TORCH, kp.device("cpu"))
    finally:
        monkeypatch.undo()
        forget_choices()


def test_a_kernel_that_fails_does_not_stop_the_others_and_a_second_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_call: object, _device: object) -> None:
        raise RuntimeError("no such instruction")

    bad = replace(KERNEL_TORCH, name="bad", supports=broken)
    state = tmp_path / "state.jsonl"
    monkeypatch.setattr(contract_run, "devices", lambda: (kp.device("cpu"),))
    monkeypatch.setattr(contract_run, "backend", lambda _name: SimpleNamespace(kernels=(bad, KERNEL_TORCH)))
    with pytest.raises(
        SystemExit, match=r"1 kernels failed:\nrms_norm/bad on .*: RuntimeError: no such instruction"
    ):
        contract_run.main(["--state", str(state)])
    assert "1 of 2 kernels passed" in capsys.readouterr().out

    monkeypatch.setattr(contract_run, "backend", lambda _name: SimpleNamespace(kernels=(KERNEL_TORCH,)))
    monkeypatch.setattr(contract_run, "run_case", lambda *_: pytest.fail("it was tested already"))
    contract_run.main(["--state", str(state)])
    with pytest.raises(SystemExit) as ended:
        contract_run.main(["--state", str(tmp_path / "other.jsonl"), "--seconds", "-1"])
    assert ended.value.code == contract_run.UNFINISHED
