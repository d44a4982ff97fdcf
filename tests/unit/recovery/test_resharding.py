"""Sharded states: who sends which elements to whom, which version is chosen, packed parts, and what is refused."""

import itertools
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from totalreduce.foundation.errors import ConfigurationError, ProtocolError, RecoveryError, UnsupportedError
from totalreduce.recovery.copies import ShardCopies
from totalreduce.recovery.parts import PackedPart, Part, Piece, part_of, unpack_part
from totalreduce.recovery.resharding import Box, Held, choose, distances, transfers
from totalreduce.recovery.state import State


def chunks(shape, dimension, count):
    """Return the boxes of a tensor's ``Shard(dimension)`` on so many ranks, by torch's own division."""
    lengths = [chunk.numel() for chunk in torch.arange(shape[dimension]).chunk(count)]
    lengths += [0] * (count - len(lengths))
    begins = [0, *itertools.accumulate(lengths)]
    return [
        Box(
            tuple(begin if axis == dimension else 0 for axis in range(len(shape))),
            tuple(length if axis == dimension else extent for axis, extent in enumerate(shape)),
        )
        for begin, length in zip(begins, lengths, strict=False)
    ]


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (4, 4), (1, 5), (8, 3), (7, 1)])
@pytest.mark.parametrize(
    ("shape", "old_dimension", "new_dimension"), [((10, 3), 0, 0), ((5, 9), 0, 1), ((2, 6, 5), 2, 0)]
)
def test_every_rank_gets_its_elements(before, after, shape, old_dimension, new_dimension) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    old, new = chunks(shape, old_dimension, before), chunks(shape, new_dimension, after)
    everything = Box((0,) * len(shape), tuple(shape))
    has = {part: whole[box.within(everything)] for part, box in enumerate(old)}
    plan = transfers(dict(enumerate(old)), {part: part % after for part in range(before)}, new, "weight")
    for rank, box in enumerate(new):
        got = torch.full(box.shape, -1)
        for each in plan:
            if each.target == rank:
                assert each.source == each.part % after
                got[each.box.within(box)] = has[each.part][each.box.within(old[each.part])]
        assert torch.equal(got, whole[box.within(everything)])


def test_replicas_give_to_the_rank_that_has_them_and_take_turns_otherwise() -> None:
    halves = chunks((4,), 0, 2)
    boxes = {0: halves[0], 1: halves[1], 2: halves[0], 3: halves[1]}  # HSDP: parts 2 and 3 are those of 0 and 1
    servers = {0: 0, 1: 1, 2: 2, 3: 3}
    wanted = [halves[0], halves[1], halves[0], halves[1], halves[0], halves[1]]
    plan = transfers(boxes, servers, wanted, "weight")
    assert [(each.target, each.source) for each in plan] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 0), (5, 3)]


def test_elements_that_nobody_has_are_an_error() -> None:
    thirds = chunks((9,), 0, 3)
    with pytest.raises(RecoveryError, match="rank 0 needs 9 elements of weight, and the copies of all ranks have 6"):
        transfers({0: thirds[0], 2: thirds[2]}, {0: 0, 2: 0}, [Box((0,), (9,))], "weight")


def test_the_last_version_that_is_whole_is_chosen() -> None:
    ranks = [
        [Held(1, 10, 3, (0, 2)), Held(1, 20, 3, (0, 2))],
        [],  # a new process
        [Held(1, 10, 3, (2, 1)), Held(1, 20, 3, (2,))],  # the copy of rank 1's part did not arrive
    ]
    source = choose(ranks)
    assert (source.version, source.missing) == (10, ())
    assert source.servers == {0: 0, 1: 2, 2: 2}  # rank 2 has part 2 from itself, rank 0 has a copy of it
    ranks[2][1] = Held(1, 20, 3, (2, 1))
    assert choose(ranks).version == 20
    ranks[0].append(Held(2, 10, 2, (0, 1)))  # a later epoch went back to version 10
    assert (choose(ranks).epoch, choose(ranks).version) == (2, 10)
    assert choose([[], []]) is None
    lost = choose([[Held(1, 10, 3, (0, 2)), Held(1, 20, 3, (0, 2))], [], []])
    assert (lost.version, lost.missing) == (20, (1,))


