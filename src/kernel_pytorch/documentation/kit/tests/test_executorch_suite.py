"""Some files of ExecuTorch's backend test suite: every subtest is delegated, or refused with a reason."""

from kernel_pytorch.testing.executorch_suite import run, summary


def test_the_suite_is_delegated_or_refused_with_a_reason() -> None:
    notes = run(["test_relu.py"], backend="acme")
    told = summary(notes)
    assert not [note for note in notes if note["outcome"] == "failed"], told
    assert all(note["detail"] for note in notes if note["outcome"] == "refused"), told
    assert any(note["outcome"] == "delegated" for note in notes), told
