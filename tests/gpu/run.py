"""Runs everything that one GPU can show, in at most ten minutes and without a network (``make gpu``).

    python tests/gpu/run.py                          all checks
    python tests/gpu/run.py --json figures.json ddp  one check; its figures go to a file, too
    python tests/gpu/run.py --rehearse               the same checks, small, on the CPU: a test of this program

Where there is no GPU, every check is skipped. The exit code is 1 if a check failed.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: Seconds for everything.
BUDGET_S = 470.0
#: The exit code of pytest for options that no plug-in knows.
_USAGE = 4
TEST_FILES = (
    "tests/unit/kernels/test_device_accumulator.py",
    "tests/unit/native/test_streams.py",
    "tests/processes/test_c10d_cuda.py",
)


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: Its name.
        program: The function in ``programs.py``; empty: the tests of the suite that use a GPU.
        ranks: Number of ranks, all on the same GPU.
        limit_s: Seconds after which it has failed.
    """

    name: str
    program: str
    ranks: int
    limit_s: float


@dataclass(frozen=True)
class Outcome:
    """Attributes: the name of the check; ``passed``, ``failed`` or ``skipped``; why; seconds; figures."""

    name: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    figures: dict = field(default_factory=dict)


CHECKS = (
    Check("selection", "selection", 1, 90),
    Check("tests", "", 0, 150),
    Check("plain", "plain", 2, 90),
    Check("staging", "staging", 2, 90),
    Check("collectives", "collectives", 2, 90),
    Check("ddp", "ddp", 2, 90),
    Check("ddp-hook", "ddp_hook", 2, 120),
    Check("optimizer", "optimizer_gloo", 2, 120),
    Check("optimizer-staged", "optimizer_staged", 2, 120),
    Check("fsdp", "fsdp", 2, 90),
    Check("batch-norm", "normalisation", 2, 90),
    Check("methods", "methods", 2, 120),
    Check("states", "states", 2, 90),
    Check("scaler", "scaled", 2, 90),
    Check("horovod", "horovod", 2, 90),
    Check("memory", "memory", 2, 90),
    Check("nccl", "nccl", 1, 90),
    Check("nccl-2", "nccl", 2, 60),
    Check("mixed", "mixed", 1, 60),
)


def why_not():
    """The reason why no check can run; empty if a GPU is there."""
    try:
        import torch
    except ImportError as error:
        return f"torch is not installed: {error}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def run(check, deadline, *, rehearse):
    """Run a check in processes of its own."""
    begin = time.monotonic()
    limit_s = min(check.limit_s, deadline - begin)
    if limit_s < 5:
        return Outcome(check.name, "skipped", f"the {BUDGET_S:g} s for all checks are over")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        command = _tests() if not check.program else _job(check, output, rehearse=rehearse)
        code, text = _call(command, limit_s)
        seconds = time.monotonic() - begin
        if code == 0 and not check.program:
            return Outcome(check.name, "passed", _last_line(text), seconds)
        if code == 0 and output.exists():
            found = json.loads(output.read_text())
            if "skipped" in found:
                return Outcome(check.name, "skipped", found["skipped"], seconds)
            return Outcome(check.name, "passed", "", seconds, found["figures"])
    if check.name == "nccl-2" and "Duplicate GPU" in text:
        return Outcome(check.name, "skipped", "NCCL refuses two ranks on one GPU (Duplicate GPU detected)", seconds)
    if not check.program and (code == _USAGE or "No module named pytest" in text):
        return Outcome(check.name, "skipped", f"pytest or a plug-in of it is missing: {_last_line(text)}", seconds)
    if code is None and limit_s < check.limit_s:
        return Outcome(check.name, "skipped", f"the {BUDGET_S:g} s for all checks ended while it ran", seconds)
    print(f"--- {check.name}\n{text[-6000:]}", file=sys.stderr)
    reason = f"no end after {limit_s:.0f} s" if code is None else _last_line(text) or f"exit code {code}"
    return Outcome(check.name, "failed", reason, seconds)


def _compile():
    """Compile Numba's kernels, which takes a minute where it was not done yet, so that no check has to."""
    program = "from totalreduce.kernels import ahead, exchange; ahead.load(); ahead.load_codecs(); exchange.load()"
    code, text = _call([sys.executable, "-c", program], 300)
    if code != 0:
        sys.exit(f"the kernels were not compiled: {_last_line(text)}")


def _tests():
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *TEST_FILES]


def _job(check, output, *, rehearse):
    program = [str(HERE / "programs.py"), check.program, str(output)]
    program += ["--device", "cpu", "--small"] if rehearse else []
    launcher = ["-m", "totalreduce", "run", "-n", str(check.ranks)]
    return [sys.executable, *launcher, *program]


def _call(command, limit_s):
    """Exit code and output of a command; no exit code if it took too long, and then all its processes are killed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    environment["CUDA_LAUNCH_BLOCKING"] = "0"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        return code, log.read()


def _last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def table(outcomes):
    """The outcomes and their figures as lines of text."""
    lines = []
    for each in outcomes:
        lines.append(f"{each.name:<17}{each.outcome:<9}{each.seconds:6.1f} s  {each.reason}".rstrip())
        lines += [f"    {name:<48}{value:12.3f}" for name, value in each.figures.items()]
    return lines


def machine():
    """Versions and the device."""
    import torch

    facts = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name(0)
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def main(arguments=None):
    """Command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *(check.name for check in CHECKS)])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="run small checks on the CPU")
    given = parser.parse_args(arguments)
    chosen = [check for check in CHECKS if not given.names or check.name in given.names]
    reason = "" if given.rehearse else why_not()
    if not reason:
        _compile()
    deadline = time.monotonic() + BUDGET_S
    outcomes = []
    for check in chosen:
        if reason:
            outcomes.append(Outcome(check.name, "skipped", reason))
        else:
            outcomes.append(run(check, deadline, rehearse=given.rehearse))
            print("\n".join(table(outcomes[-1:])), flush=True)
    if reason:
        print("\n".join(table(outcomes)))
    if given.json is not None:
        document = {"machine": {} if reason else machine(), "checks": [asdict(each) for each in outcomes]}
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    count = {kind: sum(each.outcome == kind for each in outcomes) for kind in ("passed", "skipped", "failed")}
    print(", ".join(f"{number} {kind}" for kind, number in count.items()))
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
