"""A Ray cluster on this machine, shared by all tests of a session: a head without cores and two machines of one core."""

import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import ray

from clusters import SETTINGS, add_node


@pytest.fixture(scope="session")
def cluster():
    """The cluster; this process is connected to it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tempfile.mkdtemp(prefix="r", dir="/tmp" if sys.platform != "win32" else None)  # sockets: short paths
        for name, value in {**SETTINGS, "RAY_TMPDIR": folder, "MASS_CACHE": f"{folder}/cache"}.items():
            patch.setenv(name, value)
        from ray._private import services
        from ray.cluster_utils import Cluster

        real = services.start_raylet

        def start_raylet(*args, **kwargs):
            # Ray waits 15 s for its agents to say that they are not installed, which they do after seconds of imports.
            for name in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
                (Path(args[11]) / f"{name}_{args[2]}").write_text("-1")
            return real(*args, **kwargs)

        patch.setattr(services, "start_raylet", start_raylet)
        found = Cluster()
        checks = {"health_check_period_ms": 500, "health_check_timeout_ms": 10_000, "health_check_failure_threshold": 4}
        add_node(found, num_cpus=0, include_dashboard=False, _system_config=checks)
        add_node(found)
        add_node(found)
        ray.init(found.address, log_to_driver=False, configure_logging=False)
        yield found
        ray.shutdown()
        found.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
