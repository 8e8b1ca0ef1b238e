"""The backends that ship with KernelPyTorch: one record each."""
