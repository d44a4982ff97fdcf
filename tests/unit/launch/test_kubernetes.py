"""The manifests for Kubernetes: right by the published types, and each pod is told its rank.

``tests/processes/test_launch_examples.py`` starts ranks with the variables of the pods.
"""

import json
from pathlib import Path

import manifests
import pytest

from totalreduce.foundation.world import world_from

KINDS = {"jobset": "JobSet", "pytorchjob": "PyTorchJob"}
SCHEMAS = Path(__file__).parent / "schemas" / "kubernetes.json"


def faults(manifest, kind):
    """What is wrong with a manifest."""
    jsonschema = pytest.importorskip("jsonschema")
    schemas = json.loads(SCHEMAS.read_text())
    validator = jsonschema.Draft202012Validator({**schemas, "$ref": f"#/$defs/{kind}"})
    return ["/".join(map(str, error.absolute_path)) for error in validator.iter_errors(manifest)]


@pytest.mark.parametrize("name", KINDS)
def test_manifests_are_right_by_the_published_types(name):
    manifest = manifests.load(name)
    assert faults(manifest, KINDS[name]) == []
    manifest["spec"]["surprise"] = 1
    manifests.load(name)
    assert faults(manifest, KINDS[name]) == ["spec"]


def test_a_wrong_type_deep_in_a_pod_is_found():
    manifest = manifests.load("jobset")
    [job] = manifest["spec"]["replicatedJobs"]
    job["template"]["spec"]["template"]["spec"]["containers"][0]["env"][1]["value"] = 4
    where = "spec/replicatedJobs/0/template/spec/template/spec/containers/0/env/1/value"
    assert faults(manifest, "JobSet") == [where]


@pytest.mark.parametrize(
    ("name", "address"), [("jobset", "totalreduce-ranks-0-0.totalreduce"), ("pytorchjob", "totalreduce-master-0")]
)
def test_each_pod_is_one_rank(name, address):
    worlds = [world_from(variables) for variables in manifests.variables(name)]
    assert [world.rank for world in worlds] == [0, 1, 2, 3]
    assert {(world.world_size, world.local_rank, world.local_world_size) for world in worlds} == {(4, 0, 1)}
    assert {world.master_address for world in worlds} == {address}


def test_the_address_of_rank_0_is_that_of_the_jobsets_first_pod():
    manifest = manifests.load("jobset")
    title, job = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"][0]["name"]
    assert manifest["spec"]["network"]["enableDNSHostnames"]
    assert {each["MASTER_ADDR"] for each in manifests.variables("jobset")} == {f"{title}-{job}-0-0.{title}"}


@pytest.mark.parametrize("name", KINDS)
def test_pods_run_without_rights_and_with_a_key_from_a_secret(name):
    for container in manifests.containers(name):
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        [key] = [each for each in container["env"] if each["name"] == "TOTALREDUCE_JOB_KEY"]
        assert key["valueFrom"]["secretKeyRef"] == {"name": "totalreduce-key", "key": "key"}
    assert {each["name"] for each in manifests.containers("pytorchjob")} == {"pytorch"}  # the operator looks for it


def test_the_image_runs_as_a_user_and_has_what_the_pods_start():
    text = (manifests.MANIFESTS / "Dockerfile").read_text()
    lines = text.splitlines()
    assert "USER 1000:1000" in lines
    assert "useradd --uid 1000" in text
    assert lines.index("USER 1000:1000") < next(at for at, line in enumerate(lines) if line.startswith("CMD"))
    examples = manifests.MANIFESTS.parent
    for name in KINDS:
        for container in manifests.containers(name):
            script = container["command"][1]
            assert (examples / Path(script).relative_to("/opt/examples")).is_file()
            assert container["image"] == "totalreduce-worker:latest"
    assert "totalreduce examples --copy /opt/examples" in text
