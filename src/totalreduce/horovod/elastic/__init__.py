"""Horovod's elastic training: a function that is run again when processes are lost or join.

>>> import totalreduce.horovod as hvd                                                   # doctest: +SKIP
>>> @hvd.elastic.run                                                                    # doctest: +SKIP
... def train(state):
...     for state.epoch in range(state.epoch, epochs):
...         ...
...         state.commit()
>>> train(hvd.elastic.TorchState(model, optimizer, epoch=0))                            # doctest: +SKIP

Names and arguments are those of ``horovod.torch.elastic`` 0.28. ``totalreduce run --on-loss replace`` or ``shrink``
decides what follows the loss of a process. ``docs/horovod-elastic.md`` has the differences.
"""

from __future__ import annotations

from totalreduce.horovod.elastic.running import run
from totalreduce.horovod.elastic.sampler import ElasticSampler
from totalreduce.horovod.elastic.state import HostsUpdatedInterrupt, ObjectState, State, TorchState

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]
