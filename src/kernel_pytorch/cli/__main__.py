"""``python -m kernel_pytorch.cli``."""

from kernel_pytorch.cli import main

main()
