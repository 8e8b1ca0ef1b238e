"""The ``kernel-pytorch`` command: ``commands`` declares the options, and one module per command implements it."""

from kernel_pytorch.cli.commands import main

__all__ = ["main"]
