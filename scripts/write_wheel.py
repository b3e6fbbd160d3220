"""Writes a wheel with parts of the process group ccl; scripts/build_wheels.sh runs this script.

write_wheel.py core MACHINE OUT COMPILER...      compiles the core with that command
write_wheel.py layer OUT                         packs the layer and the kernels built for this Python
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cpulaunch.ccl import installed
from cpulaunch.ccl.compiler import build_core_elsewhere
from cpulaunch.ccl.wheel import write_wheel

OLDEST_GLIBC = "2_28"


def main(kind: str, *arguments: str) -> None:
    if kind == "layer":
        there = installed.state()
        layer, kernels = there.part("layer"), there.part("kernels")
        assert layer is not None
        assert kernels is not None
        print(write_wheel([layer, kernels], Path(arguments[0])))
        return
    machine, out, *command = arguments
    with tempfile.TemporaryDirectory() as directory:
        part = build_core_elsewhere(command, machine, Path(directory))
        platform = f"manylinux_{OLDEST_GLIBC}_{machine}"
        print(write_wheel([part], Path(out), package=installed.PACKAGES[1], platform=platform))


if __name__ == "__main__":
    main(*sys.argv[1:])
