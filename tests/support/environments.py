"""Virtual environments that borrow torch, ExecuTorch and us from the present one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
from dataclasses import dataclass
from pathlib import Path

import kernel_pytorch

__all__ = ["Environment", "make_environment"]


@dataclass(frozen=True)
class Environment:
    """A throw-away virtual environment that borrows torch and us from the present one."""

    python: Path
    project: Path
    cache: Path

    @property
    def variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # Its own programs first; CMake and Ninja are borrowed.
        path = os.pathsep.join([str(self.python.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
        own = {"KERNEL_PYTORCH_CACHE": str(self.cache), "COLUMNS": "500", "PYTEST_ADDOPTS": "", "PATH": path}
        return kept | own

    def run(self, *arguments: str, expected: int = 0) -> str:
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.project,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == expected, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def json(self, code: str) -> object:
        """Run the code in the environment and return the value of ``result``."""
        # Torch's backward thread for a device made in Python now and then aborts a process that is exiting: the
        # result is out by then, so the process ends without an exit.
        end = "print(json.dumps(result), flush=True)\nimport os\nos._exit(0)"
        return json.loads(self.run("-c", f"import json\n{textwrap.dedent(code)}\n{end}"))


def make_environment(folder: Path, project: Path) -> Environment:
    """An environment in a folder, whose commands run in the project; ``pip`` and ``kernel-pytorch`` are its own."""
    home = folder / "environment"
    venv.create(home, with_pip=False, symlinks=os.name != "nt")
    scripts = home / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / ("python.exe" if os.name == "nt" else "python")
    question = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", question], capture_output=True, text=True, check=True).stdout.strip())
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    source = str(Path(kernel_pytorch.__file__).parents[1])
    (site / "borrowed.pth").write_text("\n".join([source, *sorted(borrowed)]) + "\n")
    for name, module in (("pip", "pip"), ("kernel-pytorch", "kernel_pytorch.cli")):
        (scripts / name).write_text(f'#!/bin/sh\nexec "{python}" -m {module} "$@"\n')
        (scripts / name).chmod(0o755)
    return Environment(python, project, folder / "cache")
