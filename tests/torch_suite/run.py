"""Runs PyTorch's own c10d suite with the totalreduce back end; every test that gloo passes must pass.

    python tests/torch_suite/run.py                            world sizes 2, 3 and 4 (``make torch-suite``)
    python tests/torch_suite/run.py --world-size 2 test_barrier ...
    python tests/torch_suite/run.py --record                   make the lists of what gloo passes anew

The lists, ``gloo_passes_{2,3,4}.txt``, belong to the torch version in constraints.txt.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
WORLD_SIZES = (2, 3, 4)


def gloo_passes(world_size):
    """Names of the tests that gloo passes."""
    return (HERE / f"gloo_passes_{world_size}.txt").read_text().split()


def run_suite(backend, world_size, names=(), *, quiet=False):
    """Run the suite in a process of its own.

    Args:
        backend: For ``init_process_group``.
        world_size: Number of ranks.
        names: Tests; none: all.
        quiet: Keep what the ranks print.

    Returns:
        Status (``passed``, ``failed``, ``skipped``) and detail by test.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "outcomes.json"
        command = [sys.executable, str(HERE / "suite.py"), backend, str(world_size), str(output), *names]
        # What a launcher may have set must not reach PyTorch's tests, which start their own ranks.
        foreign = ("TOTALREDUCE_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
        environment = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
        log = Path(folder) / "log"
        with log.open("w") as stream:
            done = subprocess.run(command, check=False, env=environment, stderr=stream if quiet else None)
        if done.returncode:
            raise RuntimeError(f"the suite ended with exit code {done.returncode}\n{log.read_text()[-4000:]}")
        return json.loads(output.read_text())


def record():
    """Write the lists."""
    for world_size in WORLD_SIZES:
        outcomes = run_suite("gloo", world_size)
        passed = sorted(name for name, (status, _) in outcomes.items() if status == "passed")
        (HERE / f"gloo_passes_{world_size}.txt").write_text("\n".join(passed) + "\n")
        print(f"world size {world_size}: gloo passes {len(passed)} of {len(outcomes)}")


def check(world_size, names):
    """Run what gloo passes; returns the names of what failed."""
    expected = [name for name in gloo_passes(world_size) if not names or name in names]
    if not expected:
        print(f"world size {world_size}: gloo passes none of these")
        return []
    outcomes = run_suite("totalreduce", world_size, expected)
    failed = [name for name in expected if outcomes.get(name, ("missing", ""))[0] != "passed"]
    print(f"world size {world_size}: {len(expected) - len(failed)} of {len(expected)} tests that gloo passes pass")
    for name in failed:
        status, detail = outcomes.get(name, ("missing", ""))
        print(f"--- {status}: {name}\n{detail}")
    return failed


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="make the lists of what gloo passes anew")
    parser.add_argument("--world-size", type=int, nargs="+", default=WORLD_SIZES, choices=WORLD_SIZES)
    parser.add_argument("tests", nargs="*", help="names of tests; none: all")
    options = parser.parse_args()
    if options.record:
        return record()
    failed = [name for world_size in options.world_size for name in check(world_size, options.tests)]
    return sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
