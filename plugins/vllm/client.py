"""vLLM as an engine (conf/engine/vllm.yaml): another process samples from a copy of the weights.

    python launch.py ... engine=vllm engine.python=.vllm/bin/python

vLLM pins other versions of this project's packages, so it has a Python environment of its own and
is never imported here. The child (server.py) ends with this process, however that ends, and is
restarted once if it dies. Weights are passed as files in shared memory whenever they have changed,
only the adapter if only an adapter is trained, and every answer names the version of its weights.

A population is sampled as LoRA adapters, one per member: W + s sigma / sqrt(r) A B^T has the form
of an adapter (as in the method's authors' code for transformers); the float32 masters stay here.

Draws depend on the batch, so a run cannot be repeated to the bit.
"""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from common.config import ADAPTER, ConfigError, SamplingConfig
from common.device import count_parameters, device_of, dtype_of
from common.distributed import fingerprint, sharding_of
from common.engine import Completions, Population, Requests, Setup, Watch, check_prompts
from common.memory import Load, RowLimit
from common.model import Adapter, context_length, quantized, write_weights
from common.sampling import StopTexts
from plugins.vllm.link import INSTALL, EndedError, Link, writing

T = TypeVar("T")
log = logging.getLogger("clutch")

MOST_ROWS = 1024  # side by side; others wait
OVERHEAD_GB = 2.0  # of vLLM on a GPU, beside weights and cache: kernels, activations, graphs
HEAD = 4096  # bytes of an answer beside its numbers
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters that vLLM has room for


def open_vllm(
    setup: Setup,
    python: str | None,
    cache_gb: float,
    settings: dict[str, Any],
) -> "Vllm":
    """Open the engine (conf/engine/vllm.yaml). vLLM starts with the first call.

    Raises: ConfigError if it cannot work.
    """
    context = setup.context
    if python is None:
        raise ConfigError(
            "engine=vllm needs engine.python, the Python of an environment that has vLLM."
            f" {INSTALL}"
        )
    if sharding_of(setup.model).shared:
        raise ConfigError(
            "engine=vllm does not go with opt=fsdp: each rank gives whole weights to a vLLM of its"
            " own. Use engine=native, or opt=ddp."
        )
    if quantized.layers(setup.model):
        raise ConfigError(
            "engine=vllm does not go with model.quantize: it would hold the weights whole. Use"
            " engine=native, or leave out model.quantize."
        )
    if setup.members and setup.adapter is not None:
        raise ConfigError(
            "engine=vllm cannot sample from perturbed copies of an adapter: noise on the matrices"
            " of model.adapter is no adapter itself. Use engine=native, or leave it out."
        )
    if settings.get("enable_sleep_mode") and context.device.device.type != "cuda":
        raise ConfigError(
            "engine.settings.enable_sleep_mode has no effect on a CPU: vLLM lends the memory of a"
            " GPU. Leave it out."
        )
    tensor_parallel = settings.get("tensor_parallel_size", 1)
    if context.world_size > 1 and tensor_parallel != 1:
        raise ConfigError(
            f"engine.settings.tensor_parallel_size={tensor_parallel} does not go with"
            f" {context.world_size} ranks, each of which has a vLLM on its own device. Leave it"
            " out."
        )
    if setup.compile_mode is not None:
        raise ConfigError(
            "opt=compile has no effect with engine=vllm, which compiles by itself. Leave it out."
        )
    if cache_gb <= 0:
        raise ConfigError(f"engine.cache_gb={cache_gb} is too small. Give a value above 0.")
    path = context.out_dir / f"engine-{context.rank}.log"
    device, ranks = context.device.device, context.world_size
    link = Link(python, path, device, ranks)
    return Vllm(setup, link, cache_gb, settings)


