"""Kernels for training steps on CPUs: a compiled library of torch operations, which replaces torch's own.

``load`` finds and loads the library; its C++ is in ``csrc``.  `cpulaunch.ccl.build` compiles it and
`cpulaunch.ccl.installed` finds it, as for the process group.  `cpulaunch.runtime.change.kernels` lets the
native engine use it.
"""
