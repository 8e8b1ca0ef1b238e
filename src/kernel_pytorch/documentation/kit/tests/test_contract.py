"""What every backend must keep: each kernel on each case and format against float64, and more."""

from kernel_pytorch.testing import BackendContract


class TestAcme(BackendContract):
    backend_name = "acme"