class Vllm:
    """Samples from a copy of the model in a vLLM in another process."""

    populations = True
    reproducible = False
    separate = True
    asleep = False  # vLLM has given the device's memory back

    def __init__(self, setup: Setup, link: Link, cache_gb: float, settings: dict[str, Any]) -> None:
        self.link, self.cache_gb, self.settings = link, cache_gb, settings
        self.asking = threading.RLock()  # one thing at a time, as a run may sample beside training
        self.sleeps = bool(settings.get("enable_sleep_mode"))
        self.setup = replace(setup, model=None)  # `model` may be replaced, and is not to be kept
        self.model: Any = setup.model
        self.adapter = setup.adapter
        self.dtype = setup.autocast or dtype_of(self.model)
        self.context_length = context_length(self.model)
        self.row_limit = RowLimit("algo.rollout_rows", setup.rows, setup.floor)
        self.version = 0  # of what vLLM has
        self.sent: list[int] = []  # the fingerprint of the weights that it has
        self.sent_adapter: list[int] = []
        self.adapter_folder: str | None = None  # where it finds the adapter

    # --- weights

    def use(self, model: Any | None) -> None:
        """Take the weights of another model at the next `refresh`; None = hold no model."""
        self.model = model

    def refresh(self) -> None:
        """Send the weights that have changed since the last call; if only an adapter is trained,
        the adapter alone.
        """
        self.attempt_twice(self._send)

    def rest(self) -> None:
        """Let vLLM free the device's memory until the next call, if it may sleep."""

        def attempt() -> None:
            if self.link.running:
                self.ask("rest")

        if self.sleeps:
            self.attempt_twice(attempt)

    def close(self) -> None:
        """End vLLM."""
        self.link.end()

    def _start(self) -> None:
        """Start vLLM with the current weights, unless it runs."""
        if self.link.running:
            return
        self.version += 1
        self.sent, self.sent_adapter, self.adapter_folder = self._sum_up(), [], None
        with self.link.shared(self._bytes) as folder:
            self._write(folder)
            began = time.perf_counter()
            self.link.connect()
            self.ask("open", settings=self.choose_settings(str(folder)))
        log.info("vLLM is ready after %.0f s", time.perf_counter() - began)

    def _send(self) -> None:
        self._start()
        if self.adapter is not None:
            self._send_adapter()
        elif (now := self._sum_up()) != self.sent:
            self.version += 1
            with self.link.shared(self._bytes) as folder:
                self._write(folder)
                self.ask("load", folder=str(folder))
            self.sent = now

    def _send_adapter(self) -> None:
        assert self.adapter is not None
        if (now := fingerprint(self.adapter.parameters.values())) == self.sent_adapter:
            return
        self.version += 1
        folder = self.link.folder / f"adapter-{self.version % 2}"  # replaced at every other time
        with writing(folder):
            self.adapter.write(folder)
        self.adapter_folder = str(folder)
        self.ask("stamp")
        self.sent_adapter = now

    def _write(self, folder: Path) -> None:
        with writing(folder):
            write_weights(self.model, folder, self.read_weights())

    def _sum_up(self) -> list[int]:
        return fingerprint([*self.model.parameters(), *self.model.buffers()])

    def read_weights(self) -> dict[str, Tensor]:
        """Return the weights of the plain model, on the CPU in the dtype of sampling."""
        held = dict(self.model.state_dict())
        if self.adapter is not None:
            own = {n: t for n, t in held.items() if n not in self.adapter}
            held = {name.replace(".base_layer.", "."): tensor for name, tensor in own.items()}
        return {name: tensor.detach().to(self.dtype).cpu() for name, tensor in held.items()}

    @property
    def _held_bytes(self) -> float:
        """Return the bytes of vLLM's weights, cache, adapters and overhead."""
        adapters, rank = _find_slots(self.setup, self.adapter)
        slots = adapters * rank * _add_up_sides(self.model, self.adapter) * self.dtype.itemsize
        return self._bytes + slots + self.cache_gb * 2**30 + self._overhead

    @property
    def _overhead(self) -> float:
        return OVERHEAD_GB * 2**30 if self.setup.context.device.device.type == "cuda" else 0.0

    @property
    def _bytes(self) -> int:
        return count_parameters(self.model) * self.dtype.itemsize

    def choose_settings(self, folder: str) -> dict[str, Any]:
        """Return the settings of vLLM for this run. Raises: ConfigError."""
        ours: dict[str, Any] = {
            "model": folder,
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_num_seqs": min(self.setup.rows, MOST_ROWS),
            "kv_cache_memory_bytes": int(self.cache_gb * 2**30),
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",  # of the tempered distribution
        }
        adapters, rank = _find_slots(self.setup, self.adapter)
        if adapters:
            ours |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": adapters}
        device = self.setup.context.device
        # vLLM wants nearly all of a GPU by itself, and the trainer has some of it.
        if device.device.type == "cuda":
            share = self._held_bytes / 2**30 / device.memory_gb
            ours["gpu_memory_utilization"] = round(min(share, 0.95), 3)
        if own := sorted(ours.keys() & self.settings.keys()):
            raise ConfigError(
                f"engine.settings.{own[0]} has no effect: the run sets it. Leave it out."
            )
        usual = {
            "max_model_len": -1,  # as many tokens as the cache holds
            "enable_prefix_caching": True,
            "generation_config": "vllm",  # no defaults of the model's own
            "disable_log_stats": True,
        }
        return usual | self.settings | ours

    # --- sampling

    def generate(
        self, requests: Requests, sampling: SamplingConfig, watch: Watch | None = None
    ) -> Completions:
        """Sample completions with the weights of the last `refresh`.

        Raises: ConfigError if a prompt is empty or too long, if vLLM refuses, or if it has ended
        twice.
        """
        check_prompts(requests, sampling, self.model, self.context_length)
        of_rows, cuts = (list(requests.ids or ()), list(requests.begun or ())), asdict(sampling)
        del cuts["stop"]  # texts, and vLLM has tokens alone
        key = (requests.seed, requests.draw, requests.first_sample, *of_rows)
        work = {
            "prompts": [list(prompt) for prompt in requests.prompts],
            "samples": requests.samples,
            "stop": list(self.setup.stop_ids),
            "seed": int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "little"),
            "sampling": {"max_tokens": cuts.pop("max_new_tokens"), **cuts},
        }

        def attempt() -> bytes:
            if not self.link.running:
                self._send()
            with self.link.shared(self._bytes_of_members(requests)) as folder:
                work["adapters"] = self._adapters(requests, folder)
                return self.ask("generate", watch, most, **work)

        rows = requests.members * len(requests.prompts) * requests.samples
        most = rows * (12 * sampling.max_new_tokens + 16) + HEAD
        data = self.attempt_twice(attempt)
        with self.link.understanding():
            found = self._completions(check_answer(load(data), rows, sampling), requests, sampling)
        if self.setup.stops is not None:
            _cut(found, self.setup.stops, self.setup.pad_id)
        return found

    def _bytes_of_members(self, requests: Requests) -> int:
        """Return an upper bound of the bytes of a population's files."""
        if requests.population is None:
            return 0
        sides = _add_up_sides(self.model, self.adapter)
        names = 256 * sum(1 for _ in self.model.parameters())
        return requests.members * (sides * self.setup.noise_rank * self.dtype.itemsize + names)

    def _adapters(self, requests: Requests, folder: Path) -> list[str] | None:
        """Return the paths of the adapters to sample with, one per member; None = no adapters."""
        if requests.population is None:
            return [self.adapter_folder] if self.adapter_folder else None
        with writing(folder):
            write_members(requests.population, folder, self.dtype)
        return [f"{folder}/{member}" for member in range(requests.members)]

    def _completions(
        self, found: dict[str, Tensor], requests: Requests, sampling: SamplingConfig
    ) -> Completions:
        """Return the rows as padded tensors."""
        device, lengths = device_of(self.model), found["lengths"]
        columns = torch.arange(sampling.max_new_tokens)
        kept = columns < lengths[:, None]
        tokens = torch.full(kept.shape, self.setup.pad_id)
        tokens[kept] = found["tokens"]
        logprobs = torch.zeros(kept.shape)
        logprobs[kept] = found["logprobs"]
        broken = ~logprobs.isfinite().all(1)
        shown = logprobs.to(device) if requests.logprobs else None
        finished = found["finished"].to(device)
        return Completions(
            tokens.to(device), lengths.to(device), finished, shown, broken.to(device)
        )

    def attempt_twice(self, action: Callable[[], T]) -> T:
        """Return the result of an action, which is repeated with a new vLLM if vLLM has ended
        meanwhile.
        """
        with self.asking:
            try:
                return action()
            except EndedError:
                self.link.note_end()
                return self.attempt_twice(action)  # `fell` raises at the second time

    def ask(self, do: str, watch: Watch | None = None, most: int = 0, **message: Any) -> bytes:
        """Send a request. Returns the bytes after the answer, at most `most`. Raises: ConfigError
        if the answer is from other weights than those sent last.
        """
        wakes = do == "open" or (self.asleep and do in ("load", "generate"))
        if wakes and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # it can take only what PyTorch does not keep
        self.asleep = do == "rest" or (self.asleep and not wakes)
        asked = {"do": do, "version": self.version, **message}
        reply, data = self.link.ask(asked, watch=watch, most=most)
        with self.link.understanding():
            if reply["version"] != self.version:
                raise ValueError(f"vLLM has weights {reply['version']!r}, not {self.version}")
            length = int(reply.get("context_length", self.context_length))
            self.context_length = min(self.context_length, length)
        return data

    # --- the plan

    def peak_bytes(self, rows: int, load: Load) -> float:
        """Return the bytes of the engine's process on this machine, and of prompts and completions
        in this process. The cache of rows belongs to vLLM, which lets rows wait.
        """
        row = 8.0 * load.prompt_tokens + 12.0 * load.sampling.max_new_tokens
        if self.sleeps and not rows:
            return min(self._overhead, self._held_bytes)
        return self._held_bytes + rows * row


