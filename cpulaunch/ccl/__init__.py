"""The process group ``ccl``: torch's collectives over oneCCL.

``register`` makes the name known to torch (an entry point that torch calls), ``create`` makes a group,
``load`` finds and loads the compiled part, ``build`` compiles it, ``installed`` says what is there without
importing torch.
"""
