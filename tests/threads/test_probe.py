"""The link probe: every rank knows the same, the slowest counts, and neither latency nor bursts pass for bandwidth."""

import json
import math

import pytest
import torch

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.groups import probe
from totalreduce.groups.probe import Survey
from totalreduce.schedules.select import LinkModel
from totalreduce.testing import run_ranks


def on_hosts(hosts, function):
    """Run a function on ranks that believe to live on these hosts."""

    def body(group):
        probe.selector_of(group).hosts = tuple(hosts)
        return function(group)

    return run_ranks(len(hosts), body)


# ------------------------------------------------------------------------------------------------------------ measuring


@pytest.mark.parametrize(
    "hosts",
    [(0,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 2), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 2), (0, 0, 1, 1, 2, 2, 3)],
)
def test_all_ranks_know_what_every_rank_has_measured(hosts):
    surveys = on_hosts(hosts, probe.survey)
    assert all(survey == surveys[0] for survey in surveys)
    found = surveys[0]
    assert found.hosts == hosts
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    for rank, host in enumerate(hosts):
        shares = hosts.count(host) > 1
        last_there = rank == max(r for r, other in enumerate(hosts) if other == host)
        assert (found.local_bytes_per_s[rank] > 0) == shares
        assert (found.local_latency_s[rank] > 0) == (shares and not last_there)
        assert (found.bytes_per_s[rank] > 0) == (rank in firsts and len(firsts) > 1)
        assert (found.latency_s[rank] > 0) == (rank in firsts[:-1])


def test_the_slowest_counts_and_what_was_not_measured_keeps_its_default():
    survey = Survey((0, 0, 1), (2e-4, 0.0, 3e-4), (9e7, 0.0, 8e7), (1e-5, 0.0, 0.0), (3e9, 2e9, 0.0), 0.05)
    assert survey.links == LinkModel(
        latency_s=3e-4, bytes_per_s=8e7, local_latency_s=1e-5, local_bytes_per_s=2e9, source="measured"
    )
    nothing = Survey((0,), (0.0,), (0.0,), (0.0,), (0.0,), 0.0)
    assert nothing.links == LinkModel(source="measured")


def test_of_several_surveys_every_number_is_the_median():
    def made(value):
        return Survey((0, 1), (value, 0.0), (value, 10 - value), (0.0, 0.0), (0.0, 0.0), value)

    assert probe.combined([made(1.0), made(5.0), made(2.0)]) == Survey(
        (0, 1), (2.0, 0.0), (2.0, 8.0), (0.0, 0.0), (0.0, 0.0), 2.0
    )


@pytest.mark.parametrize(
    ("bits_per_s", "latency_s", "burst", "streams"),
    [
        (1e9, 1e-4, 256 * 1024, 3 + 4),  # 1 MiB takes 6.4 ms behind the burst, and is repeated
        (1e10, 5e-5, 256 * 1024, 5 + 4),
        (1e7, 1e-2, 72 * 1024, 2),  # between two cities
        (1e6, 1e-2, 0, 2),  # the shortest stream says enough; it is looked at twice
    ],
)
def test_bandwidth_is_what_the_link_carries_behind_latency_and_burst(
    monkeypatch, bits_per_s, latency_s, burst, streams
):
    sizes = []

    def stream(group, ring, size):
        if group.rank == 0:
            sizes.append(size)
        return latency_s + max(0, size - burst) * 8 / bits_per_s

    monkeypatch.setattr(probe, "_stream", stream)
    found = run_ranks(2, lambda group: probe._bandwidth(group, [0, 1], probe._BETWEEN_HOSTS))
    assert found == pytest.approx([bits_per_s / 8] * 2, rel=0.05)
    assert len(sizes) == streams
    assert sum(max(0, size - burst) for size in sizes) * 8 / bits_per_s < 1.1  # seconds on the wire, in all


def test_noise_does_not_more_than_double_bandwidth(monkeypatch):
    # The first stream takes longer than the second one, whenever: what they have in common cannot be told.
    times = {rank: iter([0.2, 0.040, 0.150, 0.030]) for rank in (0, 1)}
    monkeypatch.setattr(probe, "_stream", lambda group, *_: next(times[group.rank]))
    found = run_ranks(2, lambda group: probe._bandwidth(group, [0, 1], probe._BETWEEN_HOSTS))
    assert found == pytest.approx([(262144 - 65536) / 0.015] * 2)


def test_a_rank_that_was_away_for_a_moment_does_not_make_the_link_slow(monkeypatch):
    times = {rank: iter([0.5, 0.001, 0.003, 0.011, 0.003, 0.012, 0.003, 0.011]) for rank in (0, 1)}
    monkeypatch.setattr(probe, "_stream", lambda group, *_: next(times[group.rank]))
    found = run_ranks(2, lambda group: probe._bandwidth(group, [0, 1], probe._BETWEEN_HOSTS))
    assert found == pytest.approx([(1048576 - 262144) / 0.008] * 2)


def test_an_earlier_stream_that_was_held_up_does_not_make_the_link_fast(monkeypatch):
    times = {rank: iter([0.001, 0.010, 0.011, 0.003, 0.012, 0.004, 0.011]) for rank in (0, 1)}
    monkeypatch.setattr(probe, "_stream", lambda group, *_: next(times[group.rank]))
    found = run_ranks(2, lambda group: probe._bandwidth(group, [0, 1], probe._BETWEEN_HOSTS))
    assert found == pytest.approx([(1048576 - 262144) / 0.008] * 2)


