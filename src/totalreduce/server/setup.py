"""The arguments of ``tr.ps.connect``: checked, compared between ranks, and sent to ranks that only serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, Self, final

from totalreduce.codecs.codec import Codec, check_codec
from totalreduce.codecs.codecs import CODECS
from totalreduce.foundation import checks
from totalreduce.foundation.errors import ConfigurationError, ProtocolError
from totalreduce.server.clocks import Bounded, Consistency, Eventual, Sequential
from totalreduce.server.optimizers import FTRL, SGD, Adagrad, Adam, Momentum, Optimizer, Replace, Sum
from totalreduce.server.table import Initial
from totalreduce.server.torch_rule import Torch

__all__ = ["Setup"]

_DTYPES = ("float32", "float64")
_SHARDS_MAX = 256
#: The largest number of values of a key: a row fits into a request.
_WIDTH_MAX = 1 << 18
#: By name: what can be sent to ranks that only serve.
_OPTIMIZERS: Final[Mapping[str, Any]] = {
    each.__name__: each for each in (Sum, SGD, Momentum, Adagrad, Adam, FTRL, Replace, Torch)
}
_RULES: Final[Mapping[str, Any]] = {each.__name__: each for each in (Sequential, Bounded, Eventual)}


@final
@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is equal on all ranks of a parameter server; see ``tr.ps.connect`` for the attributes."""

    num_keys: int
    width: int
    dtype: str
    optimizer: Optimizer
    consistency: Consistency
    servers: tuple[int, ...]
    workers: int
    shards: int
    replicas: int
    codec: Codec | None
    initial: Initial
    restore: str | None

    @classmethod
    def checked(cls, num_ranks: int, num_workers: int, **given: Any) -> Self:
        """Check the arguments of ``tr.ps.connect``.

        Args:
            num_ranks: The number of ranks of the job.
            num_workers: The number of those that run the program. If there are others, they are the servers by default.
            given: The arguments that are attributes of this class, by name.

        Raises:
            ConfigurationError: An argument is not as it must be.
        """
        dtype = str(given["dtype"]).removeprefix("torch.")
        checks.one_of("dtype", dtype, _DTYPES)
        check_codec(given["codec"])
        if given["codec"] is not None and dtype != "float32":
            raise ConfigurationError(f"codecs encode float32, not {dtype}")
        for what, base in (("optimizer", Optimizer), ("consistency", Consistency)):
            if given[what] is not None and not isinstance(given[what], base):
                raise ConfigurationError(f"{what} is {given[what]!r}; expected is a tr.ps.{base.__name__}")
        servers, initial = given["servers"], given["initial"]
        if servers is None:
            servers = range(0 if num_workers == num_ranks else num_workers, num_ranks)
        elif not servers:
            raise ConfigurationError("servers must name a rank")
        seats = checks.ranks_in(servers, num_ranks)

        def number(name: str, default: int, maximum: int | None) -> int:
            return default if given[name] is None else checks.integer(name, given[name], minimum=1, maximum=maximum)

        return cls(
            num_keys=checks.integer("num_keys", given["num_keys"], minimum=1),
            width=checks.integer("width", given["width"], minimum=1, maximum=_WIDTH_MAX),
            dtype=dtype,
            optimizer=given["optimizer"] or Sum(),
            consistency=given["consistency"] or Eventual(),
            servers=seats,
            workers=number("workers", num_workers, num_workers),
            shards=number("shards", len(seats), _SHARDS_MAX),
            replicas=checks.integer("replicas", given["replicas"], minimum=1, maximum=len(seats)),
            codec=given["codec"],
            initial=initial if callable(initial) else checks.real_number("initial", initial),
            restore=None if given.get("restore") is None else str(Path(given["restore"]).absolute()),
        )

    def describe(self) -> dict[str, Any]:
        """Return what ranks compare, as JSON values. Of a function ``initial`` it says only that there is one."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "optimizer": self.optimizer.describe(),
            "consistency": self.consistency.describe(),
            "servers": list(self.servers),
            "codec": repr(self.codec),
            "initial": "a function" if callable(self.initial) else self.initial,
        }

    def encode(self) -> str:
        """Return a text from which ``decode`` makes an equal object in another process.

        Raises:
            ConfigurationError: It has something that cannot be sent.
        """
        if callable(self.initial):
            raise ConfigurationError(
                "initial is a function, which cannot be sent to ranks that only serve (--servers): give a number, or "
                "start without --servers, so that the servers are ranks that run the program"
            )
        codec = self.codec
        sent = None if codec is None else {"name": codec.name, **(asdict(codec) if is_dataclass(codec) else {})}
        text = json.dumps({**self.describe(), "codec": sent})
        try:
            read = Setup.decode(text, max(*self.servers, self.workers - 1) + 1)
        except (ProtocolError, ConfigurationError):
            read = None
        if read != self:
            raise ConfigurationError(
                f"{self.optimizer!r} or {self.codec!r} cannot be sent to ranks that only serve (--servers): take an "
                "optimizer of tr.ps and a codec of totalreduce or of an installed package, or start without --servers"
            )
        return text

    @classmethod
    def decode(cls, text: str, num_ranks: int) -> Self:
        """Return the object that ``encode`` has described in a job with so many ranks.

        Raises:
            ProtocolError: The text is not like that.
            ConfigurationError: A value is not as it must be, or a codec is not installed here.
        """
        try:
            values = json.loads(text)
            codec = values["codec"]
            values["optimizer"] = _made(_OPTIMIZERS, values["optimizer"])
            values["consistency"] = _made(_RULES, values["consistency"])
            values["codec"] = None if codec is None else _made(CODECS, codec)
            return cls.checked(num_ranks, values["workers"], **values)
        except ConfigurationError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ProtocolError(f"rank 0 sends no description of a parameter server: {text[:200]!r}") from error


def _made(known: Mapping[str, Any], described: Mapping[str, Any]) -> Any:
    """Return the object of a name and settings."""
    settings = dict(described)
    return known[settings.pop("name")](**settings)
