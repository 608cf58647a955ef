"""Host side of a Triton rank: a rank whose rows are moved by the kernels of ``op_kernel/triton``.

It speaks the portable format of ``docs/protocol.md`` and pushes, so it shares groups with the CPU ranks of ``op_host/cpu``.

================  ==========================================================================================
``routing.py``    ids -> pairs in order; matrix -> final rows and the compact lists of work that kernels walk
``record.py``     records and combine cells as Python values
``peers.py``      waiting: launch again until it is there, a peer is lost, or time is up
``launch.py``     which kernel runs, on how many programs
``exchange.py``   the calls: TritonExchange
================  ==========================================================================================

Nothing here imports Triton until a group asks for a Triton rank.
"""
