"""The process group ``ccl``: torch's collectives over shared memory, TCP and oneCCL.

``register`` is the entry point that registers the backend with torch.  ``create`` makes a group.  ``core``
calls the compiled core.  ``load`` finds and loads the compiled parts, and ``build`` compiles them.
``installed`` finds out what is installed without importing torch.
"""
