"""The message by which a process tells the launcher that another process is silent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import final

from totalreduce.recovery.membership import number_in, reading

__all__ = ["Accusation"]


@final
@dataclass(frozen=True, slots=True)
class Accusation:
    """The process of a seat is silent."""

    seat: int  #: The seat of the process that is silent.
    incarnation: int
    epoch: int  #: The number of the epoch in which the others have lost it.

    def encode(self) -> str:
        """Return the text for the store."""
        return json.dumps({"suspected": self.seat, "incarnation": self.incarnation, "epoch": self.epoch})

    @classmethod
    def decode(cls, text: str, num_seats: int) -> Accusation:
        """Read the text of an accusation in a job of ``num_seats`` seats. Raises ``ProtocolError``."""
        with reading(text, "accusation") as fields:
            found = cls(*(number_in(fields[name]) for name in ("suspected", "incarnation", "epoch")))
            if found.seat >= num_seats:
                raise ValueError(found.seat)
            return found
