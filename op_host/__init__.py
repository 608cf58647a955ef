"""Host side of moe_a2a: where every byte of a window is, how work is cut, who owns the memory, how kernels are launched.

=================  ==========================================================================================
``layout.py``      the window layout and the records, byte by byte, as data that every kernel is handed
``tiling.py``      how work is cut for a target: wait policy, store kind, thresholds
``window.py``      memfd windows: create, pass between processes, map, prefault
``transport.py``   probe, describe, agree, choose
``native.py``      the compiled library as seen from Python: control calls, failures
``ascend/``        Triton kernels lowered for Ascend without CANN, and the rules their IR is checked by
``cpu/``           C++: the group object and the torch bindings of the CPU kernels
=================  ==========================================================================================
"""
