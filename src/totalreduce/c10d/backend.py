"""Builds a process group when torch asks for one, with process groups of other back ends for other devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist

from totalreduce.c10d.names import BACKEND_NAME
from totalreduce.c10d.process_group import ProcessGroupTotalReduce
from totalreduce.c10d.work import as_torch_error, seconds_of
from totalreduce.foundation.errors import ConfigurationError, TotalReduceError
from totalreduce.groups.group import Group
from totalreduce.launch.bootstrap import init
from totalreduce.launch.rendezvous import StoreRank
from totalreduce.pytorch.hooks import StepCounter

__all__ = ["create", "forming"]

#: The group that the default process group is made of, while ``forming`` is active.
_formed: ContextVar[Group | None] = ContextVar("formed", default=None)


@contextmanager
def forming(group: Group) -> Iterator[None]:
    """Have ``init_process_group`` take a group that is formed already. It closes the group if it fails."""
    token = _formed.set(group)
    try:
        yield
    except BaseException:
        group.close(0.0)
        raise
    finally:
        _formed.reset(token)


def create(options: Any, backend_options: Any, caller: Mapping[str, Any]) -> ProcessGroupTotalReduce:
    """Build a process group for ``init_process_group`` or ``new_group``. Collective if it needs its own connections.

    If the default process group is one of this library, the new group shares its engine and its connections; otherwise
    its ranks meet in the store.

    Args:
        options: torch's ``_DistributedBackendOptions``: store, ranks, time-out, name.
        backend_options: ``pg_options`` of the caller, which must be ``None``.
        caller: Variables of torch's ``_new_process_group_helper``. A process group written in Python replaces the one
            that torch prepares, so it must also make the back ends of further devices
            (``"cpu:totalreduce,cuda:nccl"``). Torch does not pass them on: they are in ``backend_config`` in its frame.

    Raises:
        torch.distributed.DistBackendError: The ranks could not find or reach each other in time.
        ValueError: ``pg_options``, or contradictory settings.
    """
    if backend_options is not None:
        raise ConfigurationError("totalreduce takes no pg_options; see docs/reference/environment.md")
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    default = dist.distributed_c10d._world.default_pg
    try:
        formed = _formed.get()
        if formed is not None:
            group = formed
        elif isinstance(default, ProcessGroupTotalReduce):
            group = default.group.subgroup(ranks, name=options.group_id)
        else:
            group = _connect(options)
    except TotalReduceError as error:
        if isinstance(error, ConfigurationError):
            raise
        raise as_torch_error(error) from error
    if group.operations.parent is None:
        group.at_close(StepCounter(group.meter.end_step).remove)
    devices = _devices(caller)
    others, close_others = _others(options, ranks, {d: b for d, b in devices.items() if b != BACKEND_NAME}, caller)
    return ProcessGroupTotalReduce(
        group, options.store, options.timeout, devices=list(devices), others=others, close_others=close_others
    )


def _connect(options: Any) -> Group:
    return init(
        name=options.group_id or "torch.distributed",
        timeout_s=seconds_of(options.timeout),
        store=StoreRank(options.store, options.group_rank, options.group_size),
    )


def _devices(caller: Mapping[str, Any]) -> dict[str, str]:
    """Return the back end of every device; without ``backend_config``, this one for all devices that it supports."""
    config = caller.get("backend_config")
    if config is None:
        return dict.fromkeys(dist.Backend.backend_capability[BACKEND_NAME], BACKEND_NAME)
    return {str(device): str(backend) for device, backend in config.get_device_backend_map().items()}


def _others(
    options: Any, ranks: list[int], wanted: Mapping[str, str], caller: Mapping[str, Any]
) -> tuple[dict[str, dist.ProcessGroup], Callable[[], None]]:
    """Return the process groups for devices with other back ends, by device, and the function that ends them."""
    if not wanted:
        return {}, lambda: None
    c10d: Any = dist.distributed_c10d
    name = f"{options.group_id}/others"
    # A tag of its own, so that a search for a group of these ranks does not find this part of one.
    other, _ = c10d._new_process_group_helper(
        options.group_size,
        options.group_rank,
        list(options.global_ranks_in_group),
        ",".join(f"{device}:{backend}" for device, backend in wanted.items()),
        options.store,
        group_name=name,
        timeout=options.timeout,
        pg_tag=name,
        device_id=caller.get("device_id"),
    )
    other._set_default_backend(c10d.Backend.backend_type_map[next(iter(wanted.values()))])
    c10d._world.pg_group_ranks[other] = {rank: index for index, rank in enumerate(ranks)}

    def close() -> None:
        if other in c10d._world.pg_map:
            dist.destroy_process_group(other)

    return dict.fromkeys(wanted, other), close
