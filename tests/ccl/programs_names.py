"""The names of the functions of `programs`, for tests that must not import torch."""

REDUCTIONS = (
    "all_reduce",
    "coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_uneven",
    "reduce_scatter_tensor",
)
MOVEMENTS = (
    "broadcast", "all_gather", "all_gather_uneven", "all_gather_into_tensor", "all_gather_in_place", "gather",
    "scatter", "all_to_all", "all_to_all_single", "all_to_all_single_equal", "send_recv", "recv_any",
)  # fmt: skip
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
DTYPES = (
    "float32", "bfloat16", "float64", "float16", "uint8", "int8", "int16", "int32", "int64", "bool", "complex64",
    "complex128",
)  # fmt: skip
NOT_FOR = {
    "bool": ("AVG",),
    "complex64": ("PRODUCT", "MIN", "MAX"),
    "complex128": ("PRODUCT", "MIN", "MAX"),
}
REDUCED = [(op, dtype) for op in OPS for dtype in DTYPES if op not in NOT_FOR.get(dtype, ())]
BITWISE = [
    (op, dtype) for op in ("BAND", "BOR", "BXOR") for dtype in ("uint8", "int8", "int16", "int32", "int64")
]
MOVED = (*DTYPES, "uint16", "uint32", "uint64", "float8_e4m3fn")
# With oneCCL, gloo carries messages, so these types are missing.  It can't receive 0 bytes from any source.
NOT_FOR_GLOO = ("uint16", "uint32", "uint64", "float8_e4m3fn", "int16", "complex64", "complex128")

# For `programs_state`: operations that complete in the background, and states of the caller at their start.
COMPLETIONS = (
    "all_reduce", "all_reduce, average", "all_reduce, scaled", "all_reduce, maximum", "all_reduce_coalesced",
    "reduce", "broadcast", "all_gather", "all_gather_coalesced", "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter", "reduce_scatter, average",
    "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all", "all_to_all_single", "barrier",
)  # fmt: skip
# The operations for which gloo returns a future.
COMPLETIONS_OF_GLOO = (
    "all_reduce", "all_reduce, maximum", "broadcast", "all_gather", "all_gather_coalesced",
    "all_gather_into_tensor", "gather", "scatter", "all_to_all_single", "barrier",
)  # fmt: skip
STATES = (
    "no_grad, parameter", "no_grad, view of a parameter", "inference_mode", "inference_mode, strided",
)  # fmt: skip
