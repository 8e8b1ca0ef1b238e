"""Kernel selection as a pure function of the call, the device and the policy, with a reason for every kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.op import Call, Kernel
from kernel_pytorch.hardware_abstraction.records import RecordedRun, nearest_run, ordered, recorded_runs
from kernel_pytorch.hardware_abstraction.registry import backend
from kernel_pytorch.hardware_abstraction.timing import readable

__all__ = ["Choice", "Policy", "UnsupportedCallError", "Verdict", "select"]


class UnsupportedCallError(NotImplementedError):
    """No kernel can serve the call exactly; the message has each kernel's reason and the remedy.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> try:
        ...     kp.explain(kp.rms_norm, torch.ones(2, 4, dtype=torch.float64), device="nvidia/h200", kernel="triton")
        ... except kp.UnsupportedCallError as error:
        ...     print("float64" in str(error))
        True
    """


def encode_policy(kernel: str | None, deterministic: bool, measure: bool) -> str:
    """Return a policy as a string for ``Policy.decode``. The kernel comes last, since its name may be any string."""
    words = ["deterministic"] if deterministic else []
    if measure:
        words.append("measure")
    if kernel is not None:
        words.append(f"kernel={kernel}")
    return ",".join(words)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The user's requirements for kernel selection.

    Example:
        >>> import kernel_pytorch as kp
        >>> with kp.policy(deterministic=True):
        ...     pass
    """

    kernel: str | None = None
    """Pin one implementation by name; a call that it cannot serve raises an error."""
    kernels: tuple[tuple[str, str], ...] = ()
    """Implementations pinned for single ops, as (op, kernel); they take precedence over ``kernel``."""
    deterministic: bool = False
    """Use only kernels that return the same bits in every run."""
    measure: bool = False
    """Time the kernels that can serve the call on the caller's tensors, once per shape, and take the fastest."""

    def kernel_for(self, op: str) -> str | None:
        """Return the name of the kernel that is pinned for an op, or None."""
        for name, kernel in self.kernels:
            if name == op:
                return kernel
        return self.kernel

    @property
    def encoded(self) -> str:
        """The policy as a string, for compiled and exported graphs."""
        return encode_policy(self.kernel, self.deterministic, self.measure)

    @staticmethod
    def decode(text: str) -> Policy:
        policy, rest = Policy(), text
        while rest:
            if rest.startswith("kernel="):
                return replace(policy, kernel=rest.removeprefix("kernel="))
            word, _, rest = rest.partition(",")
            if word == "deterministic":
                policy = replace(policy, deterministic=True)
            elif word == "measure":
                policy = replace(policy, measure=True)
            else:
                raise ValueError(f"policy={text!r}: cannot read {word!r}; write it with Policy.encoded")
        return policy


@dataclass(frozen=True)
class Verdict:
    """The decision about one kernel, with the reason."""

    kernel: str
    chosen: bool
    reason: str


@dataclass(frozen=True)
class Choice:
    """The kernel for a call, with the reason, and the reason against every other kernel."""

    call: Call
    device: Device
    policy: Policy
    kernel: Kernel
    verdicts: tuple[Verdict, ...]
    run: RecordedRun | None = None
    """The recorded run that ordered the kernels, or None."""

    def __str__(self) -> str:
        width = max(len(verdict.kernel) for verdict in self.verdicts)
        lines = [str(self.call), f"on {self.device.name} ({self.device.arch})"]
        for verdict in self.verdicts:
            mark = "->" if verdict.chosen else "  "
            lines.append(f"{mark} {verdict.kernel:<{width}}  {verdict.reason}")
        if self.run is not None:
            lines.append(f"recorded in {self.run}{self._changed(self.run)}")
        return "\n".join(lines)

    __repr__ = __str__

    def _changed(self, run: RecordedRun) -> str:
        """Return a remark on the kernels whose source has changed since the run."""
        timed = [
            kernel
            for kernel in backend(self.device.backend).kernels
            if kernel.op == self.call.op and kernel.name in run.seconds
        ]
        changed = [kernel.name for kernel in timed if run.sources.get(kernel.name) != kernel.source_digest]
        return f"; changed since: {', '.join(changed)}" if changed else ""