def test_copies_go_to_other_hosts_if_there_are_any() -> None:
    assert distances(["a"] * 4, 2) == [1, 2]
    assert distances(["a", "a", "b", "b"], 1) == [2]
    assert distances(["a", "a", "b", "b", "c", "c"], 3) == [2, 3, 4]
    assert distances(["a", "b"], 5) == [1]
    assert distances(["a"], 1) == []


def part_with(*tensors: torch.Tensor) -> Part:
    pieces = {
        ("model", f"weight {index}"): Piece(
            (9, *each.shape[1:]), Box((3,) + (0,) * (each.ndim - 1), tuple(each.shape)), each
        )
        for index, each in enumerate(tensors)
    }
    return Part({"version": 7, "values": {"best": 0.5}, "model": {"buffer mean": torch.tensor([1.5])}}, pieces)


def test_a_packed_part_comes_back_and_shares_the_memory() -> None:
    part = part_with(torch.randn(3, 4), torch.empty(0, 5), torch.randn(3).bfloat16(), torch.arange(3))
    packed = PackedPart(part)
    row = torch.empty(packed.num_bytes, dtype=torch.uint8)
    packed.copy_into(row)
    back = unpack_part(row)
    assert back.pieces.keys() == part.pieces.keys()
    for path, piece in part.pieces.items():
        assert torch.equal(back.pieces[path].elements, piece.elements)
        assert back.pieces[path].elements.dtype == piece.elements.dtype
        assert (back.pieces[path].shape, back.pieces[path].box) == (piece.shape, piece.box)
    assert back.shared["values"] == {"best": 0.5}
    assert back.shared["model"]["buffer mean"].item() == 1.5
    assert back.pieces["model", "weight 0"].elements.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
    wide = row.clone()
    document = bytes(wide[8 : 8 + int(wide[:8].view(torch.int64))].numpy())
    changed = document.replace(b'["bfloat16", [3]]', b'["bfloat16", [3' + b"0" * 13 + b"]]")
    changed = torch.frombuffer(bytearray(len(changed).to_bytes(8, "little") + changed), dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="its document has other lengths"):  # before it takes 60 TB of memory
        unpack_part(torch.cat([changed, torch.zeros(-len(changed) % 16 + 64, dtype=torch.uint8)]))
    for damaged in (row[:4], row[:-16], torch.full((64,), 255, dtype=torch.uint8)):
        with pytest.raises(ProtocolError):
            unpack_part(damaged.clone())
    with pytest.raises(ProtocolError, match="no correct rank writes"):
        Part.of({"shared": {}, "pieces": {("model", "weight"): [1, 2]}})


@pytest.fixture
def mesh():
    """A mesh of one rank in two dimensions."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("first", "second"))
    dist.destroy_process_group()


def state_with(mesh, placements, **values) -> State:
    model = torch.nn.Linear(4, 3, bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, placements))
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **values)


def test_hybrid_shards_are_described_and_other_meshes_refused(mesh) -> None:
    state = state_with(mesh, [Replicate(), Shard(0)])
    assert part_of(state).pieces["model", "weight"].box == Box((0, 0), (3, 4))
    assert part_of(state).shared["model"] == {"weight": None}
    with pytest.raises(UnsupportedError, match="not with tensor parallelism"):
        part_of(state_with(mesh, [Shard(0), Shard(1)]))
    weight = state.model.weight
    state.optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    path = ("optimizers", "", "state", 0, "momentum_buffer")
    assert part_of(state).pieces[path].box == Box((0, 0), (3, 4))
    assert isinstance(state.optimizer.state[weight]["momentum_buffer"], DTensor)  # the optimizer keeps its own
    state.optimizer.state[weight]["momentum_buffer"] = weight.detach().redistribute(mesh, [Shard(0), Replicate()])
    with pytest.raises(UnsupportedError, match="momentum_buffer is sharded in another way than its parameter"):
        part_of(state)


def test_sharded_values_of_the_program_are_refused(mesh) -> None:
    state = state_with(mesh, [Replicate(), Shard(0)], average=None)
    for value in ([state.model.weight.detach()], OrderedDict(weight=state.model.weight.detach())):
        state.average = value
        with pytest.raises(ConfigurationError, match=r"values\.average\.\w+ of the state is a sharded tensor"):
            part_of(state)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="every"):
        ShardCopies(every=0)
    with pytest.raises(ConfigurationError, match="replicas"):
        ShardCopies(replicas=0)
