"""What a process tells the launcher of the process of another seat that is silent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import final

from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.recovery.membership import json_object

__all__ = ["Accusation"]

_NUMBER_MAX = 1 << 40


@final
@dataclass(frozen=True, slots=True)
class Accusation:
    """The process of a seat is silent.

    Attributes:
        seat: The seat of the process that is silent.
        incarnation: Its incarnation.
        epoch: The number of the epoch in which the others have lost it.
    """

    seat: int
    incarnation: int
    epoch: int

    def encode(self) -> str:
        """Return the text for the store."""
        return json.dumps({"suspected": self.seat, "incarnation": self.incarnation, "epoch": self.epoch})

    @classmethod
    def decode(cls, text: str, num_seats: int) -> Accusation:
        """Read the text of an accusation in a job of ``num_seats`` seats.

        Raises:
            ProtocolError: The text is no accusation.
        """
        fields = json_object(text, "accusation")
        try:
            return cls(
                checks.integer("suspected", fields["suspected"], minimum=0, maximum=num_seats - 1),
                checks.integer("incarnation", fields["incarnation"], minimum=0, maximum=_NUMBER_MAX),
                checks.integer("epoch", fields["epoch"], minimum=0, maximum=_NUMBER_MAX),
            )
        except (KeyError, ConfigurationError) as error:
            raise ProtocolError(f"the store holds {text[:100]!r} where an accusation is expected: {error}") from error
