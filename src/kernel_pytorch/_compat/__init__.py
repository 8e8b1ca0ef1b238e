"""Private APIs of torch that no public one replaces: each in one place, with a self-test and a way to go without it.

``modes`` says what watches or transforms a call; ``structures`` has trees, dispatch modes and fake tensors;
``compiler`` has what torch.compile keeps to itself; ``memory`` has allocation and integer matmul.
``private.PRIVATE_NAMES`` lists every name that was looked up.
"""
