"""Files that the library reads or writes by a path, in whose place another user has put something else."""

import hashlib
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import hostile
import pytest
import torch

from totalreduce.cli.demo_setup import read_text
from totalreduce.cli.report import write_text
from totalreduce.coordination.config import CoordinationConfig
from totalreduce.foundation.config import Tls
from totalreduce.foundation.environment import read_job_key
from totalreduce.foundation.errors import ConfigurationError, RecoveryError
from totalreduce.groups.probe import read_links, write_links
from totalreduce.launch.placement import read_host_file
from totalreduce.native.tuning import read_settings, write_settings
from totalreduce.observe.board import Board
from totalreduce.observe.merge import merged_trace
from totalreduce.observe.reporting import open_report
from totalreduce.planning.machines import Calibration, read_calibration, read_machines, write_calibration
from totalreduce.recovery.snapshots import Snapshots
from totalreduce.schedules.select import LinkModel
from totalreduce.transports.tls import TlsCredentials
from totalreduce_benchmarks.kept import KeptResults

#: What decides whose code is run, where, and who may take part: nobody else may have written it.
TRUSTED = {
    "the job's key": lambda path: read_job_key({"TOTALREDUCE_JOB_KEY_FILE": str(path)}),
    "the hosts": read_host_file,
    "a certificate": lambda path: TlsCredentials(Tls(cert=str(path), key=str(path), ca=str(path))),
}
#: What has numbers and texts, which are checked: it may come from a colleague.
PLAIN = {
    "the links": read_links,
    "settings of coordination": read_settings,
    "machines": read_machines,
    "a calibration": read_calibration,
    "kept results": KeptResults,
    "a timeline": lambda path: merged_trace([path]),
    "a text": read_text,
}
WRITTEN = {
    "the links": lambda path: write_links(path, LinkModel()),
    "settings of coordination": lambda path: write_settings(CoordinationConfig(), path),
    "a calibration": lambda path: write_calibration(path, Calibration()),
    "a report": lambda path: write_text(path, "--json", "{}"),
    "output and events": lambda path: open_report(path, "--events", print).close(),
}
OTHER = 1234


def plant(path: Path, kind: str) -> None:
    """Put something into the place of a file, which other users can do."""
    if hostile.put(path, kind):
        return
    if kind == "half a file":
        path.write_text('{"latency_s": 1e-')
    elif kind == "a link to a device":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("0123456789abcdef0123456789abcdef\n")
        if kind == "others may write":
            path.chmod(0o620)
        else:
            os.chown(path, OTHER, OTHER)


def needs_root(kind: str) -> None:
    if "another user" in kind and os.geteuid() != 0:
        pytest.skip("giving files away needs root")


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a huge file", "a link to a device"])
@pytest.mark.parametrize("what", [*TRUSTED, *PLAIN])
def test_what_is_no_file_or_too_long_is_refused_at_once(tmp_path, what, kind):
    plant(tmp_path / "it", kind)
    with pytest.raises(ConfigurationError, match=str(tmp_path / "it")):
        {**TRUSTED, **PLAIN}[what](tmp_path / "it")


@pytest.mark.parametrize("what", ["the links", "settings of coordination", "machines", "a calibration", "a timeline"])
def test_half_a_file_is_refused(tmp_path, what):
    plant(tmp_path / "it", "half a file")
    with pytest.raises(ConfigurationError, match=str(tmp_path / "it")):
        PLAIN[what](tmp_path / "it")


@pytest.mark.parametrize(
    ("kind", "reason"), [("others may write", "chmod go-w"), ("another user's", f"belongs to user {OTHER}")]
)
@pytest.mark.parametrize("what", TRUSTED)
def test_what_decides_who_takes_part_must_be_of_this_user(tmp_path, what, kind, reason):
    needs_root(kind)
    plant(tmp_path / "it", kind)
    with pytest.raises(ConfigurationError, match=reason):
        TRUSTED[what](tmp_path / "it")


def test_a_link_as_orchestrators_mount_secrets_is_followed(tmp_path):
    (tmp_path / "key").write_text("00112233445566778899aabbccddeeff")
    (tmp_path / "link").symlink_to("key")
    assert read_job_key({"TOTALREDUCE_JOB_KEY_FILE": str(tmp_path / "link")}) == bytes.fromhex(
        "00112233445566778899aabbccddeeff"
    )


