"""What runs inside a rank, on top of torch: backend, bf16, data parallelism.

``planned`` reads what the launcher planned, ``precision`` chooses the engine, ``native`` and ``ipex`` are the
engines, ``prepare`` makes models, optimizers and data loaders ready, ``distributed`` and ``accumulate`` are
about ranks and gradients, ``redirect`` is for scripts that know nothing of cpulaunch.
"""
