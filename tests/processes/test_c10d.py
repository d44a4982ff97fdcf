"""The back end as ``torch.distributed`` uses it: results equal to gloo's, handles, groups, time-outs, errors."""

import pytest

START = """
from datetime import timedelta

def start(backend="totalreduce", seconds=60.0, **options):
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds), **options)

"""


@pytest.fixture
def run(fleet):
    """Runs a program on some ranks; returns what each said last as ``result``."""

    def run(num_workers, source, timeout_s=60.0, **variables):
        workers = fleet.start(num_workers, START + source, **variables)
        said = [worker.read("result", timeout_s) for worker in workers]
        for worker in workers:
            assert worker.wait() == 0, worker.errors()
        return said

    return run


COLLECTIVES = """
import itertools

start()
size = dist.get_world_size()
ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
differences, count = [], 0

def values(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 5, shape, generator=generator)
    return numbers.to(dtype) if not dtype.is_complex else torch.complex(numbers.float(), -numbers.float()).to(dtype)

def compare(what, collective):
    global count
    count += 1
    results = []
    for group in (gloo, ours):
        outputs = collective(group)
        results.append([output.clone() for output in outputs])
    if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
        differences.append(what)

def allreduce(tensor, op):
    return lambda group: (out := tensor.clone(), dist.all_reduce(out, op, group=group))[:1]

def on_root(tensor, function):
    # What other ranks find in the tensor of a reduce is nobody's promise.
    return lambda group: (out := tensor.clone(), function(out, group))[:1] if rank == size - 1 else (
        function(tensor.clone(), group), [])[1]

R = dist.ReduceOp
dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
dtypes += [torch.int32, torch.int64, torch.uint8, torch.int8]
for dtype, shape in itertools.product(dtypes, [(0,), (), (7,), (3, 5), (1000,)]):
    own, last = values(shape, dtype, rank), size - 1
    for op in (R.SUM, R.MIN, R.MAX, R.PRODUCT):
        compare(f"all_reduce {op} {dtype} {shape}", allreduce(own, op))
    compare(f"reduce {dtype} {shape}", on_root(own, lambda t, g: dist.reduce(t, last, group=g)))
    compare(f"broadcast {dtype} {shape}",
            lambda g: (out := own.clone(), dist.broadcast(out, last, group=g))[:1])
    compare(f"all_gather {dtype} {shape}",
            lambda g: (out := [torch.empty_like(own) for _ in range(size)], dist.all_gather(out, own, group=g))[0])

for dtype in (torch.int32, torch.int64, torch.uint8):
    for op in (R.BAND, R.BOR, R.BXOR):
        compare(f"all_reduce {op} {dtype}", allreduce(values((9,), dtype, rank), op))

for dtype in (torch.float32, torch.complex64, torch.uint8, torch.int64):
    own = values((4, 3), dtype, rank)
    blocks = [values((4, 3), dtype, 10 * rank + r) for r in range(size)]
    whole = torch.cat(blocks)
    compare(f"sum {dtype}", allreduce(own, R.SUM))
    if dtype.is_complex:
        continue  # gloo does not move complex numbers in the following ones
    compare(f"gather {dtype}", lambda g: (
        out := [torch.empty_like(own) for _ in range(size)] if rank == 1 else None,
        dist.gather(own, out, dst=1, group=g))[0] or [])
    compare(f"scatter {dtype}", lambda g: (
        out := torch.empty_like(own), dist.scatter(out, blocks if rank == 1 else None, src=1, group=g))[:1])
    compare(f"all_gather_into_tensor {dtype}", lambda g: (
        out := torch.empty(4 * size, 3, dtype=dtype), dist.all_gather_into_tensor(out, own, group=g))[:1])
    compare(f"all_to_all_single {dtype}", lambda g: (
        out := torch.empty_like(whole), dist.all_to_all_single(out, whole, group=g))[:1])

if True:
    blocks = [values((4, 3), torch.float32, 10 * rank + r) for r in range(size)]
    whole = torch.cat(blocks)
    compare("reduce_scatter", lambda g: (
        out := torch.empty(4, 3), dist.reduce_scatter(out, [b.clone() for b in blocks], group=g))[:1])
    compare("reduce_scatter_tensor", lambda g: (
        out := torch.empty(4, 3), dist.reduce_scatter_tensor(out, whole.clone(), group=g))[:1])
    sizes = [rank + r for r in range(size)]  # rank i gives i + j rows to rank j
    rows = values((sum(sizes), 2), torch.float32, rank)
    compare("all_to_all_single, uneven", lambda g: (
        out := torch.empty(sum(sizes), 2), dist.all_to_all_single(out, rows, sizes, sizes, group=g))[:1])
    compare("all_to_all", lambda g: (
        out := [torch.empty(4, 3) for _ in blocks], dist.all_to_all(out, [b.clone() for b in blocks], group=g))[0])
    transposed = values((5, 4), torch.float32, rank).t()
    compare("not contiguous", lambda g: (
        out := transposed.clone(memory_format=torch.preserve_format), dist.all_reduce(out, group=g))[:1])

say("result", differences=differences, count=count)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_results_are_gloos(run, size):
    said = run(size, COLLECTIVES, FULL_EXIT="1")
    assert [facts["differences"] for facts in said] == [[]] * size
    assert said[0]["count"] > 280


STAGED = """
class Staged:
    # As for CUDA tensors, but from host memory to host memory: what is not read is not there.

    def __init__(self, reads, writes):
        self.writes = list(writes)
        self.hosts = {id(tensor): torch.full_like(tensor, 77) for tensor in (*reads, *writes)}
        for tensor in reads:
            self.host(tensor).copy_(tensor)

    def host(self, tensor):
        return self.hosts.get(id(tensor), tensor)

    def finish(self, *, blocking):
        for tensor in self.writes:
            tensor.copy_(self.host(tensor))
        self.writes.clear()

