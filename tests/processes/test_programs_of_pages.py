"""The programs in the documentation run as they stand there, on real ranks.

Starting two processes costs more than most programs, so that all of them are run by the same processes one after the
other, in the order of pages. The pages of ``OTHERS`` are not among them, because the tests named there run them.
"""

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

import pytest
import trustme
from pages import ROOT, pages, programs

from totalreduce.launch.local import run_workers

OTHERS = {
    "docs/tutorial.md": "tests/processes/test_tutorial.py",
    "docs/parameter-server.md": "tests/processes/test_parameter_server_page.py",
    "docs/parameter-server-snapshots.md": "tests/processes/test_parameter_server_page.py",
    "docs/horovod-elastic.md": "tests/processes/test_horovod_elastic.py",
}
PROGRAMS = [program for page in pages() for program in programs(page)]
#: Run by every rank: the programs of a file, each with names of its own, until one of them fails.
RUN_ALL = """
import gc, json, os
import torch.distributed
from totalreduce.groups.group import Group

for program in json.load(open("programs.json")):
    os.environ["MASTER_PORT"] = program["port"]
    names = {"__name__": "__main__"}
    print("begin", program["name"], flush=True)
    try:
        exec(compile(program["source"], program["page"], "exec"), names)
    except SystemExit as end:
        assert not end.code, end
    for value in names.values():
        if isinstance(value, Group):
            value.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    names.clear()
    gc.collect()
print("end", flush=True)
"""


def free_ports(count: int) -> list[str]:
    """Ports at which nobody listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(each.getsockname()[1]) for each in sockets]


def run(folder: Path, chosen, ranks: int) -> None:
    """Run programs on so many ranks; the error of the first one that fails names its page and line."""
    # Each program has a port of its own: torch's store of a program may outlive it, with addresses that no longer hold.
    ports = free_ports(len(chosen))
    documents = [
        {"name": str(program), "page": str(ROOT / program.blocks[0].page), "source": program.source, "port": port}
        for program, port in zip(chosen, ports, strict=True)
    ]
    (folder / "programs.json").write_text(json.dumps(documents))
    (folder / "run_all.py").write_text(RUN_ALL)
    paths = [ROOT / "src", ROOT / "examples" / "extension", ROOT / "tests" / "simulated"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, str(folder / "run_all.py")]
    result = run_workers(command, num_workers=ranks, output="capture", environment=environment, timeout_s=200)
    ends = [output.splitlines()[-1:] for output in result.output]
    assert ends == [["end"]] * ranks, "\n".join([f"stopped in {ends}", *result.errors])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with the files that the programs read."""
    monkeypatch.chdir(tmp_path)
    authority = trustme.CA()
    authority.cert_pem.write_to_path("ca.pem")
    certificate = authority.issue_cert("node3")
    certificate.private_key_pem.write_to_path("node3.key")
    certificate.cert_chain_pems[0].write_to_path("node3.pem")
    return tmp_path


def programs_for_two_ranks():
    return [
        program
        for program in PROGRAMS
        if program.kind in ("", "file", "ranks") and program.ranks == 2 and program.blocks[0].page not in OTHERS
    ]


def test_the_first_program_for_two_ranks_of_each_subject(warm_python, folder):
    """A subject: pages that are called ``recovery.md``, ``recovery-ddp.md``, ... The slow test runs all programs."""
    first = {
        program.blocks[0].page.removesuffix(".md").split("-")[0]: program
        for program in reversed(programs_for_two_ranks())
    }
    assert len(first) > 10
    run(folder, [*reversed(first.values())], 2)


@pytest.mark.slow
def test_programs_for_two_ranks(warm_python, folder):
    chosen = programs_for_two_ranks()
    assert len(chosen) > 20
    run(folder, chosen, 2)
    assert (folder / "totalreduce-timeline" / "rank1.json").is_file()
    assert (folder / "model.pt").is_file()


def test_programs_for_more_ranks(warm_python, folder):
    chosen = [program for program in PROGRAMS if program.kind == "ranks" and program.ranks > 2]
    assert {program.ranks for program in chosen} == {4}
    run(folder, chosen, 4)


@pytest.mark.slow
def test_programs_that_start_workers_themselves(folder):
    chosen = [program for program in PROGRAMS if program.ranks == 1]
    assert [program.blocks[0].page for program in chosen] == ["docs/launching-python.md"]
    run(folder, chosen, 1)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_programs_for_root(folder):
    chosen = [program for program in PROGRAMS if program.kind == "needs"]
    assert [program.blocks[0].page for program in chosen] == ["docs/launching-hosts.md"]
    run(folder, chosen, 1)


def test_the_other_tests_are_there():
    assert all((ROOT / path).is_file() for path in OTHERS.values())
