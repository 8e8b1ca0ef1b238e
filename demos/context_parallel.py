"""Train a small transformer whose sequences are spread over ranks, and see which schedule its attention takes.

Run it with ``torchrun --nproc-per-node 4 demos/context_parallel.py``; without torchrun it starts two ranks by itself.
Ranks talk through NCCL where each has a GPU, else through Gloo. ``kp.context_parallel.parallelize`` does the rest.

Shapes: B batch, N tokens, E hidden, H heads, D head dimension.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import kernel_pytorch as kp

TOKENS, VOCAB, HIDDEN, HEADS, STEPS = 512, 64, 64, 4, 21


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.ffn = nn.Sequential(
            nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x_BNE: torch.Tensor) -> torch.Tensor:
        heads_BHND = self.qkv(self.norm(x_BNE)).unflatten(-1, (3 * HEADS, HIDDEN // HEADS)).transpose(1, 2)
        q, k, v = heads_BHND.chunk(3, dim=1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BNE = x_BNE + self.out(attended.transpose(1, 2).flatten(2))
        return x_BNE + self.ffn(x_BNE)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(TOKENS, HIDDEN)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device) if position_ids is None else position_ids
        return self.head(self.blocks(self.tokens(input_ids) + self.positions(places)))


def train() -> None:
    """What every rank runs."""
    group = dist.group.WORLD
    cuda = "nccl" in dist.get_backend(group)
    where = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    first = dist.get_rank(group) == 0

    torch.manual_seed(0)  # the same model and the same whole sequence on every rank
    mask = kp.masks.causal()
    model = kp.context_parallel.parallelize(Model().to(where), group, mask, gather_output=False)
    averaging = DistributedDataParallel(model, process_group=group)
    tokens_BN = torch.randint(VOCAB, (2, 8), device=where).repeat(1, TOKENS // 8)

    cp = kp.context_parallel.Context(group, TOKENS, mask)
    targets_BN = cp.shard(functional.pad(tokens_BN[:, 1:], (0, 1), value=-100))
    q = torch.randn(2, HEADS, cp.tokens, HIDDEN // HEADS, device=where)
    if first:
        print(f"{dist.get_world_size(group)} ranks, {dist.get_backend(group)}; {cp}\n")
        print(kp.explain(kp.attention, q, q, q, mask, group=cp), "\n")
        print("step  loss over all ranks")

    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        logits = averaging(tokens_BN)  # of this rank's tokens
        losses = functional.cross_entropy(logits.flatten(0, 1), targets_BN.flatten(), reduction="none")
        loss = kp.context_parallel.token_mean(losses[targets_BN.flatten() != -100], cp)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if first and step % 5 == 0:
            print(f"{step:4d}  {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(
            subprocess.call([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__])
        )
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    train()
    dist.destroy_process_group()
