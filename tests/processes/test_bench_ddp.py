"""``totalreduce bench ddp`` once, tiny: both back ends are launched, and mistakes are refused."""

import json
import subprocess
import sys

import pytest
from commands import invoke

from totalreduce.bench.ddp import ALONE, measure_ddp
from totalreduce.bench.launching import BenchmarkFailedError, Setting
from totalreduce.foundation.errors import ConfigurationError


@pytest.mark.slow
def test_a_script_is_timed_on_both_back_ends(tmp_path, warm_python):
    out = tmp_path / "out.json"
    tiny = ("--", "--width", "4", "--batch", "2", "--examples", "32")
    arguments = ("ddp", "-n", "2", "--steps", "2", "--rounds", "1", "--alone", "--json", str(out), *tiny)
    found = invoke("bench", *arguments)
    assert found.exit_code == 0, found.output
    assert "step of torch_ddp cnn, 2 ranks on one host" in found.stdout
    document = json.loads(out.read_text())
    assert [figure["backend"] for figure in document["figures"]] == ["totalreduce", "gloo", ALONE]
    launches = document["raw"][0]["launches"]
    for backend, figure in zip(("totalreduce", "gloo"), document["figures"][:2], strict=True):
        (launch,) = launches[backend]
        assert (launch["backend"], launch["world_size"], len(launch["losses"])) == (backend, 2, 5)
        assert figure["seconds"]["median"] == sum(launch["step_s"][3:]) / 2
        assert figure["difference"] < 1e-4
    assert document["raw"][0]["difference_float64"] < 1e-13
    # Without an exchange a rank trains by its own examples, so the average loss is another one from the second step on.
    (alone,) = launches[ALONE]
    assert alone["losses"][0] == pytest.approx(launches["gloo"][0]["losses"][0], rel=1e-6)
    assert abs(alone["losses"][4] / launches["gloo"][0]["losses"][4] - 1) > 1e-6


@pytest.mark.slow
def test_an_exchange_that_is_not_of_ddp_is_not_called_switched_off(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['--steps', '5']\nprint(__name__)")
    command = [sys.executable, "-m", "totalreduce.bench.alone", str(script), "--steps", "5"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout) == (1, "__main__\n")
    assert f"{script} uses no DistributedDataParallel" in found.stderr


def test_a_script_that_fails_is_quoted(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nsys.exit(f'no luck for {sys.argv[3]}' if os.environ['RANK'] == '0' else 0)")
    setting = Setting(ranks=2, against=("gloo",), rounds=1)
    with pytest.raises(BenchmarkFailedError, match=r"(?s)--backend totalreduce: rank 0 failed.*no luck for --backend"):
        measure_ddp(setting, setting.peers, script, ["--steps", "5"])


@pytest.mark.parametrize(
    ("arguments", "complaint"), [(("--script", "nonesuch"), "neither a file nonesuch"), (("--steps", "0"), "--steps")]
)
def test_what_makes_no_sense_is_refused(arguments, complaint):
    found = invoke("bench", "ddp", *arguments)
    assert isinstance(found.exception, ConfigurationError)
    assert complaint in str(found.exception)
