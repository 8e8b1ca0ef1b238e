"""Private APIs of torch without a public replacement, each with a self-test and a fallback.

``modes`` detects dispatch modes and transforms; ``structures`` has pytrees, dispatch modes and fake tensors;
``compiler`` has torch.compile's counters and limits; ``memory`` has allocation and integer matmul.
``private.PRIVATE_NAMES`` lists every name that was looked up.
"""
