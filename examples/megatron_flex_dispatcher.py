"""Megatron-Core's MoE layer on hybrid_ep: `--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep`.

    torchrun --standalone --nproc-per-node 4 examples/megatron_flex_dispatcher.py
    torchrun --standalone --nproc-per-node 4 examples/megatron_flex_dispatcher.py --tensor-parallel 2

The program builds the layer twice with the same weights: with that dispatcher, and with Megatron's all-gather
dispatcher. Outputs and all gradients must agree. Megatron-Core (`pip install megatron-core`) is not modified. Without a
GPU, tensors are on the CPU and ranks communicate through gloo.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys

import torch
import torch.distributed as dist

from hybrid_ep.install import install_as_deep_ep

# This precedes the import of Megatron, which imports deep_ep if it finds it.
install_as_deep_ep()

CUDA = torch.cuda.is_available()
if not CUDA:
    # Megatron puts its tensors on this device.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]

try:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import fused_a2a
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig
except ImportError as error:
    sys.exit(f"{error}: this example runs Megatron-Core; `pip install megatron-core`, and try again")


class Router(TopKRouter):
    """Megatron's router with a gate that does not need Transformer Engine."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(input.float(), self.weight.float())


def main() -> None:
    options = parse_options()
    device = join()
    world = dist.get_world_size()
    tensor_parallel = options.tensor_parallel
    if world < 2 or world % tensor_parallel:
        start = f"torchrun --standalone --nproc-per-node 4 {sys.argv[0]}"
        sys.exit(f"start at least 2 ranks, a multiple of --tensor-parallel: {start}")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        expert_model_parallel_size=world // tensor_parallel,
        expert_tensor_parallel_size=tensor_parallel,
    )
    torch.manual_seed(options.seed + dist.get_rank())
    flex = build("flex", options).to(device)
    dist.broadcast(flex.router.weight.data, src=0)
    allgather = build("allgather", options).to(device)
    allgather.load_state_dict(flex.state_dict())

    tokens = torch.randn(options.tokens, 1, options.hidden, dtype=options.dtype, device=device)
    gradient = torch.randn_like(tokens)
    largest = max(compare(step(flex, tokens, gradient), step(allgather, tokens, gradient)).values())
    worst = torch.tensor(largest, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(
            f"{world} ranks on {device.type}, tensor parallel {tensor_parallel}, {options.tokens} tokens a rank, "
            f"hidden {options.hidden}, {options.experts} experts, top-{options.topk}, {options.dtype}\n"
            f"dispatcher: {type(flex.token_dispatcher._comm_manager).__name__} over "
            f"{fused_a2a.HybridEPBuffer.__module__}\n"
            f"flex against allgather, outputs and gradients: relative difference {worst.item():.1e} at most"
        )
    limit = 1e-5 if options.dtype == torch.float32 else 2e-2
    fused_a2a.reset_hybrid_ep_buffer()
    dist.destroy_process_group()
    if worst.item() > limit:
        sys.exit(f"that is more than {limit:.0e}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="megatron_flex_dispatcher.py"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="tensor parallel size, of the experts as well")
    parser.add_argument("--tokens", type=int, default=256, help="tokens a rank")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--bf16", dest="dtype", action="store_const", const=torch.bfloat16, default=torch.float32)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def join() -> torch.device:
    if not CUDA:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def build(dispatcher: str, options: argparse.Namespace) -> MoELayer:
    tensor_parallel = options.tensor_parallel
    config = TransformerConfig(
        num_layers=1,
        num_attention_heads=4,
        hidden_size=options.hidden,
        moe_ffn_hidden_size=options.hidden,
        num_moe_experts=options.experts,
        moe_router_topk=options.topk,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=dispatcher,
        moe_flex_dispatcher_backend="hybridep",
        tensor_model_parallel_size=tensor_parallel,
        expert_tensor_parallel_size=tensor_parallel,
        expert_model_parallel_size=dist.get_world_size() // tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        params_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
    )
    mlp = get_gpt_layer_local_spec(num_experts=options.experts, moe_grouped_gemm=False).submodules.mlp
    return MoELayer(config, dataclasses.replace(mlp.submodules, router=Router))


def step(layer: MoELayer, tokens: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """Runs forward and backward; returns the output, and the gradients of the tokens and all parameters."""
    tokens = tokens.clone().requires_grad_()
    layer.zero_grad()
    output, _ = layer(tokens)
    output.backward(gradient)
    assert tokens.grad is not None
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    return {"output": output.detach(), "tokens": tokens.grad, **gradients}


def compare(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Computes relative differences, and ignores zeros: an expert without tokens has a zero gradient or none."""
    names = {name for side in (ours, theirs) for name, value in side.items() if value.any()}
    missing = [name for name in names if name not in ours or name not in theirs]
    if missing:
        sys.exit(f"rank {dist.get_rank()}: only one of the dispatchers gave {', '.join(sorted(missing))}")
    norm = torch.linalg.vector_norm
    return {
        name: (norm(ours[name].float() - theirs[name].float()) / norm(theirs[name].float())).item() for name in names
    }


if __name__ == "__main__":
    main()
