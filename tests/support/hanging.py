"""Tasks whose reward does not come back, for worker processes: no torch is imported to unpickle
them.
"""

import os
import time

from tests.support.letters import Letters


class Deadly(Letters):
    """Ends its process at one example."""

    def reward(self, example, completion):
        if example.id == 5:
            os._exit(7)
        return 0.0


class Endless(Letters):
    """Is at it for ever."""

    def reward(self, example, completion):
        while True:
            time.sleep(0.01)
