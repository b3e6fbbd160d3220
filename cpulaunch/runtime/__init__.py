"""What runs inside a rank, on top of torch: backend, bf16, data parallelism.

``settings`` reads what the launcher tells a rank, ``prepare`` makes models, optimizers and data loaders
ready, ``distributed`` and ``accumulate`` are about ranks and gradients.  ``change`` holds all that alters a
script, ``observe`` what only watches it; ``autoload`` installs both when a script imports torch.
"""
