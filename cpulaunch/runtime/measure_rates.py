"""Measures the rates of matrix products in a separate process, because the launcher does not import torch::

    python …/cpulaunch/runtime/measure_rates.py '{"cores": "0-13", "threads": 14, "environment": {}}'

Prints the rates as one line of JSON after MARK.  ``kept`` says whether they are now in the user's cache,
and ``writable`` whether its directory can be written.
"""

from __future__ import annotations

import json
import os
import sys

# Replace this file's directory by the path to cpulaunch: modules here must not hide others of their names.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from cpulaunch.discovery.host.rate_cache import MARK, RateCache
from cpulaunch.discovery.host.this_host import cpu_here
from cpulaunch.model.cores import CoreSet


def main() -> None:
    request = json.loads(sys.argv[1])
    os.environ.update(request["environment"])
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    os.sched_setaffinity(0, CoreSet.parse(request["cores"]))  # before torch starts its threads

    import torch

    from cpulaunch.runtime.product_rates import product_rates

    torch.set_num_threads(request["threads"])
    rates = product_rates(torch)
    cache = RateCache.of(cpu_here(), torch.__version__, os.environ)
    kept = cache.rate(rates.threads, "fp32") is not None
    writable = os.access(cache.file.parent, os.W_OK)
    print(MARK + json.dumps({**rates._asdict(), "kept": kept, "writable": writable}), flush=True)


if __name__ == "__main__":
    main()
