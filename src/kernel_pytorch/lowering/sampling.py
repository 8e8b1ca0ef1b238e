"""Choose the next token from logits: greedy, or by temperature and nucleus (top-p) sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["Sampling", "sample"]


_LIKELY = 512
"""Number of likely tokens to sort first, because sorting a whole vocabulary takes milliseconds."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Example:
        >>> Sampling(temperature=0.7, top_p=0.9).seed
        0
    """

    temperature: float = 0.0
    """0 takes the most likely token; larger values flatten the distribution."""
    top_p: float = 1.0
    """Sample from the fewest tokens whose probabilities sum to at least this."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: use 0 for greedy, or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: use a number above 0 and at most 1")


def sample(logits: torch.Tensor, how: Sampling, generator: torch.Generator) -> int:
    """Return a token id from logits of shape (vocabulary,).

    Example:
        >>> sample(torch.tensor([0.0, 3.0, 1.0]), Sampling(), torch.Generator())
        1
    """
    if how.temperature == 0:
        return int(logits.argmax())
    probabilities = (logits.double() / how.temperature).softmax(dim=-1)
    if how.top_p == 1:
        return int(torch.multinomial(probabilities, 1, generator=generator))
    likely, places = probabilities.topk(min(_LIKELY, len(probabilities)))
    if likely.sum() < how.top_p:  # a flat distribution: sort the whole vocabulary
        likely, places = probabilities.sort(descending=True)
    nucleus = likely[likely.cumsum(dim=-1) - likely < how.top_p]
    return int(places[torch.multinomial(nucleus, 1, generator=generator)])
