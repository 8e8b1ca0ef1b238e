"""Fusion of quantization into the producer: SwiGLU and RMSNorm modules of a converted model."""
