"""``torch.compile`` around DDP, FSDP2, collectives and the library's own classes.

On our back end the results are those on gloo, and Dynamo traces nothing of what communicates. A job runs one case after
the other; see ``programs/compiled_cases.py``.
"""

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "compiled_cases.py"
SOURCE = f"""
import runpy
runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
"""
COMPILERS = ("inductor", "aot_eager", "eager")
GRADIENTS = ("compiled_ddp", "ddp_of_compiled", "compiled_fsdp", "fsdp_of_compiled")
COLLECTIVES = ("functional_collectives", "plain_collectives")
OPTIONS = (
    "graphs_split_at_buckets",
    "static_graph",
    "unused_parameters",
    "accumulation",
    "buffers_are_broadcast",
    "whole_steps",
    "reducer_in_python",
    "collectives_between_graphs",
)
#: Words in the names of cases whose results differ among ranks.
OF_EACH_RANK = ("collectives", "batch_norm")


@pytest.fixture
def compare(fleet, tmp_path):
    """Runs cases; returns what every rank found out about each."""

    def compare(num_workers, names, timeout_s=100.0, **variables):
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        workers = fleet.start(num_workers, SOURCE, CASES=json.dumps(names), **cache, **variables)
        found = {name: [] for name in names}
        for name in names:
            for worker in workers:
                facts = worker.read("case", timeout_s)
                assert facts["name"] == name
                found[name].append(facts)
        for worker in workers:
            assert worker.wait() == 0, worker.errors()
        return found

    return compare


def check(found, tolerance=0.0):
    for name, facts_of_ranks in found.items():
        for facts in facts_of_ranks:
            assert facts["difference"] <= tolerance, facts
            assert facts["agree"] or any(word in name for word in OF_EACH_RANK), facts
            assert facts["graphs"] > 0, facts
            # Optimizers and layers compute with tensors, and Dynamo may follow them.
            assert {Path(file).parts[0] for file in facts["traced"]} <= {"pytorch"}, facts


@pytest.mark.tested_with("torch.compile", "torch")
def test_gradients_are_gloos(compare):
    """The other forms and compilers, and steps that are compiled as a whole, follow in ``make soak``."""
    # In the same job: its processes need seconds to import the compiler.
    not_traced = ["own_collectives", "a_monitored_barrier"]
    check(compare(2, ["compiled_ddp_eager", "compiled_fsdp_eager", *not_traced]))


@pytest.mark.slow
def test_hooks_optimizers_and_layers(compare):
    names = ["a_sparse_hook_in_whole_steps", "the_optimizer_in_whole_steps", "synchronised_batch_norm"]
    check(compare(2, names), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 3])
def test_every_compiler_and_option(compare, num_workers):
    names = [f"{case}_{compiler}" for compiler in COMPILERS for case in (*GRADIENTS, *COLLECTIVES)]
    # Two numbers have one sum; of three, the back ends may add other two first.
    check(compare(num_workers, [*names, *OPTIONS], 300.0), 0.0 if num_workers == 2 else 1e-12)