def fitting(call: Call, device: Device, policy: Policy) -> tuple[tuple[Kernel, ...], tuple[Verdict, ...]]:
    """Return the kernels that can serve the call, in the backend's order, and the refusals of the others."""
    kernels = [kernel for kernel in backend(device.backend).kernels if kernel.op == call.op]
    names = [kernel.name for kernel in kernels]
    if policy.kernel is not None and policy.kernel not in names:
        raise ValueError(
            f"kernel={policy.kernel!r}: {call.op} has no such kernel on {device.backend}; "
            f"it has {', '.join(names) or 'none'}"
        )
    fits, refusals = [], []
    for kernel in kernels:
        reason = kernel.refusal(call, device)
        if reason is None and policy.deterministic and not kernel.deterministic:
            reason = "is not deterministic, and the policy demands it"
        if reason is None and policy.kernel not in (None, kernel.name):
            reason = f"the policy pins {policy.kernel!r}"
        if reason is None:
            fits.append(kernel)
        else:
            refusals.append(Verdict(kernel.name, False, reason))
    return tuple(fits), tuple(refusals)


@lru_cache(maxsize=4096)
def select(
    call: Call,
    device: Device,
    policy: Policy = Policy(),
    timings: tuple[tuple[str, float], ...] | None = None,
) -> Choice:
    """Return the kernel that serves the call on the device under the policy, with the reason for every kernel.

    Pure: the same arguments give the same choice, so the device need not be present. Of the kernels that can serve
    the call, the first is taken: in the order of the recorded run nearest to the call, else in the backend's order.
    With ``timings``, (kernel, seconds) measured on the call itself, the fastest is taken.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> call = kp.explain(kp.rms_norm, torch.ones(2, 64)).call
        >>> select(call, kp.device("nvidia/h200")).kernel.name
        'triton'
    """
    fits, refusals = fitting(call, device, policy)
    if not fits:
        reasons = "\n".join(f"  {verdict.kernel}: {verdict.reason}" for verdict in refusals)
        raise UnsupportedCallError(
            f"no {call.op} kernel of the {device.backend} backend can serve {call} on {device.name}:\n"
            f"{reasons or '  the backend has no kernel for this op'}\n"
            f"Change the argument a reason names, or drop the policy that pins or restricts the choice."
        )
    seconds = dict(timings or ())
    timed = [kernel for kernel in fits if kernel.name in seconds]
    run = None if timed else nearest_run(recorded_runs(backend(device.backend).evidence), call, device, fits)
    fits = ordered(fits, run)
    best = min(timed, key=lambda kernel: seconds[kernel.name]) if timed else fits[0]
    recorded = run.seconds if run is not None else {}
    verdicts = [Verdict(best.name, True, _why(best, fits, seconds, recorded, policy))]
    for kernel in fits:
        if kernel is not best:
            reason = f"fits; ranked after {best.name}"
            if kernel.name in seconds:
                reason = f"fits; measured {seconds[kernel.name] * 1e6:.1f} us"
            elif kernel.name in recorded:
                reason = f"fits; recorded {readable(recorded[kernel.name])}"
            verdicts.append(Verdict(kernel.name, False, reason))
    return Choice(call, device, policy, best, (*verdicts, *refusals), run)


def _why(
    best: Kernel, fits: tuple[Kernel, ...], seconds: dict[str, float], recorded: dict[str, float], policy: Policy
) -> str:
    if best.name in seconds:
        return f"the fastest of {len(seconds)} measured here: {seconds[best.name] * 1e6:.1f} us"
    if policy.kernel is not None:
        return "pinned by the policy"
    if len(fits) == 1:
        return "the only one that fits"
    first = "the first in the backend's order that fits"
    if best.name in recorded:
        first = f"the fastest recorded near this call: {readable(recorded[best.name])}"
    return first + ("; not measured here" if policy.measure else "")
