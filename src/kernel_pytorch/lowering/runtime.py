"""Run a ``.pte`` from Python: ExecuTorch's runtime with our delegate registered in it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch

from kernel_pytorch.lowering.build import BUNDLED, build, executorch_root
from kernel_pytorch.lowering.checksum import ProgramFile, digest_of, has_checksum, verify

if TYPE_CHECKING:
    from kernel_pytorch.lowering.package import LoadedPackage

__all__ = ["LoadedProgram", "load", "native", "registered"]


# ExecuTorch's scalar type numbers, which equal torch's.
_TYPES = {0: torch.uint8, 1: torch.int8, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32}
_TYPES |= {7: torch.float64, 11: torch.bool, 15: torch.bfloat16}


@cache
def registered() -> ctypes.CDLL:
    """Load the delegate's library once, which registers ``KernelPyTorchBackend`` with ExecuTorch, and return it."""
    # Import ExecuTorch first: its library contains the table in which ours registers itself.
    import executorch.runtime  # noqa: F401

    return native()


@cache
def native() -> ctypes.CDLL:
    """Load the library without ExecuTorch's Python package, which takes a second to import."""
    ready = build(tell=lambda text: print(f"kernel-pytorch: {text}", file=sys.stderr))
    if ready.prefix == BUNDLED:  # ExecuTorch may not be in the folder that the wheel's runtime searches
        for beside in ("libexecutorch.so", "libexecutorch_threadpool.so"):
            ctypes.CDLL(str(executorch_root() / "lib" / beside))
    library = ctypes.CDLL(str(ready.library))
    library.kernel_pytorch_last_error.restype = ctypes.c_char_p
    library.kernel_pytorch_last_owner.restype = ctypes.c_void_p
    library.kernel_pytorch_file_verified.argtypes = (ctypes.c_bool,)
    library.kernel_pytorch_session_bytes.restype = ctypes.c_size_t
    library.kernel_pytorch_session_bytes.argtypes = (ctypes.c_void_p,)
    library.kernel_pytorch_save_session.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.kernel_pytorch_restore_session.restype = ctypes.c_bool
    library.kernel_pytorch_restore_session.argtypes = (
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t),
    )
    return library


@contextlib.contextmanager
def _contents(source: bytes | Path) -> Iterator[bytes | mmap.mmap]:
    """Yield a program's bytes; a file is memory-mapped, and only the checks read it."""
    if isinstance(source, bytes) or source.stat().st_size == 0:
        yield source if isinstance(source, bytes) else b""
        return
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        yield mapped


