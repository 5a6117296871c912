"""Dispatch and combine in ten lines, with or without GPUs.

Start it with `torchrun --standalone --nproc-per-node 4 examples/ten_lines.py`.
"""

import torch

from hybrid_ep import Buffer

buffer = Buffer(num_experts=8)  # one of the ranks that torchrun started
torch.manual_seed(buffer.rank)
tokens = torch.randn(max(0, 1000 - 250 * buffer.rank), 512).to(buffer.device, torch.bfloat16)  # any number on each rank
topk_idx = torch.rand(len(tokens), 8).topk(2).indices.to(buffer.device)  # in place of a router: 2 of 8 experts
topk_weights = torch.full(topk_idx.shape, 0.5, device=buffer.device)

received = buffer.dispatch_with_permute(tokens, topk_idx, topk_weights)  # rows of this rank's experts, expert by expert
outputs = received.tokens * received.probs[:, None].bfloat16()  # in place of experts: each row times its weight
combined = buffer.combine_with_unpermute(outputs, received.handle).tokens  # summed per token, on the token's rank

if buffer.rank == 0:
    print(f"rank 0 of {buffer.world_size} sent {len(tokens)} tokens to 2 of {buffer.num_experts} experts each,")
    rows = ", ".join(
        f"{n} for expert {e}" for e, n in zip(buffer.local_experts, received.tokens_per_expert.tolist(), strict=True)
    )
    print(f"received {len(received.tokens)} rows: {rows};")
    print(f"its tokens came back {'bit for bit' if torch.equal(combined, tokens) else 'CHANGED'}")
buffer.close()