def _find_slots(setup: Setup, adapter: Adapter | None) -> tuple[int, int]:
    """Return the number of adapters that vLLM holds at a time, and their rank. Raises:
    ConfigError.
    """
    if adapter is None and not setup.members:
        return 0, 0
    rank = setup.noise_rank if adapter is None else adapter.rank
    room = next((room for room in RANKS if room >= rank), None)
    if room is None:
        raise ConfigError(
            f"engine=vllm has room for adapters of rank {RANKS[-1]} at most, not {rank}."
        )
    return max(1, setup.members), room


def _add_up_sides(model: Any, adapter: Adapter | None) -> int:
    """Return the sum of the rows and columns of all matrices that vLLM has adapters for; a tied
    output layer counts separately.
    """
    named = [(name, p.shape) for name, p in model.named_parameters() if p.ndim == 2]
    shapes = [shape for name, shape in named if adapter is None or name not in adapter]
    if model.config.tie_word_embeddings:
        shapes.append(model.get_input_embeddings().weight.shape)
    return sum(map(sum, shapes))


def check_answer(
    found: dict[str, Tensor], rows: int, sampling: SamplingConfig
) -> dict[str, Tensor]:
    """Return the answer. Raises: ValueError if it is not an answer of `rows` rows."""
    kinds = {"tokens": torch.int64, "lengths": torch.int64, "finished": torch.bool}
    kinds |= {"logprobs": torch.float32}
    lengths = found["lengths"]
    if (
        {name: tensor.dtype for name, tensor in found.items()} != kinds
        or (lengths < 0).any()
        or (lengths > sampling.max_new_tokens).any()
        or (found["tokens"] < 0).any()
        or [len(found[name]) for name in ("lengths", "finished")] != [rows, rows]
        or {len(found[name]) for name in ("tokens", "logprobs")} != {int(lengths.sum())}
        or any(tensor.ndim != 1 for tensor in found.values())
    ):
        raise ValueError(f"completions of {rows} rows were asked for, and these are none")
    return found


