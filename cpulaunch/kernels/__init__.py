"""Compiled operations that replace torch's own in training steps on CPUs.

``load`` loads the library; its C++ source is in ``csrc``.  `cpulaunch.ccl.build` compiles it, and
`cpulaunch.ccl.installed` finds it.  `cpulaunch.runtime.change.kernels` enables it for the native engine.
"""
