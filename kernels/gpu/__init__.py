"""The operations in the Triton language, for NVIDIA GPUs. Imported only when CUDA tensors (or the interpreter) ask.

How to add an operation, say `swish`:

1. `kernels/gpu/swish.py` holds the `@triton.jit` kernels, the table of their tiles (data: block sizes, warps and stages
   by head size, dtype, …; no search at run time), the launching function, and `variants()`, which yields one
   `registry.Variant` for every row of the table as it is launched: argument types, constants, warps, stages.
2. `kernels/gpu/registry.py`: its name in `OPERATIONS`. Now `penjing info --kernels`, `tests/kernels/gpu/test_build.py`
   and `python -m penjing.kernels.gpu.build swish` compile it for sm_90 and list registers, spills and shared memory.
3. `kernels/swish.py` keeps the reference and the public function: `dispatch.gpu_kernels("swish", x)` is the module
   if `x` is on a GPU that can run it (`PENJING_KERNELS=torch` and `force_torch()` say no), else None.
4. `tests/kernels/gpu/test_swish.py` compares both: its `gpu_device` fixture is "cuda" where there is one, and otherwise
   "cpu" with the interpreter switched on and `force_triton_language()` around the test.

Rules: page ids and row offsets that can pass 2³¹ are int64 before they are multiplied; masked loads name `other`;
rows are independent of each other; INT8 rounds half to even and clamps. Under the interpreter bf16 is wrong (use fp16
and fp32) and blocks run one after another (races stay hidden), so keep its grids tiny.
"""
