"""Record decode steps as CUDA graphs and replay them."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

from common.config import ConfigError
from common.device import is_out_of_memory


class CudaGraphs:
    """Decode steps over one set of buffers, recorded on the device and replayed with a single
    launch.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # One pool for all: what a step allocates is not used after it.
        self.pool = torch.cuda.graph_pool_handle()
        # By span of columns, or by what else a recording is bound to.
        self.replays: dict[Hashable, Callable[[], None]] = {}

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record the kernels that `step` launches, without running them, and return what replays
        them. Raises: ConfigError where CUDA refuses one.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # Back on this stream whatever happens; other threads, NCCL's for one, may go on using
            # the device.
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(torch.cuda.current_stream(self.device)),
                self._capturing(graph),
            ):
                step()
        except RuntimeError as error:
            # Where a step fails, the end of the recording fails too, and hides why.
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
        """Record what is launched in the block."""
        capture = torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local")
        capture.__enter__()
        try:
            yield
        finally:
            try:
                capture.__exit__(None, None, None)
            except RuntimeError:
                if torch.__version__ < "2.13":
                    # There its allocator would go on as if it recorded, and the next `empty_cache`
                    # fail on that, which halving the rows needs (pytorch#180395).
                    index = self.device.index or 0
                    torch._C._cuda_endAllocateToPool(index, self.pool)
                    torch._C._cuda_releasePool(index, self.pool)
                raise