class LoadedProgram:
    """A loaded program; call it with the model's input tensors.

    Thread-safe: one call runs at a time, and others wait. All calls share its KV caches, so threads with separate
    conversations must each load the program; separately loaded programs run concurrently.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> program = kp.lower(torch.nn.LayerNorm(8).eval(), (torch.ones(2, 8),))
        >>> program.load()(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(self, source: bytes | Path | ProgramFile, name: str, *, verified: bool = False) -> None:
        executorch_root()  # raises an error with what to install if it is missing
        from executorch.runtime import Runtime, Verification

        from kernel_pytorch.lowering.target import register_delegates

        self._library, self._given = registered(), source  # keeps a ProgramFile alive
        if isinstance(source, ProgramFile):
            source = source.path
        with _contents(source) as data:
            fault = None if verified else verify(data)
            if fault is not None:
                raise ValueError(f"{name} is no program that this runtime can load: {fault}")
            self._verified = verified or has_checksum(data)
            register_delegates(data)
            self.digest = digest_of(data)
            """The SHA-256 of the program."""
            self.nbytes = len(data)
            """The size of the program."""
        self._name = name
        # Methods share planned memory, inputs are bound by address, and outputs are copied after the call.
        self._lock = threading.Lock()
        self._library.kernel_pytorch_last_owner()  # reset: it may be another program's
        self._library.kernel_pytorch_file_verified(self._verified)
        try:
            self._program = Runtime.get().load_program(source, verification=Verification.InternalConsistency)
            self._methods = {method: self._program.load_method(method) for method in self._program.method_names}
        except RuntimeError as error:
            raise ValueError(f"{name} is no program that this runtime can load: {self._reason(error)}") from error
        finally:
            self._library.kernel_pytorch_file_verified(False)
        self._owner = self._library.kernel_pytorch_last_owner()

    def again(self) -> LoadedProgram:
        """Load the program again, with separate caches; weights that are mapped from a file are shared."""
        return LoadedProgram(self._given, self._name, verified=self._verified)

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the program's methods."""
        return tuple(sorted(self._methods))

    def __call__(self, *inputs: torch.Tensor | int | float | bool) -> Any:
        return self.run("forward", inputs)

    def run(self, method: str, inputs: Sequence[Any]) -> Any:
        """Run a method by its name; return a single output as it is, and several as a tuple."""
        if method not in self._methods:
            raise ValueError(f"method={method!r}: {self._name} has {', '.join(self.methods)}")
        loaded = self._methods[method]
        given = [x.detach().contiguous() if isinstance(x, torch.Tensor) else x for x in inputs]
        wanted = loaded.metadata.num_inputs()
        if len(given) != wanted:
            raise ValueError(f"{self._name}: {method} takes {wanted} inputs, and {len(given)} were given")
        with self._lock:
            try:
                # ExecuTorch's own Method.execute lets torch clone the outputs, whose threads then spin for
                # milliseconds beside those of ExecuTorch.
                outputs = [_copied(output) for output in loaded._method.call(given, clone_outputs=False)]
            except RuntimeError as error:
                reason = "; ".join(filter(None, (self._mismatch(method, given), self._reason(error))))
                raise ValueError(f"{self._name}: {method} refused its inputs: {reason}") from error
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def history(self) -> bytes:
        """Return a copy of the caches' contents, for ``restore`` in this or a later process; empty without caches."""
        with self._lock:
            found = ctypes.create_string_buffer(self._library.kernel_pytorch_session_bytes(self._owner))
            self._library.kernel_pytorch_save_session(self._owner, found)
            return bytes(found.raw)

    def restore(self, history: bytes) -> None:
        """Restore the caches from a history of the same program; others raise an error and change nothing."""
        reason = ctypes.create_string_buffer(512)
        with self._lock:
            if not self._library.kernel_pytorch_restore_session(
                self._owner, history, len(history), reason, len(reason)
            ):
                raise ValueError(f"{self._name} refused a history: {reason.value.decode()}")

    def ones(self, method: str) -> list[torch.Tensor]:
        """Return inputs for a method, filled with ones, in the shapes that it was lowered for."""
        if method not in self._methods:
            raise ValueError(f"method={method!r}: {self._name} has {', '.join(self.methods)}")
        metadata = self._methods[method].metadata
        infos = [metadata.input_tensor_meta(n) for n in range(metadata.num_inputs())]
        return [torch.ones(tuple(info.sizes()), dtype=_TYPES[info.dtype()]) for info in infos]

    def _mismatch(self, method: str, given: Sequence[Any]) -> str:
        """Return a description of the first invalid input; empty if none is found to be invalid."""
        metadata = self._methods[method].metadata
        for number, value in enumerate(given):
            if not isinstance(value, torch.Tensor):
                continue
            info = metadata.input_tensor_meta(number)
            wanted, sizes = _TYPES[info.dtype()], list(info.sizes())
            if value.dtype != wanted or value.ndim != len(sizes) or list(value.shape) != sizes:
                shown = f"{str(wanted).removeprefix('torch.')}{sizes}"
                return f"input {number} is {_shown(value)}; it was lowered for {shown} (dynamic sizes: at most)"
        return ""

    def _reason(self, error: RuntimeError) -> str:
        own = self._library.kernel_pytorch_last_error().decode()
        return own or " ".join(str(error).split())


def _copied(output: Any) -> Any:
    """Return a copy of an output, because the next call overwrites its memory."""
    if not isinstance(output, torch.Tensor):
        return output
    copy = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype)
    ctypes.memmove(copy.data_ptr(), output.data_ptr(), output.nbytes)
    return copy


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else f"a {type(value).__name__}"


@overload
def load(program: bytes) -> LoadedProgram: ...


@overload
def load(program: str | Path) -> Any: ...


def load(program: str | Path | bytes) -> LoadedProgram | LoadedPackage:
    """Load a program: a ``.pte`` on ExecuTorch's runtime with our delegate, or a ``.pt2`` on AOTInductor.

    A ``.pt2`` contains machine code: only load packages that you trust.

    A file is memory-mapped, not copied: leave it in place while the program is used. To replace it, rename another
    file to its name, as ``save`` does.

    The whole file is verified first. Files of ``kp.lower`` have a checksum; for others, ExecuTorch verifies the
    tables. A damaged or truncated file raises an error with the reason.

    Args:
        program: the path of the file, or its bytes.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> program = kp.lower(torch.nn.Softmax(-1).eval(), (torch.ones(2, 4),))
        >>> kp.load(program.buffer)(torch.ones(2, 4))[0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    if isinstance(program, bytes):
        return LoadedProgram(program, "the program")
    path = Path(program)
    if not path.exists():
        raise FileNotFoundError(f"program={str(path)!r}: no such file")
    with path.open("rb") as file:
        if file.read(2) == b"PK":  # a ZIP archive
            from kernel_pytorch.lowering.package import LoadedPackage

            return LoadedPackage(path)
    return LoadedProgram(path, path.name)
