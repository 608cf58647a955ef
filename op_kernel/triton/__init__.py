"""The Triton backend's device side: one source for Ascend (triton-ascend 3.2), NVIDIA and AMD (triton 3.9 and later).

Framework-free: nothing here imports torch. ``words`` numbers what kernels are handed, ``signal`` has codes and polls, and each
phase has a file: ``begin``, ``record``, ``push``, ``take``, ``experts``, ``give``, ``combine``, ``wave``; ``fused`` puts them
into one launch, ``catalogue`` lists every kernel as it is compiled.
"""
