"""The backend contract: each kernel on each case and dtype against float64, and more."""

from kernel_pytorch.testing import BackendContract


class TestAcme(BackendContract):
    backend_name = "acme"
