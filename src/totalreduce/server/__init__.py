"""A parameter server for sparse keys and dense ranges of keys. Programs call it ``tr.ps``."""

from totalreduce.server.clocks import Bounded, Consistency, Eventual, Sequential
from totalreduce.server.connecting import connect
from totalreduce.server.connection import Connection, ServerStatistics, Ticket
from totalreduce.server.filters import KKT, Filter, Significant
from totalreduce.server.optimizers import FTRL, SGD, Adagrad, Adam, Momentum, Optimizer, Replace, Sum
from totalreduce.server.torch_rule import Torch

__all__ = [
    "FTRL",
    "KKT",
    "SGD",
    "Adagrad",
    "Adam",
    "Bounded",
    "Connection",
    "Consistency",
    "Eventual",
    "Filter",
    "Momentum",
    "Optimizer",
    "Replace",
    "Sequential",
    "ServerStatistics",
    "Significant",
    "Sum",
    "Ticket",
    "Torch",
    "connect",
]
