"""An environment whose replies and rewards nobody can foresee, as those of a search or a clock."""

import os
from random import SystemRandom
from threading import Lock

CHANCE = SystemRandom()
LOCK = Lock()


class Chance:
    """With CHANCE_KILL=n the n-th reply of a process ends it, as kill -9 does."""

    components = {"luck": 0.0}  # noqa: RUF012 (each object sets its own)
    replies = 0

    def reset(self, seed):
        self.left = 3
        return f"go {seed}", {}

    def step(self, text):
        self.left -= 1
        reward, reply = CHANCE.random() / 3, f"{CHANCE.randrange(1000):03d}"
        self.components = {"luck": CHANCE.random()}
        with LOCK:
            Chance.replies += 1
            if Chance.replies == int(os.environ.get("CHANCE_KILL", 0)):
                os._exit(137)
        return reply, reward, self.left == 0, False, {}

    def teach(self, seed, draw):
        """Return a whole game."""
        asked = [f"go {seed}", *(f"{draw.randrange(1000):03d}" for _ in range(2))]
        return [
            {"role": role, "content": content}
            for text in asked
            for role, content in (("user", text), ("assistant", draw.choice("abcd")))
        ]
