"""The ``kernel-pytorch`` command: ``commands`` declares the options, one module per command does the work."""

from kernel_pytorch.cli.commands import main

__all__ = ["main"]
