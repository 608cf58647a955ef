"""What becomes of a Triton kernel in the compiler for Ascend: lowered without CANN, and the IR checked rule by rule.

=============  ===============================================================================================
``lower.py``   Triton IR -> linalg -> final HIVM, by the compiler's own stages
``mlir.py``    reads MLIR's generic form
``flow.py``    control flow, loops and data flow of a function
``source.py``  what the kernel says: polls, flags, masks, atomics
``hivm.py``    what the compiler made: transfers, barriers, locks, buffers, per kind of core
``rules.py``   what must hold between the two
=============  ===============================================================================================

``python -m moe_a2a.ascend_lint`` runs it; docs/ascend-lowering.md says what it shows and what it doesn't.
"""
