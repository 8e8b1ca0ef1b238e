"""A part of ExecuTorch's own backend test suite with our flow; ``make suite`` runs the whole."""

from kernel_pytorch.testing.executorch_suite import run, summary

FILES = ["test_gelu.py", "test_permute.py", "test_silu.py"]


def test_the_suite_is_delegated_or_refused_with_a_reason() -> None:
    notes = run(FILES)
    told = summary(notes)
    assert not [note for note in notes if note["outcome"] == "failed"], told
    assert all(note["detail"] for note in notes if note["outcome"] == "refused"), told
    assert sum(note["outcome"] == "delegated" for note in notes) >= 12, told
