"""The rounds of an elastic launcher: how the processes of one round find each other in a store with older entries.

torchrun starts all processes again when one fails or when machines come and go, perhaps with other ranks and another
world size. Its agent goes on to serve the same store, and no variable names the round: ``TORCHELASTIC_RESTART_COUNT``
counts the failures that one agent has seen, so it differs between agents, and does not change when a machine joins.
So rank 0 makes a name for each meeting, and gives it to the processes that answer while rank 0 waits for them.
"""

from __future__ import annotations

import json
import secrets
import time

from torch._C._distributed_c10d import Store

from totalreduce.foundation.errors import RendezvousError

__all__ = ["enter_round"]

#: The time between two looks into the store: short at first.
_PAUSE_S, _PAUSE_MAX_S = 0.002, 0.05
_VALUE_BYTES_MAX = 4 << 20


def enter_round(store: Store, name: str, rank: int, world_size: int, timeout_s: float) -> str:
    """Return a text that all ranks of this round share, and no process of an earlier round has seen. Collective.

    Rank 0 announces a random text. Every other rank answers with a random number, under the text that was announced
    last: if that is still the text of an earlier round, nobody reads the answer, and the rank answers again when the
    text changes. Rank 0 publishes the numbers of all ranks. A rank that finds its number there belongs to the round.
    Raises ``RendezvousError``.
    """
    prefix, number = f"totalreduce/rounds/{name}", secrets.token_hex(8)
    give_up_at, pause_s, text = time.monotonic() + timeout_s, _PAUSE_S, ""
    answers: list[str] = []
    if rank == 0:
        text = secrets.token_hex(8)
        answers = [f"{prefix}/{text}/{other}" for other in range(1, world_size)]
        store.set(f"{prefix}/now", text)
    while True:
        if rank == 0:
            if not answers or store.check(answers):
                numbers = [number, *(_text_of(store, answer) for answer in answers)]
                store.set(f"{prefix}/{text}/all", json.dumps(numbers))
                return text
        else:
            now = _text_of(store, f"{prefix}/now")
            # Rank 0 may be in its next meeting already, so the numbers are read after the text.
            numbers = json.loads(_text_of(store, f"{prefix}/{text}/all") or "[]")
            if numbers[rank : rank + 1] == [number]:
                return text
            if now != text:
                text = now
                store.set(f"{prefix}/{text}/{rank}", number)
        if time.monotonic() >= give_up_at:
            absent = [str(index) for index, answer in enumerate(answers, 1) if not store.check([answer])] or ["0"]
            raise RendezvousError(
                f"rank {rank} of {world_size}: rank(s) {', '.join(absent)} did not come within the time-out. Does "
                "torchrun run on every machine, and is each rank one process?"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def _text_of(store: Store, key: str) -> str:
    """Return the value of a key; "" if there is none."""
    value = store.get(key) if store.check([key]) else b""
    if len(value) > _VALUE_BYTES_MAX:
        raise RendezvousError(f"{key!r} in the store is longer than any rank writes it")
    return value.decode(errors="replace")
