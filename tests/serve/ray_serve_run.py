"""Starts Ray Serve with the example of examples/serve and one bundle; says where on standard output; ends with its input."""

import json
import os
import socket
import sys
from pathlib import Path

from clusters import SETTINGS

EXAMPLES = Path(__file__).parents[2] / "examples" / "serve"


def tell(said: dict) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def main(bundle: str, key_file: str) -> None:
    os.environ.update(SETTINGS)  # workers must find the example's module too
    os.environ["PYTHONPATH"] += f"{os.pathsep}{EXAMPLES}"
    sys.path.insert(0, str(EXAMPLES))
    import ray
    from ray import serve
    from ray_serve import Arguments, build

    ray.init(
        num_cpus=2,
        object_store_memory=80_000_000,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    arguments = Arguments(
        bundle=bundle, api_key_file=key_file or None, min_replicas=1, max_replicas=2, requests=1, cores=0.2
    )
    try:
        serve.run(build(arguments))
        tell({"url": f"http://127.0.0.1:{port}"})
        for line in sys.stdin:
            if line.strip() == "replicas":
                (deployment,) = serve.status().applications["default"].deployments.values()
                tell(deployment.replica_states)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