class Stager:
    stage = staticmethod(Staged)
"""


@pytest.mark.slow
def test_staged_tensors_are_copied_in_and_out(run):
    begin = "ours, gloo = dist.group.WORLD"
    assert begin in COLLECTIVES
    source = STAGED + COLLECTIVES.replace(begin, f"dist.group.WORLD._calls._stager = Stager()\n{begin}")
    said = run(3, source)
    assert [facts["differences"] for facts in said] == [[]] * 3
    assert said[0]["count"] > 280


def test_what_gloo_does_not_have(run):
    source = """
    start()
    size = dist.get_world_size()
    mean = torch.full((5,), float(rank))
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    uneven = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    received = [torch.empty(rank + r) for r in range(size)]
    dist.all_to_all(received, [torch.full((rank + r,), float(rank)) for r in range(size)])
    shorts = torch.full((3,), rank, dtype=torch.int16)
    dist.all_reduce(shorts)
    eights = torch.full((3,), 1.5 * rank).to(torch.float8_e4m3fn)
    dist.broadcast(eights, 2)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "set": {rank}})
    pg = dist.group.WORLD
    pg.allreduce(bare := torch.ones(2)).wait()
    pg.allreduce([listed := torch.ones(2)], dist.ReduceOp.MAX).wait()
    say("result", mean=mean.tolist(), uneven=[t.tolist() for t in uneven], shorts=shorts.tolist(),
        received=[t.tolist() for t in received], eights=eights.float().tolist(),
        objects=[sorted(o["set"]) for o in objects], bare=bare.tolist(),
        listed=listed.tolist(), name=pg.name(), backend=dist.get_backend(), group=pg.group_name != "")
    dist.destroy_process_group()
    """
    for rank, facts in enumerate(run(3, _dedent(source))):
        assert facts["mean"] == [1.0] * 5
        assert facts["received"] == [[float(r)] * (rank + r) for r in range(3)]
        assert facts["uneven"] == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
        assert facts["shorts"] == [3] * 3
        assert facts["eights"] == [3.0] * 3
        assert facts["objects"] == [[0], [1], [2]]
        assert facts["bare"] == [3.0, 3.0]
        assert facts["listed"] == [1.0, 1.0]
        assert facts["name"] == facts["backend"] == "totalreduce"
        assert facts["group"]


def test_wrong_arguments_are_value_errors(run):
    source = """
    start()
    texts = []
    for wrong in (
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist._make_nccl_premul_sum(2.0)),
        lambda: dist.all_reduce(torch.ones(2).to_sparse(), dist.ReduceOp.MAX),
        lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3)),
        lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 1], [1, 1]),
        lambda: dist.all_gather_into_tensor(torch.empty(3), torch.ones(2)),
        lambda: dist.group.WORLD.allreduce([torch.ones(1), torch.ones(1)]),
        lambda: dist.all_reduce(torch.ones(2, device="meta")),
        lambda: dist.new_group(pg_options=object()),
    ):
        try:
            wrong()
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    dist.all_reduce(after := torch.ones(1))
    say("result", texts=texts, after=after.item())
    dist.destroy_process_group()
    """
    for facts in run(2, _dedent(source)):
        parts = ["PREMUL_SUM", "sparse", "divide", "splits", "world_size", "one tensor", "meta", "pg_options"]
        for part, text in zip(parts, facts["texts"], strict=True):
            assert part in text
        assert facts["after"] == 2.0


def test_work_handles_and_futures(fleet):
    source = """
    import threading
    start()
    order = []
    tensor = torch.ones(1000)
    if rank == 1:
        hear()
    work = dist.all_reduce(tensor, async_op=True)
    before = work.is_completed()
    future = work.get_future()
    again = work.get_future() is future
    other = torch.ones(3)

    def callback(done):
        # Another collective, waited for in the callback: it needs the thread that moves messages.
        order.append(threading.current_thread().name)
        return done.value()[0].sum() + dist.all_reduce(other, async_op=True).get_future().wait()[0].sum()

    chained = future.then(callback)
    if rank == 0:
        say("submitted")
    total = chained.wait().item()
    failing = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: 1 / 0)
    try:
        failing.wait()
        error = ""
    except RuntimeError as problem:
        error = str(problem)
    say("result", before=before, again=again, total=total, error=error, thread=order[0], completed=work.is_completed(),
        success=work.exception() is None, result=[t.tolist()[:2] for t in work.result()], waited=work.wait())
    dist.destroy_process_group()
    """
    zero, one = fleet.start(2, START + _dedent(source))
    zero.read("submitted")
    one.tell()
    for worker in (zero, one):
        facts = worker.read("result")
        assert facts["total"] == 2000.0 + 6.0
        assert facts["again"]
        assert facts["completed"]
        assert facts["success"]
        assert facts["waited"]
        assert facts["result"] == [[2.0, 2.0]]
        assert "ZeroDivisionError" in facts["error"]
        if worker is zero:  # for rank 1, the sum may be there before the callback is, which then runs at once
            assert facts["thread"].endswith("callbacks")
            assert not facts["before"]
        assert worker.wait() == 0


def test_messages(run):
    source = """
    start()
    size = dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(4)
    for request in dist.batch_isend_irecv([
        dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, torch.full((4,), float(rank)), right)]):
        request.wait()
    tagged = [torch.zeros(1), torch.zeros(1)]
    requests = [dist.isend(torch.tensor([float(tag)]), right, tag=tag) for tag in (7, 8)]
    requests += [dist.irecv(tagged[index], left, tag=tag) for index, tag in ((1, 8), (0, 7))]
    for request in requests:
        request.wait()
    sources = []
    if rank == 0:
        for _ in range(size - 1):
            word = torch.zeros(1)
            sender = dist.recv(word)
            sources.append([sender, word.item()])
    else:
        dist.send(torch.tensor([10.0 * rank]), 0)
    say("result", got=got.tolist(), tagged=[t.item() for t in tagged], sources=sorted(sources))
    dist.destroy_process_group()
    """
    said = run(3, _dedent(source))
    for rank, facts in enumerate(said):
        assert facts["got"] == [float((rank - 1) % 3)] * 4
        assert facts["tagged"] == [7.0, 8.0]
    assert said[0]["sources"] == [[1, 10.0], [2, 20.0]]


def test_groups_share_the_connections_of_the_default_group(run):
    source = """
    start()
    whole = dist.group.WORLD.group
    connections = whole.statistics().connections
    pair = dist.new_group([0, 2])
    backwards = dist.new_group([3, 1], sort_ranks=False)
    mine = pair if rank in (0, 2) else backwards
    tensor = torch.tensor([10.0 ** rank])
    dist.all_reduce(tensor, group=mine)
    gathered = [torch.empty(1) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=mine)
    outside = pair is dist.GroupMember.NON_GROUP_MEMBER
    subgroup, _ = dist.new_subgroups(2)
    dist.all_reduce(inside := torch.tensor([float(rank)]), group=subgroup)
    dist.destroy_process_group(mine)
    dist.barrier()
    same = whole.statistics().connections == connections
    dist.all_reduce(everybody := torch.ones(1))
    say("result", sum=tensor.item(), gathered=[t.item() for t in gathered], outside=outside, same=same,
        inside=inside.item(), everybody=everybody.item(), group_rank=mine.rank())
    dist.destroy_process_group()
    """
    for rank, facts in enumerate(run(4, _dedent(source))):
        assert facts["sum"] == (101.0 if rank in (0, 2) else 1010.0)
        assert facts["gathered"] == ([0.0, 2.0] if rank in (0, 2) else [3.0, 1.0])
        assert facts["group_rank"] == {0: 0, 2: 1, 3: 0, 1: 1}[rank]
        assert facts["outside"] == (rank in (1, 3))
        assert facts["same"]
        assert facts["inside"] == (1.0 if rank < 2 else 5.0)
        assert facts["everybody"] == 4.0


def test_a_group_beside_another_back_end_meets_in_the_store(run):
    source = """
    start("gloo")
    ours = dist.new_group([0, 1], backend="totalreduce")
    sums = []
    if rank < 2:
        dist.all_reduce(tensor := torch.ones(1), group=ours)
        sums.append(tensor.item())
        sums.append(type(ours).__name__)
    dist.all_reduce(everybody := torch.ones(1))
    say("result", sums=sums, everybody=everybody.item())
    dist.destroy_process_group()
    """
    said = run(3, _dedent(source))
    assert [facts["sums"] for facts in said] == [[2.0, "ProcessGroupTotalReduce"]] * 2 + [[]]
    assert [facts["everybody"] for facts in said] == [3.0] * 3


@pytest.mark.parametrize(
    "backend", ["cpu:gloo,cuda:totalreduce", "cuda:totalreduce,cpu:gloo", "cpu:totalreduce,meta:gloo"]
)
def test_other_back_ends_for_other_devices(run, backend):
    """There is no GPU here, so gloo stands for NCCL, and for two of the cases our device is the one not used."""
    source = f"""
    start({backend!r})
    pg = dist.group.WORLD
    kinds = {{kind: type(pg._get_backend(torch.device(kind))).__name__ for kind in {_devices(backend)!r}}}
    tensor = torch.ones(3)
    before = pg.group.statistics().operations
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 1)
    gathered = [torch.empty(1), torch.empty(1)]
    dist.all_gather(gathered, torch.tensor([float(rank)]))
    objects = [None, None]
    dist.all_gather_object(objects, rank)
    pair = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=pair)
    dist.destroy_process_group(pair)
    ours = pg.group.statistics().operations - before
    dist.barrier()
    dist.destroy_process_group()
    left = len(dist.distributed_c10d._world.pg_map)
    say("result", kinds=kinds, sum=tensor.tolist(), gathered=[t.item() for t in gathered], objects=objects, ours=ours,
        left=left)
    """
    for facts in run(2, _dedent(source)):
        names = {"gloo": "ProcessGroupGloo", "totalreduce": "ProcessGroupTotalReduce"}
        assert facts["kinds"] == {kind: names[name] for kind, name in _pairs(backend)}
        assert facts["sum"] == [4.0] * 3
        assert facts["gathered"] == [0.0, 1.0]
        assert facts["objects"] == [0, 1]
        assert (facts["ours"] > 0) == ("cpu:totalreduce" in backend)
        assert facts["left"] == 0


def test_time_outs_name_the_rank_that_is_missing(fleet):
    source = """
    start(seconds=60)
    short = dist.new_group(timeout=timedelta(seconds=1))  # rank 1 must say within it that it does not wait
    texts, kinds = [], []
    if rank == 0:
        begin = time.monotonic()
        unwaited = dist.all_reduce(torch.ones(1), group=short, async_op=True).get_future()
        for attempted in (
            lambda: dist.barrier(short),
            lambda: dist.all_reduce(torch.ones(3), group=short),
            lambda: dist.broadcast(torch.ones(3), 1, group=short),
            lambda: dist.recv(torch.ones(3), 1, group=short),
            lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(timedelta(seconds=0.3)),
            lambda: unwaited.wait(),
        ):
            try:
                attempted()
            except RuntimeError as error:
                texts.append(str(error))
                kinds.append([type(error).__name__, type(error.__cause__).__name__])
        say("late", seconds=time.monotonic() - begin)
    else:
        hear()
        dist.all_reduce(torch.ones(1))  # what rank 0 gave up waiting for goes on
    dist.barrier()
    say("result", texts=texts, kinds=kinds)
    dist.destroy_process_group()
    """
    zero, one = fleet.start(2, START + _dedent(source))
    assert 4.0 < zero.read("late")["seconds"] < 20.0
    one.tell()
    facts = zero.read("result")
    one.read("result")
    assert facts["kinds"][:5] == [["DistBackendError", "DeadlineExceededError"]] * 5
    assert facts["kinds"][5] == ["RuntimeError", "NoneType"]
    for text in facts["texts"]:
        assert " Timed out " in text
    for text in facts["texts"][:4]:
        assert "rank 1" in text or "rank(s) 1" in text


def test_the_monitored_barrier_says_who_is_missing(run):
    source = """
    start()
    from torch.distributed import monitored_barrier
    monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=10), wait_all_ranks=True)
    texts = []
    for all_ranks in (False, True):
        if rank in (0, 2):
            try:
                dist.monitored_barrier(timeout=timedelta(seconds=3), wait_all_ranks=all_ranks)
                texts.append("")
            except dist.DistBackendError as error:
                texts.append(str(error))
        dist.barrier()
    say("result", texts=texts)
    dist.destroy_process_group()
    """
    said = run(4, _dedent(source))
    assert "Rank 1 failed to pass monitoredBarrier in 3000 ms" in said[0]["texts"][0]
    assert "Ranks 1, 3 failed to pass monitoredBarrier in 3000 ms" in said[0]["texts"][1]
    for text, failed in zip(said[2]["texts"], ("Rank 1 failed", "Ranks 1, 3 failed"), strict=True):
        assert "Rank 2 successfully reached monitoredBarrier, but received errors while waiting" in text
        assert failed in text


def test_a_mismatch_is_a_torch_error_on_every_rank(run):
    source = """
    start()
    try:
        dist.all_reduce(torch.ones(3 + rank))
        text = cause = ""
    except dist.DistBackendError as error:
        text, cause = str(error), type(error.__cause__).__name__
    dist.all_reduce(after := torch.ones(1))
    say("result", text=text, cause=cause, after=after.item())
    dist.destroy_process_group()
    """
    for facts in run(2, _dedent(source)):
        assert "rank 0 submitted" in facts["text"]
        assert "rank 1 submitted" in facts["text"]
        assert facts["cause"] == "MismatchError"
        assert facts["after"] == 2.0


def test_a_process_can_begin_anew_and_be_alone(run, tmp_path):
    # Over files: torch's TCPStore at one address twice is a race (rank 1 may still find the first one), with gloo too.
    source = f"""
    sums = []
    for attempt in range(3):
        start(init_method=f"file://{tmp_path}/{{attempt}}", rank=rank, world_size=2)
        dist.all_reduce(tensor := torch.ones(1))
        sums.append(tensor.item())
        dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group("totalreduce", store=store, rank=0, world_size=1)
    dist.all_reduce(alone := torch.ones(1))
    dist.barrier()
    dist.monitored_barrier()
    gathered = [torch.empty(1)]
    dist.all_gather(gathered, alone)
    dist.destroy_process_group()
    say("result", sums=sums, alone=gathered[0].item())
    """
    for facts in run(2, _dedent(source)):
        assert facts["sums"] == [2.0] * 3
        assert facts["alone"] == 1.0


def test_sharded_models_and_tensors(run):
    source = """
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    start()
    size = dist.get_world_size()

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.GELU(), torch.nn.Linear(33, 16))

    def losses(trained):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(rank)
        found = []
        for _ in range(5):
            inputs = torch.randn(8, 16, generator=generator)
            loss = ((trained(inputs) - inputs) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    gloo = dist.new_group(backend="gloo")
    reference = losses(DistributedDataParallel(model(), process_group=gloo))
    data_parallel = losses(DistributedDataParallel(model()))
    meshes = [init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("r", "s"))]
    sharded = []
    for mesh in meshes:
        trained = model()
        fully_shard(trained[0], mesh=mesh)
        fully_shard(trained, mesh=mesh)
        sharded.append(losses(trained))
    trained, allocated = fully_shard(model(), mesh=meshes[0]), []
    trained.set_allocate_memory_from_process_group_for_comm(True)
    kind = type(dist.group.WORLD)
    allocate = kind.allocate_tensor
    kind.allocate_tensor = lambda *given, **named: allocated.append(allocate(*given, **named)) or allocated[-1]
    sharded.append(losses(trained))
    shared = dist.group.WORLD.group.shares_memory
    lengths = [len(tensor) for tensor in allocated[:3]]
    spread = distribute_tensor(torch.arange(12.0).reshape(6, 2), meshes[0], [Shard(0)])
    turned = spread.redistribute(meshes[0], [Shard(1)]).redistribute(meshes[0], [Replicate()]).to_local()
    summed = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    exchanged = functional.all_to_all_single(torch.arange(float(size)), None, None, dist.group.WORLD)
    say("result", reference=reference, data_parallel=data_parallel, sharded=sharded,
        turned=turned.flatten().tolist(), summed=summed.tolist(), exchanged=exchanged.tolist(),
        shared=shared, lengths=lengths)
    dist.destroy_process_group()
    """
    for rank, facts in enumerate(run(4, _dedent(source), 100.0)):
        assert facts["shared"]
        # Gathered, what is to be reduced, and a quarter of that; every parameter is padded to a multiple of four rows.
        assert facts["lengths"] == [36 * 16 + 36 + 16 * 33 + 16, 36 * 16 + 36 + 16 * 33 + 16, 289]
        for losses in (facts["data_parallel"], *facts["sharded"]):
            assert losses == pytest.approx(facts["reference"], rel=1e-5)
        assert facts["turned"] == [float(number) for number in range(12)]
        assert facts["summed"] == [4.0, 4.0]
        assert facts["exchanged"] == [float(rank)] * 4


def test_operations_appear_in_a_profile(run):
    source = """
    start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 4))
        dist.broadcast(torch.ones(5), 0, async_op=True).wait()
    events = [[e.name, e.is_async, e.input_shapes] for e in profile.events() if e.name.startswith("totalreduce:")]
    say("result", events=events)
    dist.destroy_process_group()
    """
    expected = [["totalreduce:all_reduce", True, [[3, 4]]], ["totalreduce:broadcast", True, [[5]]]]
    for facts in run(2, _dedent(source)):
        assert facts["events"] == expected


def _dedent(source):
    lines = source.strip("\n").splitlines()
    return "\n".join(line[4:] for line in lines)


def _pairs(backend):
    return [part.split(":") for part in backend.split(",")]


def _devices(backend):
    return [kind for kind, _ in _pairs(backend)]
