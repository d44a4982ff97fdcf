"""What is loaded ahead is what the methods call: in a process of its own, where nothing was compiled before."""

import subprocess
import sys

SCRIPT = """
from totalreduce.codecs.codecs import CODECS
from totalreduce.codecs.threshold import Threshold
from totalreduce.kernels import ahead, coding, merging, quantisation, scattering, selection
from totalreduce.sparse.coded import Coded
from totalreduce.sparse.methods import METHODS
from totalreduce.testing.sparse_conformance import check_method

def called():
    return {
        f"{module.__name__}.{name}": len(kernel.signatures)
        for module in (coding, merging, quantisation, scattering, selection)
        for name, kernel in vars(module).items()
        if hasattr(kernel, "signatures") and name in module.__all__
    }

assert not any(called().values())
ahead.load()
ahead.load_codecs()
before = called()
assert len(before) >= 24 and set(before.values()) == {1}, before
for method in METHODS.values():
    for world_size in (1, 2, 3):
        check_method(method(), world_size, [(5000,), (300, 7)], moves=method.name == "gtopk")
for codec in CODECS.values():
    method = Coded(codec=codec(threshold=1.0) if codec is Threshold else codec())
    for world_size in (1, 2, 3):
        check_method(method, world_size, [(5000,), (300, 7)], moves=False)
assert called() == before, {name: (count, before[name]) for name, count in called().items() if count != before[name]}
"""


def test_no_method_compiles_anything_more() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
