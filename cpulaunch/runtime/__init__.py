"""What runs inside a rank, on top of torch: backend, bf16, data parallelism.

``settings`` reads what the launcher passes to a rank.  ``prepare`` makes models, optimizers and data loaders
ready. ``distributed`` and ``accumulate`` handle ranks and gradients. ``change`` holds everything that alters
a script, and ``observe`` everything that only watches it.  ``autoload`` installs both when a script imports
torch.
"""
