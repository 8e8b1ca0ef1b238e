"""Ring attention: each rank holds a part of the sequence, and together they compute what one process does.

Run it with ``torchrun --nproc-per-node 4 demos/ring_attention.py``; without torchrun it starts two ranks by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist

import kernel_pytorch as kp

HEADS, LENGTH, DIM = 4, 1024, 32

if "RANK" not in os.environ:
    sys.exit(subprocess.call([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__]))

torch.set_num_threads(1)
dist.init_process_group("gloo")
group = dist.group.WORLD
torch.manual_seed(0)  # the same whole sequence everywhere, to compare with
whole = [torch.randn(1, HEADS, LENGTH, DIM) for _ in range(3)]
mask = kp.masks.causal() & (kp.masks.window(256) | kp.masks.sinks(4))

cp = kp.context_parallel.Context(group, LENGTH, mask)
own = [cp.shard(x, dim=2).requires_grad_() for x in whole]
out = kp.attention(*own, mask, group=cp)
out.square().sum().backward()

alone = [x.clone().requires_grad_() for x in whole]
kp.attention(*alone, mask).square().sum().backward()
errors = [float((cp.unshard(out.detach(), dim=2) - kp.attention(*whole, mask)).abs().max())]
errors += [float((cp.unshard(x.grad, dim=2) - y.grad).abs().max()) for x, y in zip(own, alone, strict=True)]

rows: list[tuple[int, int, int]] = [(0, 0, 0)] * dist.get_world_size()
dist.all_gather_object(rows, (dist.get_rank(), cp.tokens, sum(x.nbytes for x in own)))
if dist.get_rank() == 0:
    print(f"{len(rows)} ranks, {LENGTH} tokens, {mask}")
    print(kp.explain(kp.attention, *(x.detach() for x in own), mask, group=cp))
    print("\nrank  tokens  bytes of q, k and v")
    for rank, tokens, held in rows:
        print(f"{rank:4}  {tokens:6}  {held:,} of {sum(x.nbytes for x in whole):,}")
    print("\nlargest difference from one process")
    for name, error in zip(("out", "dq", "dk", "dv"), errors, strict=True):
        print(f"{name:4}  {error:.1e}")
    assert max(errors) < 1e-4
dist.destroy_process_group()
