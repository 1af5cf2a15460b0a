"""What a PyTorch user would write: the models of ``fb.models`` as modules, with torch's optimizer and loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 with a tied head; forward gives the mean next-token loss."""

    def __init__(self, vocabulary: int, positions: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class LlamaBlock(nn.Module):
    """RMSNorm, grouped-query attention with rotary positions, SwiGLU."""

    def __init__(self, width: int, inner: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        kept = groups * self.size
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(width, n, bias=False) for n in (width, kept, kept, width))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (-1, self.size)).transpose(1, 2)

        def rotate(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        h = self.norm_1(x)
        q, k, v = rotate(heads(self.q(h))), rotate(heads(self.k(h))), heads(self.v(h))
        h = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Llama 3 with a tied head; forward gives the mean next-token loss."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        inner: int,
        layers: int,
        heads: int,
        groups: int,
        length: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, inner, heads, groups) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        size = width // heads
        angles = torch.outer(torch.arange(length).float(), 500000.0 ** -(torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).to(self.dtype)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def eager_step(
    model: nn.Module, lr: float, weight_decay: float, max_norm: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The usual loop body: forward, backward, clip, AdamW."""
    return amp_step(model, model, lr, weight_decay, max_norm, dtype=None)


def amp_step(
    model: nn.Module,
    forward: Callable[[torch.Tensor], torch.Tensor],
    lr: float,
    weight_decay: float,
    max_norm: float,
    dtype: torch.dtype | None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The loop body with autocast to ``dtype`` (None: without); ``forward`` is the model, or the model compiled."""
    fused = dtype is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, fused=fused or None)
    device = next(model.parameters()).device.type

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = forward(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
