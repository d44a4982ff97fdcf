"""Real data that need no download: handwritten digits, and the text of Python's own documentation."""

import pydoc_data.topics

import torch
from torch import Tensor

#: Characters of ``characters``: those of ASCII; the last one stands for all others.
VOCABULARY = 128


def digits() -> tuple[Tensor, Tensor]:
    """Handwritten digits (UCI, by way of scikit-learn).

    Returns:
        ``float[1797, 1, 8, 8]`` from -1 to 1, and ``int64[1797]``.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit("this example trains on scikit-learn's digits: pip install scikit-learn") from error
    loaded = load_digits()
    return torch.tensor(loaded.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(loaded.target)


def documentation() -> str:
    """The text behind ``help("topics")``, 0.5 MB."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def characters(text: str) -> Tensor:
    """The characters of a text as numbers below ``VOCABULARY``, ``int64[length]``."""
    return torch.tensor([min(ord(character), VOCABULARY - 1) for character in text])


def next_characters(length: int) -> tuple[Tensor, Tensor]:
    """All stretches of the documentation, and the character that follows each.

    Args:
        length: Characters of a stretch.

    Returns:
        ``int64[n, length]`` and ``int64[n]``.
    """
    text = characters(documentation())
    return text.unfold(0, length, 1)[:-1], text[length:]
