"""Parity training: compare FP8 with bf16 training from the same seeds. ``kernel-pytorch parity`` runs it."""
