"""The task sets of verifiers (0.4). Each task is an episode of one turn. Its own methods score the
text of an answer in this process, without a runtime, an endpoint or a server of tools.
"""

import inspect
import logging
from typing import Any

from common.config import ConfigError
from common.task import Example, Messages
from common.tasks import Row, wait, wording
from plugins.environments.adapters import Adapter, as_messages, scaled

log = logging.getLogger("clutch")


class TaskSet:
    """The tasks of a task set; a row names its task by the place in the set.

    Args:
        factory: the class of the task set.
        settings: the settings of its config.
        most: the most tasks that are read.
    Attributes: components: the metrics of a task.
    Raises: ConfigError for tasks that need more than the text of an answer.
    """

    def __init__(self, factory: Any, settings: dict[str, Any], most: int) -> None:
        from verifiers.v1 import Taskset, TasksetConfig
        from verifiers.v1.utils.generic import concrete_type

        self.__name__ = name = factory.__name__
        config_type = concrete_type(factory, TasksetConfig, origin=Taskset) or TasksetConfig
        with wording(f"{name}.load", f", with task.settings={settings}"):
            config = config_type(**settings)
            self.tasks = list(factory(config).take(most))
            needs = ["a server of tools"] * bool(factory.toolsets(config))
            needs += [need for task in self.tasks for need in list_needs(task)]
        if needs or not self.tasks:
            raise ConfigError(
                f"task.factory: the task set {name} {f'needs {needs[0]}' if needs else 'is empty'}."
                " Give one whose tasks score the text of an answer: docs/environments.md."
            )
        rewards, metrics = (self.tasks[0].hooks(kind) for kind in ("reward", "metric"))
        if skipped := [one.__name__ for one in (*rewards, *metrics) if needs_runtime(one)]:
            log.warning(
                "%s: left out, as they need a runtime: %s. What reads them, such as a reward, sees"
                " nothing, or 0.",
                *(name, ", ".join(skipped)),
            )
        self.components = {one.__name__: 0.0 for one in metrics if not needs_runtime(one)}
        self.rows = [Row(f"task {n} of {name}", {"place": n}) for n in range(len(self.tasks))]

    def __call__(self, extras: dict[str, int] | None = None, **settings: Any) -> Any:
        """Return the task of a row, or the first one."""
        return self.tasks[extras["place"] if extras else 0]


class Answer(Adapter):
    """An episode in which a task scores the first answer (common.tasks.episode.Episode)."""

    trace: Any = None  # once there is an answer that was not cut off

    def start(self, example: Example, seed: int) -> Messages:
        """Return the system prompt of the task, if it has one, and its prompt."""
        data = self.environment.data
        asked = data.prompt if isinstance(data.prompt, str) else [dict(one) for one in data.prompt]
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        self.prompt = [*system, *as_messages(asked)]
        return self.prompt

    def reply(self, message: dict[str, Any]) -> Messages | None:
        """Score the answer."""
        from verifiers.v1 import AgentConfig, AgentInfo, MessageNode, Trace, TraceTask
        from verifiers.v1.state import state_cls

        task = self.environment
        said = [*self.prompt, {"role": "assistant", "content": message["content"]}]
        self.trace = Trace(
            task=TraceTask(type=self.name, data=task.data, key=task.key, hash=task.hash),
            agent=AgentInfo(config=AgentConfig()),
            state=state_cls(type(task))(),
            nodes=[
                MessageNode(message=one, parent=n - 1 if n else None, sampled=one is said[-1])
                for n, one in enumerate(said)
            ],
        )
        wait(task.score(self.trace), task)
        return None

    def reward(self) -> float | None:
        """Return the weighted sum of the rewards; 0 if the answer was cut off."""
        if self.trace is None:
            return 0.0
        rewards = self.trace.rewards.values()
        return None if None in rewards else scaled(self.name, self.trace.reward, self.scale)

    def components(self) -> dict[str, float]:
        """Return the metrics."""
        metrics = {} if self.trace is None else self.trace.metrics
        return {name: float(value) for name, value in metrics.items() if value is not None}


def needs_runtime(hook: Any) -> bool:
    """Return whether `Task.score` omits a method if there is no runtime."""
    runtime = inspect.signature(hook).parameters.get("runtime")
    return runtime is not None and runtime.default is runtime.empty


def list_needs(task: Any) -> list[str]:
    """Return the requirements of a task that are not met in this process."""
    from verifiers.v1 import Task

    kind, prompt = type(task), task.data.prompt
    contents = [one.content for one in prompt] if isinstance(prompt, list) else [prompt]
    prepared = kind.setup is not Task.setup or kind.finalize is not Task.finalize
    needs = {
        "a container": kind.NEEDS_CONTAINER or task.data.image,
        "a runtime, for setup() or finalize()": prepared,
        "a runtime, for all of its rewards": all(map(needs_runtime, task.hooks("reward"))),
        "an endpoint, for its judges": task.config.judges,
        "a server of tools": kind.toolsets(task.config),
        "a prompt that is text": any(not isinstance(content, str) for content in contents),
    }
    return [need for need, there in needs.items() if there]