def test_who_has_no_neighbour_measures_nothing_but_keeps_step(monkeypatch):
    monkeypatch.setattr(probe, "_stream", lambda group, ring, size: size / 1e8)
    found = run_ranks(3, lambda group: probe._bandwidth(group, [0] if group.rank == 0 else [1, 2], probe._INSIDE_HOST))
    assert found == pytest.approx([0.0, 1e8, 1e8])


def test_rounded_numbers_are_on_the_grid_and_near():
    links = LinkModel(latency_s=1.1e-4, bytes_per_s=1.17e8, local_latency_s=2.3e-5, local_bytes_per_s=3.2e9)
    found = probe.rounded(links)
    assert (found.latency_s, found.bytes_per_s) == (pytest.approx(1.6e-4), 1.25e8)
    assert (found.local_latency_s, found.local_bytes_per_s) == (pytest.approx(4e-5), 4e9)
    assert probe.rounded(found) == found
    for factor in (0.9, 1.1):  # what TCP makes of a link of 1, 10 or 25 Gbit/s does not move it
        for nominal in (1.25e8, 1.25e9 * 0.94, 3.125e9 * 0.94):
            near = probe.rounded(LinkModel(bytes_per_s=nominal)).bytes_per_s
            assert max(near / nominal, nominal / near) <= math.sqrt(2)
        assert probe.rounded(LinkModel(bytes_per_s=1.25e8 * factor)).bytes_per_s == 1.25e8


# ------------------------------------------------------------------------------------------------------------- applying


def links_after(policy, hosts):
    def body(group):
        tensor = torch.arange(5.0) * (group.rank + 1)
        group.allreduce(tensor, name="before").wait()  # its layout was made with the numbers of before
        probe.apply(group, policy)
        tensor = torch.arange(100_000.0) * (group.rank + 1)
        group.allreduce(tensor, name="before").wait()
        assert torch.equal(tensor, torch.arange(100_000.0) * sum(range(1, group.world_size + 1)))
        return probe.selector_of(group).links

    found = on_hosts(hosts, body)
    assert all(links == found[0] for links in found)
    return found[0]


def test_a_job_on_several_hosts_measures_by_itself():
    links = links_after("auto", (0, 1, 1))
    assert links.source == "measured"
    assert probe.rounded(links) == links


@pytest.mark.parametrize(("policy", "hosts"), [("auto", (0, 0)), ("off", (0, 1)), ("auto", (0,))])
def test_nothing_is_measured_where_it_is_not_wanted(policy, hosts):
    assert links_after(policy, hosts) == LinkModel()


@pytest.mark.parametrize(("cores", "latency_s"), [(2, LinkModel().local_latency_s), (1, 2e-4)])
def test_where_ranks_take_turns_on_the_cores_messages_are_slower(monkeypatch, cores, latency_s):
    monkeypatch.setattr(probe.os, "cpu_count", lambda: cores)
    assert links_after("auto", (0, 0)) == LinkModel(local_latency_s=latency_s)
    assert links_after("off", (0, 0)) == LinkModel()


def test_measuring_on_one_host_if_asked_to():
    assert links_after("measure", (0, 0)).source == "measured"


def test_given_numbers_are_used_as_they_are():
    given = LinkModel(latency_s=0.012, bytes_per_s=1.7e6, source="links.json")
    assert links_after(given, (0, 1, 2)) == given


def test_a_subgroup_can_be_surveyed_too():
    def body(group):
        if group.rank == 1:
            return None
        return probe.survey(group.subgroup([3, 0, 2]))

    found = on_hosts((0, 0, 1, 1), body)
    assert found[1] is None
    assert found[0] == found[2] == found[3]
    assert found[0].hosts == (1, 0, 1)


# ----------------------------------------------------------------------------------------------------------- the policy


def test_the_argument_goes_before_the_environment_and_that_before_auto(tmp_path):
    path = tmp_path / "links.json"
    stored = LinkModel(latency_s=0.01, bytes_per_s=1e6, local_latency_s=1e-5, local_bytes_per_s=1e10)
    probe.write_links(path, stored)
    assert probe.resolve(None, None) == "auto"
    assert probe.resolve(None, "measure") == "measure"
    assert probe.resolve("off", "measure") == "off"
    assert probe.resolve(stored, "measure") is stored
    for found in (probe.resolve(None, str(path)), probe.resolve(path, "off"), probe.resolve(str(path), None)):
        assert found == probe.read_links(path)
        assert (found.latency_s, found.local_bytes_per_s, found.source) == (0.01, 1e10, str(path))


def test_ranks_with_other_numbers_are_told_apart_at_rendezvous():
    assert probe.wire_setting("auto") == "auto"
    one = probe.wire_setting(LinkModel(latency_s=0.01, source="/a/links.json"))
    assert one == probe.wire_setting(LinkModel(latency_s=0.01, source="/b/links.json"))
    assert one != probe.wire_setting(LinkModel(latency_s=0.02))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot read the links"),
        ("no JSON", "does not hold links"),
        ("[]", "does not hold links"),
        ('{"latency_s": 1}', "does not hold links.*bytes_per_s"),
        (
            json.dumps(dict.fromkeys(("latency_s", "bytes_per_s", "local_latency_s", "local_bytes_per_s"), 0)),
            "positive",
        ),
        (json.dumps(dict.fromkeys(("latency_s", "bytes_per_s", "local_latency_s", "local_bytes_per_s"), "x")), "hold"),
    ],
)
def test_a_file_that_says_nothing_is_refused(tmp_path, content, complaint):
    path = tmp_path / "links.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=complaint):
        probe.resolve(None, str(path))
    with pytest.raises(ConfigurationError, match="cannot write the links"):
        probe.write_links(tmp_path / "nowhere" / "links.json", LinkModel())
