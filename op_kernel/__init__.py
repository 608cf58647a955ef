"""Device side of moe_a2a: what runs on the device or core, framework-free, one file a phase. ``cpu/`` is C++."""
