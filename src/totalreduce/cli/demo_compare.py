"""What the demo compares: the same training by several workers and by one process."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal
from rich.table import Table

from totalreduce.cli.demo_setup import DemoSettings

__all__ = ["TOLERANCE", "Comparison", "compare"]

TOLERANCE = 1e-4
"""Largest difference of a loss between the two trainings. They add the same float32 numbers in another order;
with the defaults that makes 1e-6 to 1e-5, at the steps in which the loss falls fastest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The two trainings side by side; all that is judged and shown."""

    held_out_distributed: float
    held_out_single: float
    first_loss: float
    last_loss_distributed: float
    last_loss_single: float  #: Mean of the last steps, at most ten
    largest_difference: float  #: Over the training loss of every step and the held-out loss
    replicas_equal: bool  #: Whether all ranks ended with bit-identical parameters
    step_s_distributed: float
    step_s_single: float  #: Medians
    tokens_per_step: int
    bytes_sent_per_step: float  #: Sent by one rank, on average over ranks and steps
    hidden_share: float  #: Lowest of the ranks
    parameters: int

    def problem(self) -> str | None:
        """What is wrong, as a sentence."""
        if not self.replicas_equal:
            return "the workers ended with different parameters; please report this"
        if not self.largest_difference <= TOLERANCE:  # also when it is not a number
            return (
                f"the losses of the two trainings differ by {self.largest_difference:.2g}, "
                f"more than the tolerance of {TOLERANCE:g}"
            )
        return None

    def table(self, ranks: int) -> Table:
        """For people."""
        table = Table(
            title=f"{ranks} workers against one process with {ranks} times the batch",
            title_justify="left",
            title_style="bold",
        )
        table.add_column("")
        table.add_column(f"{ranks} workers", justify="right")
        table.add_column("1 process", justify="right")
        table.add_column("difference", justify="right")
        distributed, single = self.held_out_distributed, self.held_out_single
        held_out_difference = f"{abs(distributed - single):.1e}"
        table.add_row("final loss, held-out text", f"{distributed:.6f}", f"{single:.6f}", held_out_difference)
        distributed, single = self.last_loss_distributed, self.last_loss_single
        training_difference = f"{self.largest_difference:.1e} at most"
        table.add_row("training loss, last steps", f"{distributed:.6f}", f"{single:.6f}", training_difference)
        distributed, single = self.step_s_distributed, self.step_s_single
        ratio = f"x {distributed / single:.2f}"
        table.add_row("time per step", f"{distributed * 1e3:.1f} ms", f"{single * 1e3:.1f} ms", ratio)
        speeds = (f"{self.tokens_per_step / seconds:,.0f}" for seconds in (distributed, single))
        table.add_row("tokens per second", *speeds, "")
        table.add_row("sent per step and worker", decimal(round(self.bytes_sent_per_step)), "-", "")
        table.add_row("communication hidden", f"{self.hidden_share:.0%}", "-", "")
        table.add_row("workers bit-identical", "yes" if self.replicas_equal else "NO", "-", "")
        cores = len(os.sched_getaffinity(0))
        table.caption = f"Loss of step 1: {self.first_loss:.3f}. All of this ran on {cores} cores."
        table.caption_justify, table.caption_style = "left", "dim"
        return table


def compare(distributed: list[dict[str, Any]], single: dict[str, Any], settings: DemoSettings) -> Comparison:
    """Put the results of the ranks and of the one process side by side."""
    first, last = distributed[0], -min(10, settings.num_steps)
    pairs = [
        *zip(first["losses"], single["losses"], strict=True),
        (first["held_out_loss"], single["held_out_loss"]),
    ]
    differences = [abs(ours - reference) for ours, reference in pairs]
    sent = [rank["statistics"]["bytes_sent"] for rank in distributed]
    return Comparison(
        held_out_distributed=first["held_out_loss"],
        held_out_single=single["held_out_loss"],
        first_loss=first["losses"][0],
        last_loss_distributed=math.fsum(first["losses"][last:]) / -last,
        last_loss_single=math.fsum(single["losses"][last:]) / -last,
        largest_difference=math.nan if any(map(math.isnan, differences)) else max(differences),
        replicas_equal=len({rank["digest"] for rank in distributed}) == 1,
        step_s_distributed=first["step_s"],
        step_s_single=single["step_s"],
        tokens_per_step=settings.num_ranks * settings.batch_per_rank * settings.context,
        bytes_sent_per_step=sum(sent) / len(sent) / settings.num_steps,
        hidden_share=min(rank["statistics"]["hidden_share"] for rank in distributed),
        parameters=first["parameters"],
    )
