"""An AdamW whose state has eight bits an element, on sharded parameters: written plainly, without kernels.

    torchrun --standalone --nproc_per_node 2 examples/adam_8bit.py
    torchrun --standalone --nproc_per_node 2 examples/adam_8bit.py --steps 200

It trains a small model beside ``torch.optim.AdamW``, and prints the losses and the bytes of the states of both. Every
block of 256 elements has a scale. ``granularity`` keeps blocks whole on one rank, so nothing is communicated, and any
number of ranks computes the same bits from the same gradients."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from fsdp_compose import declare_blockwise, fully_shard
from fsdp_compose.optim import zeros_per_block

BLOCK = 256


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of one byte, and a scale for each block. The square root gives small values more of the codes."""
    blocks = F.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).clamp(min=1e-30)
    fractions = blocks / scales[:, None]
    codes = (fractions.sign() * fractions.abs().sqrt() * 127).round().to(torch.int8)
    return codes.view(-1)[: values.numel()], scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    roots = F.pad(codes.float(), (0, -codes.numel() % BLOCK)).view(-1, BLOCK) / 127
    return (roots * roots.abs() * scales[:, None]).view(-1)[: codes.numel()]


@declare_blockwise
class AdamW8(torch.optim.Optimizer):
    """``torch.optim.AdamW`` with moments of eight bits an element."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group, param in params:
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(param, dtype=torch.int8)
                    state[f"{name}_scale"] = zeros_per_block(param, BLOCK)
            self._update(group, state, *(_flat(tensor) for tensor in (param, param.grad)))

    def _update(self, group: dict[str, Any], state: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        state["step"] += 1
        step, (beta1, beta2) = state["step"].item(), group["betas"]
        places = [(_flat(state[name]), _flat(state[f"{name}_scale"])) for name in ("exp_avg", "exp_avg_sq")]
        mean, square = (dequantize(*place) for place in places)
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.addcdiv_(mean / (1 - beta1**step), root, value=-group["lr"])
        for (codes, scales), moment in zip(places, (mean, square), strict=True):
            new_codes, new_scales = quantize(moment)
            codes.copy_(new_codes)
            scales.copy_(new_scales)


def _flat(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor, 1-D, in its memory."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().view(-1)


def nbytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(_flat(t).nbytes for state in optimizer.state.values() for t in state.values() if t.dim())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
    models = [fully_shard(model, granularity=lambda _fqn, _param: BLOCK) for model in (first, copy.deepcopy(first))]
    optimizers = [AdamW8(models[0].parameters()), torch.optim.AdamW(models[1].parameters())]
    generator = torch.Generator().manual_seed(1)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    losses = [0.0, 0.0]
    for step in range(steps):
        x = torch.randn(128, 64, generator=generator)[rank::num_ranks]
        y = x[:, :8] * x[:, 8:16]
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach()
            dist.all_reduce(total)
            losses[i] = total.item() / num_ranks
        if rank == 0 and (step % 10 == 0 or step == steps - 1):
            print(f"step {step:3}  8 bits: loss {losses[0]:.4f}  32 bits: loss {losses[1]:.4f}", flush=True)
    if rank == 0:
        print(f"state on rank 0: {nbytes(optimizers[0]):,} and {nbytes(optimizers[1]):,} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
