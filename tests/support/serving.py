"""An environment of OpenEnv, its server, and a client of it: which number the seed is."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    number: str


class Told(Observation):
    text: str = ""


class Numbers(Environment[Guess, Told, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.number = seed or 0
        return Told(text="Which number?")

    def step(self, action: Guess, timeout_s=None, **more):
        right = action.number == str(self.number)
        return Told(text="Another one.", done=right, reward=float(right))

    @property
    def state(self):
        return State()


class Client(EnvClient[Guess, Told, State]):
    def _step_payload(self, action):
        return action.model_dump()

    def _parse_result(self, payload):
        seen = Told(**payload["observation"])
        return StepResult(seen, reward=payload["reward"], done=payload["done"])

    def _parse_state(self, payload):
        return State(**payload)


@contextmanager
def serving(sessions: int) -> Iterator[str]:
    """Serve in a thread. Yields the address."""
    app = create_app(Numbers, Guess, Told, max_concurrent_envs=sessions)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://localhost:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
