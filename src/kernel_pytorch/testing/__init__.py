"""Test utilities for kernels and backends, also for third parties: contract, error budgets, poisoned memory."""

from kernel_pytorch.testing.budget import Comparison, compare
from kernel_pytorch.testing.contract import BackendContract
from kernel_pytorch.testing.devices import cannot_run, interpreting, pretend, test_device
from kernel_pytorch.testing.poison import poisoned

__all__ = [
    "BackendContract",
    "Comparison",
    "cannot_run",
    "compare",
    "interpreting",
    "poisoned",
    "pretend",
    "test_device",
]
