"""What the PyTorch peers share: device, precision, and a training step around any model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import torch
from measure import Case, Peer, Work
from torch.nn import functional

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# All sides compute in float32 throughout
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
if DEVICE.type == "cpu":
    torch.set_num_threads(os.cpu_count() or 1)


class TorchPeer(Peer):
    """A peer on PyTorch: on CUDA where there is one, else on the CPU."""

    packages: tuple[str, ...] = ()

    def about(self) -> dict[str, Any]:
        device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
        return {"versions": {p: version(p) for p in ("torch", *self.packages)}, "device": device}

    def gpu_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else None


def to_tensor(array: Any) -> torch.Tensor:
    """The array on the device."""
    return torch.from_numpy(array).to(DEVICE)


def work(start: Callable[[], Any], values: Callable[[Any], dict[str, torch.Tensor]]) -> Work:
    """A kernel's work: `values` gives the tensors to compare."""
    return Work(
        start,
        lambda result: {k: v.detach().cpu().numpy() for k, v in values(result).items()},
        lambda _: torch.cuda.synchronize() if DEVICE.type == "cuda" else None,
    )


def training_step(
    case: Case, params: Iterable[torch.Tensor], loss_of: Callable[[], torch.Tensor]
) -> dict[str, Work]:
    """Backward, clipping and AdamW around a function that computes the loss."""
    params = list(params)
    optimizer = torch.optim.AdamW(
        params,
        lr=case.lr,
        betas=(case.beta1, case.beta2),
        eps=case.eps,
        weight_decay=case.weight_decay,
        fused=True,
    )

    def start() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, case.max_grad_norm)
        optimizer.step()
        return loss.detach()

    return {"step": Work(start, lambda loss: {"loss": float(loss)}, lambda loss: loss.item())}


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of each token after the first."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
