"""From the logs of the workers of ``totalreduce bench faults`` to figures."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from totalreduce.bench.launching import BenchmarkFailedError
from totalreduce.bench.sampling import percentile
from totalreduce_benchmarks.faults_injector import Injected
from totalreduce_benchmarks.faults_kinds import KINDS
from totalreduce_benchmarks.faults_records import SAMPLES, Final

__all__ = ["FaultsFigure", "KindFigure", "summarise"]


@dataclass(frozen=True, slots=True)
class KindFigure:
    """The faults of one kind.

    Attributes:
        kind: The kind; ``all`` for the whole run.
        injected: Number of faults. Two kills of ``again`` are one.
        survived: Faults after which the job went on with a right state.
        hung: Faults after which the job made no progress.
        wrong: Versions at which ranks had different states, first after faults of this kind. In the whole run 1 more if
            the end differs from an undisturbed run.
        detection_p50_s: Time from a fault until the first survivor noticed it; of the launcher's store until the
            launcher had started another one.
        detection_max_s: The longest.
        recovery_p50_s: Time from then until the survivors' next group had one state.
        recovery_max_s: The longest.
    """

    kind: str
    injected: int
    survived: int
    hung: int
    wrong: int
    detection_p50_s: float
    detection_max_s: float
    recovery_p50_s: float
    recovery_max_s: float


@dataclass(frozen=True, slots=True)
class FaultsFigure:
    """The job under faults.

    Attributes:
        system: ``replace``, ``shrink``, ``torchrun`` or ``torchft``.
        every_s: The seconds of the run divided by its faults.
        total: All faults.
        kinds: The faults by kind.
        lost_versions: Versions of which no process has a record.
        lost_samples: Samples that no step of their epoch has used.
        doubled_samples: Samples that steps of one epoch have used twice.
        progress_p50_s: Time from a fault until a block took effect that none before the fault had reached.
        step_s: Median time of a block without faults; with a duration the mean time before the first fault.
        goodput: Blocks times this time, divided by the time of the whole run after its start, with a duration by the
            time from the first fault on.
        versions: Number of blocks that took effect.
        seconds: Time from the first to the last block.
    """

    system: str
    every_s: float
    total: KindFigure
    kinds: list[KindFigure]
    lost_versions: int
    lost_samples: int
    doubled_samples: int
    progress_p50_s: float
    step_s: float
    goodput: float
    versions: int
    seconds: float


def summarise(
    system: str,
    lines: Sequence[dict[str, Any]],
    finals: Sequence[Final],
    injected: Injected,
    *,
    ends_wrong: bool,
    paced: bool = False,
) -> FaultsFigure:
    """Return the figure of a run.

    Args:
        system: What has run the job.
        lines: The lines of all logs.
        finals: What the ranks have written at the end.
        injected: The faults.
        ends_wrong: Whether the end differs from that of an undisturbed run.
        paced: Whether the time before the first fault is the measure of the goodput.

    Raises:
        BenchmarkFailedError: There is no log of a block.
    """
    done = [line for line in lines if "done" in line]
    if not done:
        raise BenchmarkFailedError("no block took effect")
    digests: dict[int, set[str]] = defaultdict(set)
    first_at: dict[int, float] = {}
    for line in done:
        digests[line["done"]].add(line["digest"])
        first_at[line["done"]] = min(line["at"], first_at.get(line["done"], math.inf))
    last = max(digests)
    lost, doubled = _audit([line for line in lines if "about" in line], last)
    wrong_at = [first_at[version] for version, each in digests.items() if len(each) > 1]
    changes = [line["change"] for line in lines if "change" in line and "is lost" in line["change"]["reason"]]
    total, kinds = _by_kind(injected, wrong_at, changes, ends_wrong=ends_wrong)
    times = sorted(line["at"] for line in done)
    seconds = times[-1] - times[0]
    step_s = median(final.step_s for final in finals) if finals else 0.0
    goodput = last * step_s / seconds if seconds else 0.0
    if paced and injected.faults:
        step_s, goodput = _paced(first_at, injected.faults[0].at)
    return FaultsFigure(
        system=system,
        every_s=seconds / max(1, len(injected.faults)),
        total=total,
        kinds=kinds,
        lost_versions=sum(version not in digests for version in range(1, last + 1)),
        lost_samples=lost,
        doubled_samples=doubled,
        progress_p50_s=percentile(_progress(done, [fault.at for fault in injected.faults]) or [0.0], 0.5),
        step_s=step_s,
        goodput=goodput,
        versions=last,
        seconds=seconds,
    )


def _by_kind(
    injected: Injected, wrong_at: Sequence[float], changes: Sequence[dict[str, Any]], *, ends_wrong: bool
) -> tuple[KindFigure, list[KindFigure]]:
    """Return the figures of all faults, and of each kind. A fault is to blame for what comes before the next one."""
    faults = injected.faults
    begins = [fault.at for fault in faults]
    #: By the index of a fault: the times and recoveries of those who noticed it, and wrong versions.
    noticed: dict[int, list[float]] = defaultdict(list)
    recovered: dict[int, list[float]] = defaultdict(list)
    wrong: dict[int, int] = defaultdict(int)
    for change in changes:
        index = bisect.bisect_right(begins, change["noticed_at"]) - 1
        if index >= 0:
            noticed[index].append(change["noticed_at"])
        recovered[index].append(change["seconds"])
    for at in wrong_at:
        wrong[bisect.bisect_right(begins, at) - 1] += 1
    for index, fault in enumerate(faults):
        if not KINDS[fault.kind].loses_ranks:
            noticed[index] = [at for at in injected.keeper_starts if at >= fault.at]

    def figure(kind: str, indices: Sequence[int], num_wrong: int) -> KindFigure:
        detections = [min(noticed[index]) - faults[index].at for index in indices if noticed[index]]
        recoveries = [seconds for index in indices for seconds in recovered[index]]
        if kind == "all":
            recoveries += recovered[-1]
        has_hung = injected.hung and (kind == "all" or len(faults) - 1 in indices)
        ends_well = not (ends_wrong or (kind == "all" and (has_hung or num_wrong)))
        survived = sum(not wrong[index] and not (has_hung and index == len(faults) - 1) for index in indices)
        return KindFigure(
            kind=kind,
            injected=len(indices),
            survived=survived if ends_well else 0,
            hung=int(has_hung),
            wrong=num_wrong,
            detection_p50_s=percentile(detections or [0.0], 0.5),
            detection_max_s=max(detections, default=0.0),
            recovery_p50_s=percentile(recoveries or [0.0], 0.5),
            recovery_max_s=max(recoveries, default=0.0),
        )

    kinds = []
    for kind in dict.fromkeys(fault.kind for fault in faults):
        indices = [index for index, fault in enumerate(faults) if fault.kind == kind]
        kinds.append(figure(kind, indices, sum(wrong[index] for index in indices)))
    return figure("all", range(len(faults)), len(wrong_at) + ends_wrong), kinds


def _paced(first_at: dict[int, float], fault: float) -> tuple[float, float]:
    """Return the time of a block before the first fault, and the goodput after it."""
    before = sorted(at for at in first_at.values() if at < fault)
    after = sorted(at for at in first_at.values() if at >= fault)
    if len(before) < 2 or not after:
        raise BenchmarkFailedError("too few blocks took effect before the first fault: ask for a longer --duration")
    step_s = (before[-1] - before[0]) / (len(before) - 1)
    return step_s, len(after) * step_s / (after[-1] - fault)


def _progress(done: Sequence[dict[str, Any]], faults: Sequence[float]) -> list[float]:
    """Return for each fault the time until a block took effect that none before the fault had reached."""
    blocks = sorted((line["at"], line["done"]) for line in done)
    times = [at for at, _ in blocks]
    highest = list(itertools.accumulate((version for _, version in blocks), max, initial=0))
    found: list[float] = []
    for fault in faults:
        index = bisect.bisect_right(times, fault)
        following = (at - fault for at, version in itertools.islice(blocks, index, None) if version > highest[index])
        found += itertools.islice(following, 1)
    return found


def _audit(lines: Sequence[dict[str, Any]], last: int) -> tuple[int, int]:
    """Return how many samples steps have left out, and how many they have used twice, in epochs that are over.

    Of a version, only the lines of its last membership count: a block that was repeated used the same samples before,
    without effect.
    """
    memberships: dict[int, int] = {}
    for line in lines:
        memberships[line["about"]] = max(line["job_epoch"], memberships.get(line["about"], 0))
    used: dict[int, list[int]] = defaultdict(list)
    blocks: dict[tuple[int, int], list[int]] = {}
    epoch_of: dict[int, int] = {}
    for line in lines:
        version = line["about"]
        if version < last and line["job_epoch"] == memberships[version]:
            blocks[version, line["seat"]] = line["samples"]
            epoch_of[version] = line["data_epoch"]
    for (version, _), samples in blocks.items():
        used[epoch_of[version]] += samples
    over = [epoch for epoch in used if epoch < max(used)]
    lost = sum(SAMPLES - len(set(used[epoch])) for epoch in over)
    doubled = sum(len(used[epoch]) - len(set(used[epoch])) for epoch in over)
    return lost, doubled
