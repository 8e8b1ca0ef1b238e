"""Ring attention and context parallelism; ``kernel_pytorch.context_parallel`` has the public names."""
