"""totalreduce keeps the replicas of a PyTorch model in step over ordinary networks.

>>> import totalreduce as tr                                                            # doctest: +SKIP
>>> group = tr.init()                                                                   # doctest: +SKIP
>>> optimizer = tr.DistributedOptimizer(torch.optim.AdamW(...), model, group=group)     # doctest: +SKIP

Importing this package is instant: names are loaded (and torch with them) when they are first used. It also makes
``torch.distributed.init_process_group("totalreduce")`` work.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from totalreduce.foundation import systems as _systems  # noqa: F401  # isort: skip  (it refuses other systems)
from totalreduce.c10d import registration as _registration
from totalreduce.foundation.version import VERSION

if TYPE_CHECKING:
    from totalreduce import server as ps
    from totalreduce.c10d.attempts import attempts
    from totalreduce.c10d.sync_ddp import sync_ddp
    from totalreduce.codecs.half import Half
    from totalreduce.codecs.int4 import Int4
    from totalreduce.codecs.int8 import Int8
    from totalreduce.codecs.onebit import OneBit
    from totalreduce.codecs.plain import Plain
    from totalreduce.codecs.ternary import Ternary
    from totalreduce.codecs.threshold import Threshold
    from totalreduce.codecs.topk import Topk
    from totalreduce.coordination.config import CoordinationConfig
    from totalreduce.foundation.config import EngineConfig, TcpConfig, Tls
    from totalreduce.foundation.errors import (
        AuthenticationError,
        ConfigurationError,
        DeadlineExceededError,
        GroupClosed,
        MismatchError,
        MissingTensorError,
        PeerLost,
        PlanMismatchError,
        ProtocolError,
        RecoveryError,
        RefusedError,
        RendezvousError,
        ReplayMismatchError,
        SlowWorkersError,
        StallError,
        TotalReduceError,
        UnsupportedError,
        WorkerFailedError,
    )
    from totalreduce.foundation.observer import Observer
    from totalreduce.foundation.types import ReduceOp
    from totalreduce.groups.group import Group
    from totalreduce.groups.plan import Plan, TensorSpec
    from totalreduce.groups.statistics import Statistics
    from totalreduce.groups.steps import StepReport
    from totalreduce.launch.bootstrap import init
    from totalreduce.launch.functions import run
    from totalreduce.native.coordinator import Coordinator
    from totalreduce.pytorch.adasum import AdasumOptimizer, adasum_
    from totalreduce.pytorch.broadcast import broadcast_optimizer_state, broadcast_parameters
    from totalreduce.pytorch.ddp_hook import ddp_hook
    from totalreduce.pytorch.error_feedback import ErrorFeedback
    from totalreduce.pytorch.optimizer import DistributedOptimizer
    from totalreduce.pytorch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
    from totalreduce.recovery.attempts import Attempt
    from totalreduce.recovery.checkpoint import Checkpoint
    from totalreduce.recovery.copies import ShardCopies
    from totalreduce.recovery.job import Job, recoverable
    from totalreduce.recovery.replayed import ReplayedJob, replayed
    from totalreduce.recovery.sampler import ElasticSampler
    from totalreduce.recovery.snapshots import Snapshots
    from totalreduce.recovery.state import State
    from totalreduce.recovery.stream import ElasticStream
    from totalreduce.server.dense import ParameterServer
    from totalreduce.server.served import Async, Eager, Quorum, SoftSync, StaleSynchronous
    from totalreduce.sparse.auto import Auto
    from totalreduce.sparse.coded import Coded
    from totalreduce.sparse.dense import Dense
    from totalreduce.sparse.gaussiank import GaussianK
    from totalreduce.sparse.gtopk import GTopk
    from totalreduce.sparse.oktopk import OkTopk
    from totalreduce.sparse.powersgd import PowerSGD
    from totalreduce.sparse.shared import SharedTopk
    from totalreduce.sparse.topka import TopkA
    from totalreduce.sparse.topkdsa import TopkDSA
    from totalreduce.strategies.async_gossip import AsyncGossip
    from totalreduce.strategies.averaging import LocalSGD, PostLocalSGD
    from totalreduce.strategies.easgd import EASGD
    from totalreduce.strategies.gossip import Gossip
    from totalreduce.strategies.outer import DiLoCo, HeavyBall, Nesterov, SlowMo
    from totalreduce.strategies.strom import Strom
    from totalreduce.tensors.work import Work

__version__ = VERSION

_HOMES = {
    "AdasumOptimizer": "pytorch.adasum",
    "Async": "server.served",
    "AsyncGossip": "strategies.async_gossip",
    "Attempt": "recovery.attempts",
    "AuthenticationError": "foundation.errors",
    "Auto": "sparse.auto",
    "Checkpoint": "recovery.checkpoint",
    "Coded": "sparse.coded",
    "ConfigurationError": "foundation.errors",
    "CoordinationConfig": "coordination.config",
    "Coordinator": "native.coordinator",
    "DeadlineExceededError": "foundation.errors",
    "Dense": "sparse.dense",
    "DiLoCo": "strategies.outer",
    "DistributedOptimizer": "pytorch.optimizer",
    "EASGD": "strategies.easgd",
    "Eager": "server.served",
    "ElasticSampler": "recovery.sampler",
    "ElasticStream": "recovery.stream",
    "EngineConfig": "foundation.config",
    "ErrorFeedback": "pytorch.error_feedback",
    "GTopk": "sparse.gtopk",
    "GaussianK": "sparse.gaussiank",
    "Gossip": "strategies.gossip",
    "Group": "groups.group",
    "GroupClosed": "foundation.errors",
    "Half": "codecs.half",
    "HeavyBall": "strategies.outer",
    "Int4": "codecs.int4",
    "Int8": "codecs.int8",
    "Job": "recovery.job",
    "LocalSGD": "strategies.averaging",
    "MismatchError": "foundation.errors",
    "MissingTensorError": "foundation.errors",
    "Nesterov": "strategies.outer",
    "Observer": "foundation.observer",
    "OkTopk": "sparse.oktopk",
    "OneBit": "codecs.onebit",
    "ParameterServer": "server.dense",
    "PeerLost": "foundation.errors",
    "Plain": "codecs.plain",
    "Plan": "groups.plan",
    "PlanMismatchError": "foundation.errors",
    "PostLocalSGD": "strategies.averaging",
    "PowerSGD": "sparse.powersgd",
    "ProtocolError": "foundation.errors",
    "Quorum": "server.served",
    "RecoveryError": "foundation.errors",
    "RefusedError": "foundation.errors",
    "ReduceOp": "foundation.types",
    "RendezvousError": "foundation.errors",
    "ReplayMismatchError": "foundation.errors",
    "ReplayedJob": "recovery.replayed",
    "ShardCopies": "recovery.copies",
    "SharedTopk": "sparse.shared",
    "SlowMo": "strategies.outer",
    "Snapshots": "recovery.snapshots",
    "SoftSync": "server.served",
    "StaleSynchronous": "server.served",
    "SlowWorkersError": "foundation.errors",
    "StallError": "foundation.errors",
    "State": "recovery.state",
    "Statistics": "groups.statistics",
    "StepReport": "groups.steps",
    "Strom": "strategies.strom",
    "SyncBatchNorm": "pytorch.sync_batch_norm",
    "TcpConfig": "foundation.config",
    "TensorSpec": "groups.plan",
    "Ternary": "codecs.ternary",
    "Threshold": "codecs.threshold",
    "Tls": "foundation.config",
    "Topk": "codecs.topk",
    "TopkA": "sparse.topka",
    "TopkDSA": "sparse.topkdsa",
    "TotalReduceError": "foundation.errors",
    "UnsupportedError": "foundation.errors",
    "Work": "tensors.work",
    "WorkerFailedError": "foundation.errors",
    "adasum_": "pytorch.adasum",
    "attempts": "c10d.attempts",
    "broadcast_optimizer_state": "pytorch.broadcast",
    "broadcast_parameters": "pytorch.broadcast",
    "convert_sync_batchnorm": "pytorch.sync_batch_norm",
    "ddp_hook": "pytorch.ddp_hook",
    "init": "launch.bootstrap",
    "recoverable": "recovery.job",
    "replayed": "recovery.replayed",
    "run": "launch.functions",
    "sync_ddp": "c10d.sync_ddp",
}

__all__ = [
    "EASGD",
    "AdasumOptimizer",
    "Async",
    "AsyncGossip",
    "Attempt",
    "AuthenticationError",
    "Auto",
    "Checkpoint",
    "Coded",
    "ConfigurationError",
    "CoordinationConfig",
    "Coordinator",
    "DeadlineExceededError",
    "Dense",
    "DiLoCo",
    "DistributedOptimizer",
    "Eager",
    "ElasticSampler",
    "ElasticStream",
    "EngineConfig",
    "ErrorFeedback",
    "GTopk",
    "GaussianK",
    "Gossip",
    "Group",
    "GroupClosed",
    "Half",
    "HeavyBall",
    "Int4",
    "Int8",
    "Job",
    "LocalSGD",
    "MismatchError",
    "MissingTensorError",
    "Nesterov",
    "Observer",
    "OkTopk",
    "OneBit",
    "ParameterServer",
    "PeerLost",
    "Plain",
    "Plan",
    "PlanMismatchError",
    "PostLocalSGD",
    "PowerSGD",
    "ProtocolError",
    "Quorum",
    "RecoveryError",
    "ReduceOp",
    "RefusedError",
    "RendezvousError",
    "ReplayMismatchError",
    "ReplayedJob",
    "ShardCopies",
    "SharedTopk",
    "SlowMo",
    "SlowWorkersError",
    "Snapshots",
    "SoftSync",
    "StaleSynchronous",
    "StallError",
    "State",
    "Statistics",
    "StepReport",
    "Strom",
    "SyncBatchNorm",
    "TcpConfig",
    "TensorSpec",
    "Ternary",
    "Threshold",
    "Tls",
    "Topk",
    "TopkA",
    "TopkDSA",
    "TotalReduceError",
    "UnsupportedError",
    "Work",
    "WorkerFailedError",
    "__version__",
    "adasum_",
    "attempts",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "convert_sync_batchnorm",
    "ddp_hook",
    "init",
    "ps",
    "recoverable",
    "replayed",
    "run",
    "sync_ddp",
]


#: Packages that have a short name.
_PACKAGES = {"ps": "server"}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"totalreduce.{_PACKAGES[name]}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'totalreduce' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"totalreduce.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


_registration.install()
