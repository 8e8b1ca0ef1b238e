"""Running a ``.pte`` from Python: ExecuTorch's runtime with our delegate registered in it."""

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


# ExecuTorch's numbers for formats, which are torch's own.
_TYPES = {0: torch.uint8, 1: torch.int8, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32}
_TYPES |= {7: torch.float64, 11: torch.bool, 15: torch.bfloat16}


@cache
def registered() -> ctypes.CDLL:
    """The delegate's library, loaded once: ExecuTorch then knows ``KernelPyTorchBackend``."""
    # ExecuTorch first: its library holds the table that ours registers itself in.
    import executorch.runtime  # noqa: F401

    return native()


@cache
def native() -> ctypes.CDLL:
    """The library alone, without ExecuTorch's Python, which takes a second to import."""
    ready = build(tell=lambda text: print(f"kernel-pytorch: {text}", file=sys.stderr))
    if ready.prefix == BUNDLED:  # ExecuTorch may lie in another folder than the wheel's runtime looks in
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
    """A program's bytes; those of a file are mapped, and read by nobody but the checks."""
    if isinstance(source, bytes) or source.stat().st_size == 0:
        yield source if isinstance(source, bytes) else b""
        return
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        yield mapped


class LoadedProgram:
    """A program that is ready to run; call it with the tensors that the model takes.

    Threads may share it: one call runs at a time, and the others wait. Its caches are one history, so threads that
    hold conversations of their own load the program once each; programs loaded apart run at the same time.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> program = kp.lower(torch.nn.LayerNorm(8).eval(), (torch.ones(2, 8),))
        >>> program.load()(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(self, source: bytes | Path | ProgramFile, name: str, *, verified: bool = False) -> None:
        executorch_root()  # an error that says what to install, where it is missing
        from executorch.runtime import Runtime, Verification

        from kernel_pytorch.lowering.target import register_delegates

        self._library, self._given = registered(), source  # a ProgramFile lives as long as this
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
        # Methods share planned memory, inputs are bound by address, and outputs are copied out after the call.
        self._lock = threading.Lock()
        self._library.kernel_pytorch_last_owner()  # forgets that of another program
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
        """Load the program once more, with caches of its own; weights that are mapped from a file are shared."""
        return LoadedProgram(self._given, self._name, verified=self._verified)

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the program's methods."""
        return tuple(sorted(self._methods))

    def __call__(self, *inputs: torch.Tensor | int | float | bool) -> Any:
        return self.run("forward", inputs)

    def run(self, method: str, inputs: Sequence[Any]) -> Any:
        """Run a method by its name; one output is returned by itself, several as a tuple."""
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
        """A copy of what the caches hold, for ``restore`` in this process or a later one; empty without caches."""
        with self._lock:
            found = ctypes.create_string_buffer(self._library.kernel_pytorch_session_bytes(self._owner))
            self._library.kernel_pytorch_save_session(self._owner, found)
            return bytes(found.raw)

    def restore(self, history: bytes) -> None:
        """Go on with a history of the same program; one that does not fit is refused and changes nothing."""
        reason = ctypes.create_string_buffer(512)
        with self._lock:
            if not self._library.kernel_pytorch_restore_session(
                self._owner, history, len(history), reason, len(reason)
            ):
                raise ValueError(f"{self._name} refused a history: {reason.value.decode()}")

    def ones(self, method: str) -> list[torch.Tensor]:
        """Inputs for a method, all ones, in the shapes it was lowered for."""
        if method not in self._methods:
            raise ValueError(f"method={method!r}: {self._name} has {', '.join(self.methods)}")
        metadata = self._methods[method].metadata
        infos = [metadata.input_tensor_meta(n) for n in range(metadata.num_inputs())]
        return [torch.ones(tuple(info.sizes()), dtype=_TYPES[info.dtype()]) for info in infos]

    def _mismatch(self, method: str, given: Sequence[Any]) -> str:
        """Which input cannot be right, in words; empty where none is seen to be wrong."""
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
    """An output in memory of its own: the next call writes to where it is now."""
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
    """Load a program and make it callable: a ``.pte`` on ExecuTorch's runtime with our delegate, or a ``.pt2`` on
    AOTInductor's, which is machine code: load those that you trust.

    A file is mapped into memory, not copied: leave it in place while the program is used, or replace it by renaming
    another one, as ``save`` does.

    The whole file is verified first. One that ``kp.lower`` made carries a checksum; of any other, ExecuTorch verifies
    the tables. A file that is damaged or cut is refused with the reason.

    Args:
        program: the file, or its bytes.

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
