"""The keeper: a process of the launcher that serves the store of the decisions, and links it with the launcher.

The launcher runs it as ``python -m totalreduce.recovery.keeper PORT WORLD_SIZE KNOWN``, and again if it is lost. KNOWN
is a JSON object with what the launcher knows: ``first_epoch``, the number of the first epoch that is decided in this
store; ``ended``, by seat the last incarnation that has ended; ``begun`` and ``finished``, whether the first block has
taken effect, and whether all ranks have come to the end of the job. Then each line is a JSON object.

From the launcher (standard input): ``{"ended": [seat, incarnation]}``. The end of the input ends the keeper.

To the launcher (standard output):

- ``{"suspected": seat, "incarnation": …, "by": seat, "epoch": …}``: a rank is silent;
- ``{"waiting": true}``: a rank has waited for others for a while;
- ``{"epoch": …, "members": …, "version": …}``: a decision;
- ``{"begun": true}``: the first block has taken effect;
- ``{"finished": true}``: all ranks have come to the end of the job.
"""

from __future__ import annotations

import json
import os
import select
import sys
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from totalreduce.recovery.assembly import BEGUN, ENDED, FINISHED, WAITING, decision_key, suspicion_key
from totalreduce.recovery.launcher_store import FIRST_EPOCH

#: How often the keeper looks for suspicions and decisions.
_LOOK_S = 0.02


def main() -> None:
    """Serve the store until the launcher closes the input."""
    port, world_size = map(int, sys.argv[1:3])
    begin = json.loads(sys.argv[3])
    store = TCPStore("0.0.0.0", port, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)  # noqa: S104
    suspicions = [suspicion_key(seat) for seat in range(world_size)]
    store.multi_set(suspicions, [""] * len(suspicions))  # type: ignore[attr-defined]  # torch's stub lacks it
    known = [b""] * len(suspicions)
    store.set(WAITING, "")
    known_waiting = b""
    ended: dict[str, int] = begin["ended"]
    store.set(ENDED, json.dumps(ended))
    #: What is not known to be so yet: the key, and the word for it.
    awaited = {BEGUN: "begun", FINISHED: "finished"}
    for key, name in awaited.items():
        if begin[name]:
            store.set(key, "yes")
    unread = b""
    epoch = begin["first_epoch"]
    store.set(FIRST_EPOCH, str(epoch))  # from now on the ranks use the store
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], _LOOK_S)
        if ready:
            data = os.read(sys.stdin.fileno(), 65536)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                seat, incarnation = json.loads(line)["ended"]
                ended[str(seat)] = incarnation
            store.set(ENDED, json.dumps(ended))
        values = store.multi_get(suspicions)
        for seat, value in enumerate(values):
            if value != known[seat]:
                _say({"suspected": seat, **json.loads(value)})
        known = values
        waiting = store.get(WAITING)
        if waiting != known_waiting:
            known_waiting = waiting
            _say({"waiting": True})
        while store.check([decision_key(epoch)]):
            _say(json.loads(store.get(decision_key(epoch))))
            epoch += 1
        for key in [key for key in awaited if store.check([key])]:
            _say({awaited.pop(key): True})


def _say(value: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
