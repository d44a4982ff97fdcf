"""Two small models for the demo and the benchmarks: a character GPT and a wide MLP.

Both draw their initial weights from torch's global generator: call ``torch.manual_seed`` first for equal
replicas.
There is no dropout, so that a run is determined by its seed and its batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MLP", "SmallGPT", "count_parameters"]


class SmallGPT(nn.Module):
    """A decoder-only transformer: learned positions, layer norm first, GELU, weights of 0.02 as in GPT-2.

    Args:
        vocabulary_size: Number of different tokens.
        context: Longest sequence, in tokens.
        width: Size of the residual stream; a multiple of ``num_heads``.
        num_layers: Number of blocks.
        num_heads: Attention heads of each block.

    Raises:
        ValueError: ``width`` is not a multiple of ``num_heads``.
    """

    def __init__(self, vocabulary_size: int, context: int, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        self.apply(_initialise)
        # GPT-2: what a block adds to the stream is scaled down so that its variance does not grow with depth.
        for name, parameter in self.named_parameters():
            if name.endswith("_out.weight"):
                nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: ``int64[batch, length]``, ``length`` at most ``context``.

        Returns:
            Logits, ``float[batch, length, vocabulary_size]``.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        stream = self.tokens(tokens) + self.positions(positions)
        logits: Tensor = self.head(self.norm(self.blocks(stream)))
        return logits

    @torch.no_grad()
    def generate(self, prompt: Tensor, num_tokens: int, generator: torch.Generator, temperature: float = 0.7) -> Tensor:
        """Continue one prompt by sampling.

        Args:
            prompt: ``int64[length]``, at least one token.
            num_tokens: How many tokens to add.
            generator: Source of randomness.
            temperature: Below 1 prefers likely tokens.

        Returns:
            ``int64[length + num_tokens]``: the prompt and its continuation.
        """
        tokens = prompt
        for _ in range(num_tokens):
            logits = self(tokens[None, -self.context :])[0, -1] / temperature
            chosen = torch.multinomial(functional.softmax(logits, dim=-1), 1, generator=generator)
            tokens = torch.cat((tokens, chosen))
        return tokens


class Block(nn.Module):
    """One transformer block: causal self-attention, then a feed-forward layer of four times the width."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width {width} is not a multiple of num_heads {num_heads}")
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """Add attention and feed-forward to the stream, ``float[batch, length, width]``."""
        batch, length, width = stream.shape
        heads = self.attention_in(self.attention_norm(stream)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.feed_out(functional.gelu(self.feed_in(self.feed_norm(stream))))
        return stream + fed


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class MLP(nn.Sequential):
    """Linear layers with ReLU between them; by default 14.6 million parameters, most in three square layers.

    Args:
        sizes: Width of the input, of every hidden layer and of the output: at least two.

    Raises:
        ValueError: Fewer than two sizes.
    """

    def __init__(self, sizes: Sequence[int] = (784, 2048, 2048, 2048, 2048, 200)) -> None:
        if len(sizes) < 2:
            raise ValueError(f"an MLP needs the sizes of its input and output, not {list(sizes)}")
        layers: list[nn.Module] = []
        for num_in, num_out in pairwise(sizes):
            layers += [nn.Linear(num_in, num_out), nn.ReLU()]
        super().__init__(*layers[:-1])


def count_parameters(model: nn.Module) -> int:
    """Number of elements of all parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
