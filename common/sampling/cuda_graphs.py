"""Record decode steps as CUDA graphs and replay them."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

from common.config import ConfigError
from common.device import is_out_of_memory


class CudaGraphs:
    """Decode steps over one set of buffers, recorded on the device and replayed with a single
    launch per step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # One memory pool for all recordings: no allocation of a step is used after it.
        self.pool = torch.cuda.graph_pool_handle()
        # Recordings by span of columns, or by other conditions of their validity.
        self.replays: dict[Hashable, Callable[[], None]] = {}

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record the kernels that `step` launches, without running them, and return a function that
        replays them. Raises: ConfigError if CUDA cannot record a kernel.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # Returns to this stream whatever happens; other threads, such as NCCL's, may use the
            # device meanwhile.
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(torch.cuda.current_stream(self.device)),
                self._capturing(graph),
            ):
                step()
        except RuntimeError as error:
            # If a step fails, the end of the recording fails too, and hides the first error.
            first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            text, full = str(first), is_out_of_memory(first) or is_out_of_memory(error)
            del first  # its traceback holds this frame: a cycle that would keep the cache alive
            if full:
                raise torch.OutOfMemoryError(text) from None
            raise ConfigError(
                "a decode step of this model cannot be recorded as a CUDA graph"
                f" ({text.splitlines()[0]}). Set engine.cuda_graphs=false: sampling is slower, and"
                " the same."
            ) from error
        return graph.replay

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record the kernels that are launched in the block."""
        capture = torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local")
        capture.__enter__()
        try:
            yield
        finally:
            try:
                capture.__exit__(None, None, None)
            except RuntimeError:
                if torch.__version__ < "2.13":
                    # There the allocator stays in recording mode, and the next `empty_cache`, which
                    # halving the rows needs, would fail (pytorch#180395).
                    index = self.device.index or 0
                    torch._C._cuda_endAllocateToPool(index, self.pool)
                    torch._C._cuda_releasePool(index, self.pool)
                raise
