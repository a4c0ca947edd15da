"""What tests of kvtier, and of tiers written elsewhere, stand on: shipped, so that all prove the same promises.

`virtual_time` and `faults` need nothing but kvtier; only `conformance` needs pytest (the extra `kvtier[test]`).
"""
