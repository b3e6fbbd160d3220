"""Measures the rates of matrix products, in a process of its own because the launcher imports no torch::

    python …/cpulaunch/runtime/measure_rates.py '{"cores": "0-13", "threads": 14, "environment": {}}'

Prints MARK, and the rates as one line of JSON.  ``kept``: the rates are now in the user's cache.
``writable``: the cache's directory can be written.
"""

from __future__ import annotations

import json
import os
import sys

# The first entry is this file's directory, whose modules must not hide others, such as `settings`.
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
