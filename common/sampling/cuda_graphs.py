"""Record decode steps as CUDA graphs and replay them."""

from collections.abc import Callable

import torch

from common.config import ConfigError


class CudaGraphs:
    """Decode steps over one set of buffers, recorded on the device and replayed with a single
    launch.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # One pool for all: what a step allocates is not used after it.
        self.pool = torch.cuda.graph_pool_handle()
        self.made: dict[tuple[int, int], Callable[[], None]] = {}  # by window

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record the kernels that `step` launches, without running them, and return what replays
        them. Raises: ConfigError where CUDA refuses one.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, NCCL's for one, may go on using the device.
            # and back to it, whatever happens
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(torch.cuda.current_stream(self.device)),
                torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
            ):
                step()
        except RuntimeError as error:
            # Where a step fails, the end of the recording fails too, and hides why.
            first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            raise ConfigError(
                "a decode step of this model cannot be recorded as a CUDA graph"
                f" ({str(first).splitlines()[0]}). Set hardware.cuda_graphs=false: sampling is"
                " slower, and the same."
            ) from first
        return graph.replay
