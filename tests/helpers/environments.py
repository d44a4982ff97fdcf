"""The variables of workers that a test starts by itself."""

from totalreduce.launch.hosts import Place
from totalreduce.launch.workers import common_environment, default_num_threads, seat_environment


def worker_environments(base, num_workers, *, workers_per_host, master_address, job_id):
    """Return the variables of every worker of a run with equally many workers on each host; the hosts share cores."""
    common = common_environment(base, num_workers, master_address=master_address, job_id=job_id)
    common.setdefault("OMP_NUM_THREADS", str(default_num_threads(num_workers)))
    places = [
        Place("", rank // workers_per_host, rank % workers_per_host, workers_per_host) for rank in range(num_workers)
    ]
    return [{**common, **seat_environment(rank, place)} for rank, place in enumerate(places)]