def write_members(population: Population, folder: Path, dtype: torch.dtype) -> None:
    """Write each member of a population as a LoRA adapter, in folders 0, 1, 2, ..."""
    assert population.factors is not None, "a population without factors"
    parts: list[dict[str, Tensor]] = [{} for _ in range(population.members)]
    rank, modules = 1, set()
    for name, left, right in population.factors():
        rank, module = left.shape[-1], name.removesuffix(".weight")
        modules.add(module.rsplit(".", 1)[-1])
        pairs = zip(left.to("cpu", dtype), right.to("cpu", dtype), strict=True)
        for part, (b, a) in zip(parts, pairs, strict=True):
            part[f"base_model.model.{module}.lora_A.weight"] = a.contiguous()
            part[f"base_model.model.{module}.lora_B.weight"] = b.contiguous()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    text = json.dumps(settings | {"target_modules": sorted(modules)})
    for number, part in enumerate(parts):
        place = folder / str(number)
        place.mkdir()
        (place / ADAPTER).write_text(text, encoding="utf-8")
        save_file(part, place / "adapter_model.safetensors")


def _cut(completions: Completions, stops: StopTexts, pad_id: int) -> None:
    """Cut completions after the first stop text, in place."""
    lengths = completions.lengths.tolist()
    for row, (tokens, length) in enumerate(zip(completions.tokens.tolist(), lengths, strict=True)):
        if (count := stops.find(tokens[:length])) is not None:
            completions.lengths[row], completions.finished[row] = count, True
            completions.tokens[row, count:] = pad_id
            if completions.logprobs is not None:
                completions.logprobs[row, count:] = 0.0
