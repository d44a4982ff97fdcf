"""The keeper: a process of the launcher that serves the store of the decisions, and links it with the launcher.

The launcher runs it as ``python -m totalreduce.recovery.keeper ADDRESS PORT NUM_SEATS KNOWN``, and again if it is lost.
ADDRESS is where the ranks reach the launcher. KNOWN is a JSON object with what the launcher knows: ``first_epoch``, the
number of the first epoch that is decided in this store; ``ended``, by seat the last incarnation that has ended;
``begun`` and ``finished``, whether the first block has taken effect, and whether all ranks have come to the end of the
job. Then each line is a JSON object.

From the launcher (standard input): ``{"ended": [seat, incarnation], "finished": …}``; ``finished`` says whether the
process has come to the end of the job. The end of the input ends the keeper.

To the launcher (standard output):

- ``{"suspected": seat, "incarnation": …, "by": seat, "epoch": …}``: a rank is silent;
- ``{"waiting": true}``: a rank has waited for others for a while;
- ``{"epoch": …, "members": …, "version": …}``: a decision;
- ``{"begun": true}``: the first block has taken effect;
- ``{"finished": true}``: all ranks have come to the end of the job;
- ``{"refused": count}``: the number of values found so far that no rank writes, when it reaches or passes 1, 2, 4, ….

The store has no key: whoever reaches its port can write into it (docs/security.md). So nothing that is found in it is
passed on to the launcher before it is checked.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import select
import socket
import sys
from dataclasses import asdict
from datetime import timedelta
from typing import Any, final

from torch._C._distributed_c10d import Store, TCPStore

from totalreduce.foundation.errors import ProtocolError
from totalreduce.recovery.accusation import Accusation
from totalreduce.recovery.assembly import BEGUN, ENDED, FINISHED, WAITING, accusation_key, decision_key
from totalreduce.recovery.launcher_store import FIRST_EPOCH, VALUE_BYTES_MAX
from totalreduce.recovery.membership import Decision

#: How often the keeper looks for accusations and decisions.
_LOOK_S = 0.02
#: The number of connections that wait to be accepted: all ranks of a job may connect at the same time.
_BACKLOG = 2048


@final
class Watch:
    """What is new in the store since the last look. No process, no socket."""

    def __init__(self, store: Store, num_seats: int, first_epoch: int) -> None:
        """Prepare the store."""
        self._store, self._num_seats, self._epoch = store, num_seats, first_epoch
        self._accusations = [accusation_key(seat) for seat in range(num_seats)]
        store.multi_set(self._accusations, [""] * num_seats)  # type: ignore[attr-defined]  # torch's stub lacks it
        self._said = [b""] * num_seats  #: By the seat that accuses: the last accusation.
        self._waiting = b""
        store.set(WAITING, "")
        self._refused_decision = b""
        #: What is not known to be so yet: the key, and the word for it.
        self._awaited = {BEGUN: "begun", FINISHED: "finished"}
        self.num_refused = 0  #: How many values were found that no rank writes.

    def news(self) -> list[dict[str, Any]]:
        """Return the lines for the launcher about what has been written since the last call."""
        num_refused = self.num_refused
        words = [*self._new_accusations(), *self._new_decisions()]
        waiting = self._store.get(WAITING)
        if waiting != self._waiting:
            self._waiting = waiting
            words.append({"waiting": True})
        words += [{self._awaited.pop(key): True} for key in list(self._awaited) if self._store.check([key])]
        if num_refused.bit_length() < self.num_refused.bit_length():
            words.append({"refused": self.num_refused})
        return words

    def _new_accusations(self) -> list[dict[str, Any]]:
        words = []
        values = self._store.multi_get(self._accusations)  # one exchange for all seats
        for seat, value in enumerate(values):
            if value == self._said[seat]:
                continue
            try:
                accusation = Accusation.decode(value.decode(errors="replace"), self._num_seats)
            except ProtocolError:
                self.num_refused += 1
                continue
            details = {"incarnation": accusation.incarnation, "epoch": accusation.epoch}
            words.append({"suspected": accusation.seat, "by": seat, **details})
        self._said = values
        return words

    def _new_decisions(self) -> list[dict[str, Any]]:
        words = []
        while self._store.check([decision_key(self._epoch)]):
            value = self._store.get(decision_key(self._epoch))
            try:
                decision = self._decision_in(value)
            except ProtocolError:  # on each rank it is an error
                self.num_refused += value != self._refused_decision
                self._refused_decision = value
                break
            words.append(asdict(decision))
            self._epoch += 1
        return words

    def _decision_in(self, value: bytes) -> Decision:
        """Read the decision of the present epoch. Raises ``ProtocolError`` if the ranks cannot have made it."""
        if len(value) > VALUE_BYTES_MAX:
            raise ProtocolError(f"a decision of {len(value)} bytes")
        decision = Decision.decode(value.decode(errors="replace"))
        seats = [member.seat for member in decision.members]
        different = set(seats).intersection(range(self._num_seats))
        if decision.epoch != self._epoch or len(different) < len(seats):
            raise ProtocolError(f"a decision of membership {decision.epoch} on the seats {seats[:10]}")
        return decision


def main() -> None:
    """Serve the store until the launcher closes the input."""
    address, port, num_seats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    begin = json.loads(sys.argv[4])
    store = _serve(address, port)
    watch = Watch(store, num_seats, begin["first_epoch"])
    ended: dict[str, int] = begin["ended"]
    store.set(ENDED, json.dumps(ended))
    for key, name in ((BEGUN, "begun"), (FINISHED, "finished")):
        if begin[name]:
            store.set(key, "yes")
    unread = b""
    store.set(FIRST_EPOCH, str(begin["first_epoch"]))  # from now on the ranks use the store
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], _LOOK_S)
        if ready:
            data = os.read(sys.stdin.fileno(), 65536)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in map(json.loads, lines):
                seat, incarnation = line["ended"]
                ended[str(seat)] = incarnation
                if line["finished"]:  # the process may have had no connection to say so
                    store.set(FINISHED, "yes")
            store.set(ENDED, json.dumps(ended))
        for word in watch.news():
            sys.stdout.write(json.dumps(word) + "\n")
        sys.stdout.flush()


def _serve(address: str, port: int) -> Store:
    """Return a store that is served at an address of this host.

    If the address is a name, or one that no interface of this host has (the ranks may reach it by a router that
    translates addresses), the store is served at all addresses.
    """
    listener = None
    try:
        family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
        listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except ValueError:
        pass
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    return TCPStore(
        "0.0.0.0" if listener is None else address,  # noqa: S104
        port,
        is_master=True,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


if __name__ == "__main__":
    main()
