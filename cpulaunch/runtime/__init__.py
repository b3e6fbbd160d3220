"""What runs inside a rank, on top of torch: backend, bf16, data parallelism.

``settings`` reads what the launcher tells a rank, ``precision`` chooses one of the ``engines``, ``prepare``
makes models, optimizers and data loaders ready, ``distributed`` and ``accumulate`` are about ranks and
gradients, ``patches`` is for scripts that know nothing of cpulaunch.
"""
