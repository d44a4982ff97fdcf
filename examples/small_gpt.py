"""A small GPT of torch's own layers: learned positions, layer norm first, weights of 0.02 as in GPT-2.

There is no dropout, so that a run is determined by its seed and its batches.
"""

import torch
from torch import Tensor, nn


class SmallGPT(nn.Module):
    """A decoder-only transformer.

    Args:
        vocabulary: Number of different tokens.
        context: Longest sequence, in tokens.
        width: Size of the residual stream; a multiple of ``heads``.
        layers: Number of blocks.
        heads: Attention heads of each block.
    """

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        shape = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, 4 * width, **shape) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # what a block adds is scaled down, so that its variance does not grow with depth
                added = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if added else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict each next token: ``int64[batch, length]`` to logits, ``float[batch, length, vocabulary]``."""
        length = tokens.shape[1]
        stream = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        causal = nn.Transformer.generate_square_subsequent_mask(length, tokens.device, stream.dtype)
        for block in self.blocks:
            stream = block(stream, src_mask=causal, is_causal=True)
        return self.head(self.norm(stream))
