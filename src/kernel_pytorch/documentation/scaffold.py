"""``kernel-pytorch backend new``: copy the project in ``kit`` under another name.

The kit is a working, tested project for a vendor called Acme. A new project is the kit with that word replaced in
file contents and file names.
"""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kernel_pytorch.hardware_abstraction.registry import backends, broken_backends

__all__ = ["create_project"]

KIT = Path(__file__).parent / "kit"
_RENDER = (
    "import sys; sys.path.insert(0, 'src')\n"
    "from pathlib import Path\n"
    "from {name}_backend import BACKEND\n"
    "from kernel_pytorch.documentation.backend_pages import write_backend_pages\n"
    "write_backend_pages(BACKEND, Path('docs'))\n"
)


def create_project(name: str, folder: Path | None = None) -> Path:
    """Create a project for a new backend. Existing files are not touched.

    Args:
        name: the backend's name: one lower-case word, such as ``"acme"`` or ``"my_npu"``.
        folder: the destination, which must not exist; None for ``NAME-backend`` in the current folder.
    """
    _check_name(name)
    folder = Path(f"{name}-backend") if folder is None else folder
    if folder.exists():
        raise FileExistsError(
            f"out={str(folder)!r} exists already: name a folder that does not, nothing is replaced"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Created in a temporary folder and moved, so that an error leaves nothing behind.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-backend-") as scratch:
        made = Path(scratch) / "project"
        for source in sorted(KIT.rglob("*")):
            if source.is_file() and "__pycache__" not in source.parts:
                target = made / _renamed(source.relative_to(KIT).as_posix(), name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(_renamed(source.read_text(encoding="utf-8"), name), encoding="utf-8")
        _render_pages(name, made)
        shutil.move(made, folder)
    return folder


def _check_name(name: str) -> None:
    if keyword.iskeyword(name):
        raise ValueError(f"name={name!r}: is a keyword of Python; use another word, such as 'acme'")
    if not re.fullmatch(r"[a-z](_?[a-z0-9])*", name):
        raise ValueError(f"name={name!r}: a backend's name is one lower-case word, such as 'acme' or 'my_npu'")
    known = {record.name for record in backends()} | {broken.name for broken in broken_backends()}
    if name in known:
        raise ValueError(f"name={name!r}: there is a backend of this name; there are {', '.join(sorted(known))}")
    if importlib.util.find_spec("executorch") is None:
        raise ModuleNotFoundError("ExecuTorch is not installed: pip install 'kernel-pytorch[lowering]'")
    places = getattr(importlib.util.find_spec("executorch.backends"), "submodule_search_locations", ())
    theirs = {path.name for place in places for path in Path(place).iterdir()}
    if name in theirs or name.startswith("kernel_pytorch"):
        raise ValueError(f"name={name!r}: a backend of ExecuTorch or of ours has this name; choose another")
    if importlib.util.find_spec(f"{name}_backend") is not None:
        raise ValueError(f"name={name!r}: a package called {name}_backend is installed; choose another name")


def _renamed(text: str, name: str) -> str:
    words = {
        "acme": name,
        "Acme": "".join(part.capitalize() for part in name.split("_")),
        "ACME": name.upper(),
    }
    return re.sub("acme|Acme|ACME", lambda found: words[found[0]], text)


def _render_pages(name: str, project: Path) -> None:
    """Render the pages in a new process, because the new package is not installed."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", _RENDER.format(name=name)]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the new project's pages cannot be rendered: {done.stderr.splitlines()[-1:]}")
