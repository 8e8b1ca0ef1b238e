"""Puts the C++ runtime into wheels that are built where ExecuTorch and a C++ compiler are.

``KERNEL_PYTORCH_WHEEL`` says which wheel is wanted: ``pure`` has no runtime, ``platform`` has one or fails, and
another machine's name, as ``aarch64``, is cross-compiled against the wheel of ExecuTorch that
``KERNEL_PYTORCH_EXECUTORCH`` names. Unset, the wheel has a runtime where one can be built, and is pure elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RuntimeHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds ``kernel_pytorch/_runtime`` and the platform's tag to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("KERNEL_PYTORCH_WHEEL", "")
        if self.target_name != "wheel" or version == "editable" or wanted == "pure":
            return
        self._folder = tempfile.TemporaryDirectory()
        runtime = Path(self._folder.name) / "runtime"
        command = [sys.executable, "-m", "kernel_pytorch.lowering.wheel", str(runtime)]
        if wanted not in ("", "platform"):
            command += ["--machine", wanted]
        if os.environ.get("KERNEL_PYTORCH_EXECUTORCH"):
            command += ["--executorch", os.environ["KERNEL_PYTORCH_EXECUTORCH"]]
        # Not pip's isolated environment, which PYTHONPATH names: ExecuTorch is in the interpreter's own.
        source = {**os.environ, "PYTHONPATH": str(Path(self.root) / "src")}
        done = subprocess.run(command, env=source, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            build_data["tag"] = f"py3-none-{done.stdout.split()[-1]}"
            build_data["pure_python"] = False
            build_data["force_include"][str(runtime)] = "kernel_pytorch/_runtime"
            return
        reason = (done.stderr.strip().splitlines() or ["unknown"])[-1]
        if wanted:
            raise RuntimeError(
                f"KERNEL_PYTORCH_WHEEL={wanted}: the C++ runtime cannot be built: {done.stderr.strip()}"
            )
        self.app.display_warning(
            f"a pure wheel, without the C++ runtime ({reason}): programs need a compiler where they run. Set "
            "KERNEL_PYTORCH_WHEEL=platform to make this an error, or =pure to ask for it"
        )

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if hasattr(self, "_folder"):
            self._folder.cleanup()
