"""A timeline that cannot be written costs its file and never the job."""

import json
import subprocess
import sys

import pytest

WORK = """
group = tr.init(timeout_s=30)
for step in range(100):
    value = torch.full((10,), float(rank + step))
    group.allreduce(value, name="w").wait()
    assert value[0].item() == 2.0 * step + 1
ends = []
group.at_close(lambda: ends.append("closed"))
"""

ENDS = {"close": "group.close(); say('ends', ends=ends)", "exit": "say('ends', ends=['closed'])"}


def end(workers):
    for worker in workers:
        assert worker.read("ends")["ends"] == ["closed"]
    for worker in workers:
        assert worker.wait() == 0, worker.errors()
        assert "Traceback" not in worker.errors()


@pytest.mark.parametrize("way", ENDS)
def test_a_full_disk_at_the_end_is_one_warning_on_every_rank(fleet, small_disk, way):
    disk = small_disk(16)
    workers = fleet.start(2, WORK + ENDS[way], TOTALREDUCE_TIMELINE=str(disk))
    end(workers)
    for worker in workers:
        (warning,) = [line for line in worker.errors().splitlines() if "timeline" in line]
        assert warning.startswith(
            f"totalreduce: rank {worker.rank}: the timeline {disk}/rank{worker.rank}.json could not be written: "
            "No space left on device (ENOSPC). Events lost: "
        )
        assert int(warning.split("Events lost: ")[1].split(".")[0]) >= 100
    assert list(disk.iterdir()) == []


def test_a_rank_that_cannot_write_there_goes_on_without(fleet, tmp_path):
    by_rank = {1: {"TOTALREDUCE_TIMELINE": "/proc/absent/traces"}}
    workers = fleet.start(2, WORK + ENDS["close"], by_rank=by_rank, TOTALREDUCE_TIMELINE=str(tmp_path))
    end(workers)
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json"]
    assert json.loads((tmp_path / "rank0.json").read_text())["metadata"]["rank"] == 0
    assert "timeline" not in workers[0].errors()
    (warning,) = [line for line in workers[1].errors().splitlines() if "timeline" in line]
    assert warning == (
        "totalreduce: rank 1: timeline: cannot make the folder /proc/absent/traces: No such file or directory. "
        "No timeline is recorded on this rank; the job goes on"
    )


def test_a_program_that_ends_by_an_exception_leaves_its_file(tmp_path, warm_python):
    program = (
        "import sys; from totalreduce.observe import Timeline\n"
        "t = Timeline(0, sys.argv[1]); t.submitted('w', 0, 0.0, num_bytes=1, priority=0)\n"
        "raise SystemExit(3)"
    )
    target = tmp_path / "t.json"
    finished = subprocess.run([sys.executable, "-c", program, target], check=False, timeout=60)
    assert finished.returncode == 3
    assert "w #0" in {event["name"] for event in json.loads(target.read_text())["traceEvents"] if event["ph"] == "X"}
