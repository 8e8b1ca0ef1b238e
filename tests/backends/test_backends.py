"""The backend contract on the four built-in backends: op x kernel x case x dtype."""

from kernel_pytorch.testing import BackendContract


class TestCpu(BackendContract):
    backend_name = "cpu"


class TestNvidia(BackendContract):
    backend_name = "nvidia"


class TestAmd(BackendContract):
    backend_name = "amd"


class TestIntel(BackendContract):
    backend_name = "intel"
