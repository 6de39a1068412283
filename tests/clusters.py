"""A Ray cluster on this machine."""

import os
import socket
from pathlib import Path

TESTS = Path(__file__).parent
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # On a busy machine processes take their time.
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_worker_register_timeout_seconds": "240",
    "RAY_worker_niceness": "0",
    "PYTHONPATH": os.pathsep.join(
        [str(TESTS), str(TESTS.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "memory": 4_000_000_000}


def add_node(cluster, **options):
    """A machine more; it needs none of the ports that Ray's agents would tell after they are imported."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return cluster.add_node(**NODE | options, runtime_env_agent_port=port)
