"""Test files whose requirements are missing are skipped, and say what they need."""

from pathlib import Path

import pytest

import requirements


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("lowering/test_any.py", "needs ExecuTorch"),
        ("documentation/test_backend_kit.py", "needs ExecuTorch"),
        ("masks/test_any.py", None),
    ],
)
def test_a_file_that_lowers_skips_with_the_reason(
    path: str, reason: str | None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "_absent", lambda _: True)
    monkeypatch.setattr(requirements, "missing_for_lowering", requirements.missing_for_lowering.__wrapped__)
    module = requirements.pytest_pycollect_makemodule(Path(__file__).parents[1] / path, request.session)
    if reason is None:
        assert module is None
        return
    assert module is not None
    with pytest.raises(pytest.skip.Exception, match=reason):
        module.collect()
