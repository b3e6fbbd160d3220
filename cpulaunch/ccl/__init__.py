"""The process group ``ccl``: torch's collectives over shared memory, TCP and oneCCL.

``register`` makes the name known to torch (an entry point that torch calls), ``create`` makes a group,
``core`` calls the compiled core, ``load`` finds and loads what is compiled, ``build`` compiles it, and
``installed`` says what is there without importing torch.
"""
