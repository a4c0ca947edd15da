"""The test tools of kvtier, for tiers written elsewhere, too: shipped, so that all prove the same promises.

`virtual_time` and `faults` need nothing but kvtier; only `conformance` needs pytest (the extra `kvtier[test]`).
"""