@pytest.mark.parametrize("kind", ["another user's link", "another user's file", "another user's pipe"])
@pytest.mark.parametrize("what", WRITTEN)
def test_nothing_is_written_to_what_another_user_has_put_there(tmp_path, what, kind):
    needs_root(kind)
    path, victim = tmp_path / "it", tmp_path / "victim"
    victim.write_text("dear")
    if kind == "another user's link":
        path.symlink_to(victim)
        os.lchown(path, OTHER, OTHER)
    else:
        plant(path, kind if kind == "another user's file" else "a pipe")
        os.chown(path, OTHER, OTHER)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        content = os.read(reader, 100)
        with pytest.raises((ConfigurationError, OSError), match=f"belongs to user {OTHER}"):
            WRITTEN[what](path)
        assert victim.read_text() == "dear"
        assert kind == "another user's pipe" or path.read_bytes() == content
    finally:
        os.close(reader)


@pytest.mark.parametrize("what", [each for each in WRITTEN if each != "output and events"])
def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path, what):
    plant(tmp_path / "it", "a pipe")
    with pytest.raises((ConfigurationError, OSError), match=str(tmp_path / "it")):
        WRITTEN[what](tmp_path / "it")


def test_a_link_of_this_user_is_written_through(tmp_path):
    (tmp_path / "it").symlink_to(tmp_path / "there")
    write_text(tmp_path / "it", "--json", "{}")
    assert (tmp_path / "there").read_text() == "{}"
    write_text(Path("/dev/null"), "--json", "{}")


def test_a_folder_of_figures_that_others_can_open_is_not_used(tmp_path):
    tmp_path.chmod(0o750)
    assert not Board(tmp_path).is_private()


# ----------------------------------------------------------------------------------------------------------- snapshots


def part_of(folder: Path) -> Path:
    """Write a snapshot; return the folder of its only part."""
    snapshots = Snapshots(folder, every=1)
    snapshots.token = "token"
    snapshots.write(1, 0, 1, {"weights": torch.arange(4.0)}, None)
    snapshots.wait()
    assert torch.equal(Snapshots(folder, every=1).read_shared(1)["weights"], torch.arange(4.0))
    return folder / "version-000000001" / "shared"


def describe(part: Path) -> None:
    """Have the description of a part fit its files, as whoever can write to the folder can."""
    about = json.loads((part / "part.json").read_text())
    for name in about["files"]:
        content = (part / name).read_bytes()
        about["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (part / "part.json").write_text(json.dumps(about))


class _Call:
    def __init__(self, function, *arguments):
        self._call = (function, arguments)

    def __reduce__(self):
        return self._call


@pytest.mark.parametrize("function", [os.mkdir, eval, torch.load, torch.hub.load, SimpleNamespace])
def test_the_index_of_a_snapshot_runs_no_code(tmp_path, function):
    part = part_of(tmp_path)
    argument = f"__import__('os').mkdir({str(tmp_path / 'ran')!r})" if function is eval else str(tmp_path / "ran")
    arguments = [] if function is SimpleNamespace else [argument]
    (part / ".metadata").write_bytes(pickle.dumps(_Call(function, *arguments)))
    describe(part)
    with pytest.raises(RecoveryError, match="which no index of a snapshot does"):
        Snapshots(tmp_path, every=1).read_shared(1)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda entry, _place: setattr(entry, "size", torch.Size([1 << 50])), "which its files do not have"),
        (lambda _entry, place: setattr(place, "relative_path", "../../pipe"), "is not of this part"),
    ],
)
def test_the_index_of_a_snapshot_takes_no_memory_and_names_no_other_files(tmp_path, change, reason):
    part = part_of(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    index = pickle.loads((part / ".metadata").read_bytes())
    for (key, entry), place in zip(index.state_dict_metadata.items(), index.storage_data.values(), strict=True):
        if key == "tensor-0":
            change(entry, place)
    if reason == "is not of this part":
        for place in index.storage_data.values():
            change(None, place)
    (part / ".metadata").write_bytes(pickle.dumps(index))
    describe(part)
    with pytest.raises(RecoveryError, match=reason):
        Snapshots(tmp_path, every=1).read_shared(1)


@pytest.mark.parametrize("name", ["part.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a huge file", "half a file", "a link to a device"])
def test_a_snapshot_with_something_else_in_the_place_of_a_file_is_refused_at_once(tmp_path, name, kind):
    part = part_of(tmp_path)
    (part / name).unlink()
    plant(part / name, kind)
    with pytest.raises(RecoveryError, match=str(part / name)):
        Snapshots(tmp_path, every=1).read_shared(1)
