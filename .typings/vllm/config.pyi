class ParallelConfig:
    @property
    def nnodes_within_dp(self) -> int: ...

class VllmConfig:
    parallel_config: ParallelConfig
    @property
    def max_concurrent_batches(self) -> int: ...
