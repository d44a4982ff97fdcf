"""What Kubernetes makes of the manifests among the examples: the variables of each pod."""

from pathlib import Path

import yaml

MANIFESTS = Path(__file__).parents[2] / "examples" / "kubernetes"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def load(name):
    """A manifest."""
    return yaml.safe_load((MANIFESTS / f"{name}.yaml").read_text())


def containers(name):
    """The containers of all pods, in the order of their ranks."""
    spec = load(name)["spec"]
    if name == "jobset":
        [job] = spec["replicatedJobs"]
        inner = job["template"]["spec"]
        assert inner["completionMode"] == "Indexed"
        assert job["replicas"] == 1
        assert inner["parallelism"] == inner["completions"]  # a rank that is not started would be waited for
        return [_only(inner["template"]) for _ in range(inner["completions"])]
    replicas = spec["pytorchReplicaSpecs"]
    return [
        _only(replicas[kind]["template"]) for kind in ("Master", "Worker") for _ in range(replicas[kind]["replicas"])
    ]


def _only(template):
    [container] = template["spec"]["containers"]
    return container


def variables(name, key="5b" * 32):
    """The variables of each rank's container, with those that the operator of PyTorchJob sets."""
    ranks = containers(name)
    return [
        {**_of_the_operator(name, rank, len(ranks)), **{each["name"]: _value(each, rank, key) for each in found["env"]}}
        for rank, found in enumerate(ranks)
    ]


def _of_the_operator(name, rank, size):
    if name != "pytorchjob":
        return {}
    title = load(name)["metadata"]["name"]
    return {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": f"{title}-master-0", "MASTER_PORT": "23456"}


def _value(variable, rank, key):
    if "value" in variable:
        assert isinstance(variable["value"], str), f"{variable['name']} must be quoted"
        return variable["value"]
    [(kind, source)] = variable["valueFrom"].items()
    if kind == "secretKeyRef":
        return key
    assert (kind, source["fieldPath"]) == ("fieldRef", INDEX)
    return str(rank)
