"""The host of this process, and the address of the host to which the other ranks connect."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path

from totalreduce.foundation.environment import Settings
from totalreduce.foundation.errors import ConfigurationError
from totalreduce.foundation.os_errors import is_out_of_descriptors
from totalreduce.foundation.world import World

__all__ = ["choose_address", "host_identity", "interface_of", "towards"]

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
#: TEST-NET-1: the route to it has the default route's address; nothing is sent.
_ANYWHERE = "192.0.2.1"


def choose_address(world: World, settings: Settings) -> tuple[str, str]:
    """Return the address to listen on and to advertise, and how it was found (for the log).

    The order is: ``TOTALREDUCE_ADDRESS``, ``TOTALREDUCE_INTERFACE``, the route to rank 0's host, the default route,
    loopback.

    Raises:
        ConfigurationError: The interface has no IPv4 address, or rank 0's host has no address.
        OSError: This process, or the machine, has too many open files.
    """
    if settings.address is not None:
        return settings.address, "TOTALREDUCE_ADDRESS"
    if settings.interface is not None:
        return _of_interface(settings.interface), f"interface {settings.interface}"
    if world.master_address:
        address = towards(world.master_address)
        if address is None:
            raise ConfigurationError(
                f"rank {world.rank}: no route to rank 0's host {world.master_address!r}; set TOTALREDUCE_ADDRESS"
            )
        return address, f"route to {world.master_address}"
    address = towards()
    return (address, "default route") if address is not None else ("127.0.0.1", "no route: loopback")


def host_identity() -> str:
    """Return a text that is equal for processes of one kernel and one network namespace: they can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def interface_of(address: str) -> str:
    """Return the name of the interface that has this IPv4 address (Linux). Raises ``ConfigurationError``."""
    for _, name in socket.if_nameindex():
        try:
            found = _address_of(name)
        except OSError:
            continue  # an interface without an IPv4 address
        if found == address:
            return name
    raise ConfigurationError(f"no network interface has the address {address}")


def towards(host: str = _ANYWHERE) -> str | None:
    """Return the kernel's source address for packets to ``host``, by default for the default route; ``None``: no route.

    Connecting a datagram socket sends nothing.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        if is_out_of_descriptors(error):
            raise
        return None


def _of_interface(name: str) -> str:
    try:
        return _address_of(name)
    except OSError as error:
        known = ", ".join(interface for _, interface in socket.if_nameindex())
        raise ConfigurationError(f"TOTALREDUCE_INTERFACE={name}: {error.strerror}; interfaces here: {known}") from error


def _address_of(interface: str) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
