"""Says what this rank knows of its job. Imports no torch, so that a job of four takes no time.

who_am_i.py ARGUMENT...    one line, a JSON object
who_am_i.py --fail RANK    that rank ends with exit code 7, the others would take ten minutes
"""

import hashlib
import json
import os
import socket
import sys
import time

from totalreduce.foundation.environment import read_job_key, read_world

world = read_world()
if sys.argv[1:2] == ["--fail"]:
    if world.rank == int(sys.argv[2]):
        sys.exit(7)
    time.sleep(600)
key = read_job_key()
with socket.socket() as probe:
    try:
        probe.bind((world.master_address, 0))
        has_master = True
    except OSError:
        has_master = False
facts = {
    "rank": world.rank,
    "size": world.world_size,
    "local": [world.local_rank, world.local_world_size],
    "launcher": world.launcher,
    "port": world.master_port,
    "job": world.job_id,
    "key": key and [len(key), hashlib.sha256(key).hexdigest()],
    "master_address": world.master_address,
    "is_on_master": has_master,
    "threads": os.environ.get("OMP_NUM_THREADS"),
    "cpus": os.environ.get("SRUN_CPUS_PER_TASK"),
    "arguments": sys.argv[1:],
}
print(json.dumps(facts) + "\n", end="", flush=True)  # in one piece, with the other ranks' lines around it
