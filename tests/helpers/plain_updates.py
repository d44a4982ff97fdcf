"""The reference of ``kernels/updates.py`` in plain NumPy, in float64: new values and state of listed rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from totalreduce.server.optimizers import FTRL, SGD, Adagrad, Adam, Momentum, Optimizer, Sum

Array = np.ndarray[Any, Any]


def update(optimizer: Optimizer, values: Array, states: list[Array], rows: Array, gradients: Array) -> None:
    """Change values of shape (n, width) and the state; ``gradients`` has shape (len(rows), width)."""
    g, w = gradients, values[rows]
    match optimizer:
        case Sum():
            w = w + g
        case SGD():
            w = w - optimizer.lr * g
        case Momentum():
            states[0][rows] = optimizer.momentum * states[0][rows] + g
            w = w - optimizer.lr * states[0][rows]
        case Adagrad():
            states[0][rows] += g**2
            w = w - optimizer.lr * g / (np.sqrt(states[0][rows]) + optimizer.eps)
        case Adam():
            b1, b2 = optimizer.beta1, optimizer.beta2
            states[0][rows] = b1 * states[0][rows] + (1 - b1) * g
            states[1][rows] = b2 * states[1][rows] + (1 - b2) * g**2
            states[2][rows] += 1
            mean, square = states[0][rows] / (1 - b1 ** states[2][rows]), states[1][rows] / (1 - b2 ** states[2][rows])
            w = w - optimizer.lr * mean / (np.sqrt(square) + optimizer.eps)
        case FTRL():
            z, n = states[0][rows], states[1][rows]
            sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / optimizer.alpha
            z, n = z + g - sigma * w, n + g**2
            states[0][rows], states[1][rows] = z, n
            shrunk = np.sign(z) * np.maximum(np.abs(z) - optimizer.l1, 0)
            w = -shrunk / ((optimizer.beta + np.sqrt(n)) / optimizer.alpha + optimizer.l2)
    values[rows] = w
