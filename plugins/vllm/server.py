"""vLLM behind a pipe, the other side of client.py. A Python with vLLM, but without this project,
runs it as a script: PYTHON server.py FD FOLDER, with its connection to the run and the run's folder
in shared memory.

When the connection ends, vLLM and all its processes end, and their memory is free. A message is a
JSON object, with or without tensors or bytes after it.
"""

# pyright: reportAttributeAccessIssue=false
# (vllm is the package of another environment, and not this folder.)

import json
import os
import queue
import shutil
import signal
import socket
import struct
import sys
import threading
from typing import Any

import torch
from safetensors.torch import save

HEADER = struct.Struct("<IQ")  # bytes of the JSON, and of what comes after it
LONGEST = 1 << 30  # bytes of the JSON of a request: prompts


def send(connection: socket.socket, message: dict[str, Any], data: bytes = b"") -> None:
    """Send a message, followed by bytes."""
    text = json.dumps(message).encode()
    connection.sendall(HEADER.pack(len(text), len(data)) + text)
    connection.sendall(data)


def receive(connection: socket.socket, longest: int, most: int) -> tuple[dict[str, Any], bytes]:
    """Wait for a message of at most `longest` bytes, followed by at most `most` bytes.

    Raises: EOFError at the end; OSError; ValueError for a larger message, or an invalid one.
    """
    text, data = HEADER.unpack(_read(connection, HEADER.size))
    if text > longest or data > most:
        raise ValueError(f"a message of {text} + {data} bytes, where {longest} + {most} may come")
    message = json.loads(_read(connection, text))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message, _read(connection, data)


def _read(connection: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(buffer)


class Server:
    """The vLLM of one run. `version` is the version of the weights that answer."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.version, self.adapters = 0, 0
        self.llm: Any = None
        self.made = 0  # requests
        self.asleep = False

    def open(self, settings: dict[str, Any], version: int) -> dict[str, Any]:
        """Load the model."""
        from vllm import LLM

        self.llm, self.version = LLM(**settings), version
        return {"context_length": self.llm.model_config.max_model_len}

    def load(self, folder: str, version: int) -> dict[str, Any]:
        """Load the weights of a folder."""
        self._wake()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self.llm.collective_rpc(_repack_head)
        self.llm.reset_prefix_cache()
        return self.stamp(version)

    def stamp(self, version: int) -> dict[str, Any]:
        """Record the version of an adapter, which comes with the requests."""
        self.version = version
        return {}

    def rest(self, version: int) -> dict[str, Any]:
        """Free the device's memory until the next request: weights move to the host, keys and
        values are dropped.
        """
        self.llm.sleep(level=1)
        self.asleep = True
        return {}

    def _wake(self) -> None:
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False

    def generate(self, version: int, **work: Any) -> tuple[dict[str, Any], bytes]:
        """Complete prompts, in the order (adapter, prompt, sample), and report the number of
        finished rows from time to time.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        if version != self.version:
            raise ValueError(f"these are weights {self.version}, not {version}")
        self._wake()
        # Seeds of each request take a path that fails on CPUs when a request is put off.
        self.llm.collective_rpc(_seed, args=(work["seed"],))
        params = SamplingParams(
            n=work["samples"],
            ignore_eos=True,  # what ends a row is among the stop tokens
            stop_token_ids=work["stop"],
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **work["sampling"],
        )
        engine, places, made = self.llm.llm_engine, {}, {}
        for path in work["adapters"] or [None]:  # one per group
            chosen = None
            if path is not None:
                self.adapters += 1  # prompts are cached by the adapter's name
                chosen = LoRARequest(str(self.adapters), self.adapters, path)
            for prompt in work["prompts"]:
                self.made += 1
                places[str(self.made)] = len(places)
                ids = {"prompt_token_ids": prompt}
                engine.add_request(str(self.made), ids, params, lora_request=chosen)
        while engine.has_unfinished_requests():
            done = [output for output in engine.step() if output.finished]
            made |= {places[output.request_id]: output.outputs for output in done}
            if done:
                send(self.connection, {"finished": sum(len(output.outputs) for output in done)})
        rows = [row for place in sorted(made) for row in made[place]]
        logprobs = [
            held[token].logprob
            for row in rows
            for token, held in zip(row.token_ids, row.logprobs, strict=True)
        ]
        found = {
            "tokens": torch.tensor([t for row in rows for t in row.token_ids], dtype=torch.int64),
            "lengths": torch.tensor([len(row.token_ids) for row in rows]),
            "finished": torch.tensor([row.finish_reason == "stop" for row in rows]),
            "logprobs": torch.tensor(logprobs, dtype=torch.float32),
        }
        return {}, save(found)

    def answer(self, message: dict[str, Any]) -> None:
        """Do what a message requests, and answer it."""
        verbs: list[Any] = [self.open, self.load, self.stamp, self.generate, self.rest]
        try:
            do = {verb.__name__: verb for verb in verbs}[message.pop("do")]
            reply: Any = do(**message)
        except Exception as error:  # the run says it, and ends
            import traceback

            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        reply, beside = reply if isinstance(reply, tuple) else (reply, b"")
        send(self.connection, {"version": self.version, **reply}, beside)


def _repack_head(worker: Any) -> None:
    """Pack the output layer again: if it is tied to the embedding, vLLM 0.32 keeps the old packed
    copy, which CPUs use.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in worker.get_model().modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _seed(worker: Any, seed: int) -> None:
    """Seed the draws of a worker."""
    torch.manual_seed(seed)


def serve(connection: socket.socket, folder: str) -> None:
    """Answer messages until the connection ends, which ends this process and its children at once.

    Args: folder: the run's folder in shared memory, which is removed at the end.
    """
    # These are meant for the run, which has a step to finish.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    waiting: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        try:
            while True:
                waiting.put(receive(connection, LONGEST, 0)[0])
        except Exception as error:  # the run has gone, or sends what is no message
            print(f"the connection ends: {type(error).__name__}: {error}", flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=listen, daemon=True).start()
    send(connection, greet())
    server = Server(connection)
    while True:
        server.answer(waiting.get())


def greet() -> dict[str, Any]:
    """Import vLLM and send its version."""
    try:
        import vllm
    except Exception as error:  # whatever it is, the run says it
        return {"error": f"cannot import vllm: {type(error).__name__}: {error}"}
    return {"vllm": vllm.__version__, "python": sys.version.split()[0], "torch": torch.__version__}


def main() -> None:
    """Serve the connection of the command line."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    descriptor, folder = sys.argv[1:]
    serve(socket.socket(fileno=int(descriptor)), folder)


if __name__ == "__main__":
    main()
