"""torchrun's options: which machine and which ranks they name, and sentences for what has no meaning here."""

import pytest

from totalreduce.foundation.errors import ConfigurationError
from totalreduce.launch.nodes import node_options


def test_one_machine_without_an_address_is_nothing_special():
    assert node_options() is None
    assert node_options(nnodes="1", node_rank=0, backend="c10d", job="7") is None


@pytest.mark.parametrize(
    ("endpoint", "address", "port"),
    [("node0:1234", "node0", 1234), ("10.0.0.1", "10.0.0.1", 29500), ("[fd00::1]:7", "fd00::1", 7)],
)
def test_endpoints(endpoint, address, port):
    node = node_options(nnodes="3", node_rank=2, endpoint=endpoint, job="a")
    assert (node.rank, node.count, node.address, node.port, node.job) == (2, 3, address, port, f"a@{address}:{port}")
    assert node.seats(12) == range(8, 12)


def test_address_and_port_are_the_endpoint():
    assert node_options(nnodes="2:2", node_rank=1, master_addr="a", master_port=5) == node_options(
        nnodes="2", node_rank=1, endpoint="a:5"
    )


def test_port_zero_is_any_port_of_one_machine():
    assert node_options(endpoint="localhost:0").port >= 1024


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": "2"}, "--nnodes 2 needs --node-rank: the number of this machine, from 0 to 1"),
        ({"nnodes": "2", "node_rank": 2}, "--nnodes 2 does not go with --node-rank 2"),
        ({"nnodes": "2", "node_rank": 0}, "--rdzv-endpoint node0:29500"),
        ({"node_rank": 1}, "--node-rank 1 needs --nnodes"),
        ({"nnodes": "1:4"}, "--hosts-file hosts --on-loss shrink"),
        ({"nnodes": "0"}, "at least 1, not '0'"),
        ({"nnodes": "2", "node_rank": 0, "endpoint": "a:0"}, "port 0 is for one machine"),
        ({"endpoint": "a:b"}, "a port, as node0:29500, not 'a:b'"),
        ({"endpoint": "a:70000"}, "not 'a:70000'"),
        ({"endpoint": "a:1", "master_port": 2}, "and not both"),
        ({"backend": "etcd"}, "--rdzv-backend is c10d or static here, and not 'etcd'"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ConfigurationError) as caught:
        node_options(**options)
    assert message in str(caught.value)
