"""The parts of a run that trains a language model, opened once, in one order for every algorithm.

    parts = open_parts(run, context, task)
    parts.lm          the model with its tokenizer, adapter and precision
    parts.examples    which examples are trained on, in which order, and which are held out
    parts.engine      samples completions from the model
    parts.rollouter   requests, samples and scores the completions of examples
    parts.evaluator   measures on the held-out examples

All are frozen: nobody writes into another's object. `parts.run` is the run with the lengths that
were open until the prompts were known.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from common.config import ConfigError, Run
from common.distributed import Context, fsdp
from common.engine import Engine, Setup, open_engine
from common.evaluation import Accepts, Beside, Evaluation, Evaluator, read_beside
from common.examples import Examples, adapt_task, longest_answer, read_examples
from common.language_model import LanguageModel, load
from common.memory import Load
from common.model import context_length
from common.rollout import Rollouter
from common.sampling import StopTexts
from common.scoring import Scorer
from common.task import Example, Task, build, digest
from common.tasks import Checked

log = logging.getLogger("clutch")

# Rows of a rollout forward where algo.rollout_rows is null, before they are fitted to the memory.
ROLLOUT_ROWS = {"cpu": 256, "cuda": 1024}


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """The parts of a run. It is the Subject of its session (common/session.py)."""

    run: Run
    context: Context
    lm: LanguageModel
    # The run's task, whose mistakes are reported (common.tasks.Checked).
    task: Any
    examples: Examples
    # The tasks of evaluate.also and the text of evaluate.text.
    beside: Beside
    # Where the number of steps comes from, for the plan: " (2 epochs of 100 training prompts)".
    epochs: str
    scorer: Scorer
    # None between two stages of an algorithm that gives its memory back.
    engine: Any
    # Whether the same command gives the same numbers.
    reproducible: bool

    @cached_property
    def rollouter(self) -> Rollouter:
        """Samples and scores completions of the run's task."""
        return Rollouter(
            task=self.task,
            tokenizer=self.lm.tokenizer,
            decode=self.lm.decode,
            engine=self.engine,
            scorer=self.scorer,
            seed=self.run.seed,
            sampling=self.run.algo.sampling,
            turns=self.examples.turns,
        )

    @cached_property
    def evaluator(self) -> Evaluator:
        """Measures on the held-out examples."""
        return Evaluator(
            run=self.run,
            lm=self.lm,
            rollouter=self.rollouter,
            held_out=self.held_out,
            beside=self.beside,
        )

    # --- what a session asks of its subject

    @property
    def name(self) -> str:
        """The path of the model, or its name."""
        return self.lm.name

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.lm.model

    @property
    def precision(self) -> Any:
        """The dtype of forward passes."""
        return self.lm.precision

    @property
    def held_out(self) -> list[Example]:
        """The examples that every evaluation measures on."""
        return self.examples.held_out

    @property
    def digests(self) -> dict[str, str]:
        """Hashes of the task's rows, and of what is measured in addition to them."""
        return {"rows": digest(self.task), "beside": self.beside.digest}

    def wake(self) -> None:
        """Start an engine that runs in another process, with the weights as they are."""
        with fsdp.gathered(self.lm.model):
            self.engine.refresh()

    def evaluate(self, accepts: Accepts | None = None) -> Evaluation:
        """Measure all that the run asks for on held-out examples; every rank returns the same.

        Args: accepts: which samples are right, for evaluate.samples.
        Raises: RunStopped where the model's logits are NaN or infinite.
        """
        return self.evaluator.evaluate(accepts)

    def gather(self) -> dict[str, Tensor] | None:
        """Return the weights that `export` writes, of a sharded model, on rank 0."""
        return self.lm.gather()

    def export(self, folder: Path, weights: dict[str, Tensor] | None) -> Path:
        """Write the model, or its adapter, below `folder`. Returns where it is."""
        return self.lm.export(folder, weights)

    def close(self) -> None:
        """End the workers that score, and an engine in another process."""
        self.scorer.close()
        if self.engine is not None:
            self.engine.close()

    # --- what plans ask

    @property
    def idle_bytes(self) -> float:
        """The bytes that the engine holds while nobody samples."""
        return self.engine.peak_bytes(0, Load(1, self.run.algo.sampling))

    @property
    def room(self) -> int:
        """The most tokens that a completion can have behind the longest prompt."""
        left = context_length(self.lm.model) - self.examples.longest_prompt
        replies = self.examples.reply_tokens
        return (left - replies) // 2 if replies else left  # an episode has another turn

    def check_sessions(self, episodes: int, sizes: str) -> None:
        """Check that the server of task.settings.base_url allows as many sessions as all ranks play
        episodes at a time; servers of OpenEnv allow one unless configured otherwise.

        Args: episodes: of this rank in a call; sizes: the settings that make them as many.
        Raises: ConfigError if the server refuses one of them.
        """
        task: Any = self.task.own
        held_out = self.context.share(self.held_out)
        if self.context.device.planned or "base_url" not in getattr(task, "settings", ()):
            return
        evaluated = len(held_out) * (self.run.evaluate.samples or 1), "evaluate.examples"
        most, sizes = max((episodes, sizes), evaluated)
        example, opened = self.held_out[0], []
        try:
            for _ in range(most):
                episode = task.episode(example)
                episode.start(example, example.extra["seed"])
                opened.append(episode)
        except ConfigError as error:
            if "CAPACITY_REACHED" not in str(error):
                raise
        counts = self.context.gather_objects((len(opened), most))  # while all ranks hold theirs
        for episode in opened:
            episode.close()
        allowed, wanted = (sum(column) for column in zip(*counts, strict=True))
        if allowed < wanted:
            raise ConfigError(
                f"the server of task.settings.base_url={task.settings['base_url']} has {allowed}"
                f" free sessions, and this run plays {wanted} episodes at a time. Start it with"
                f" max_concurrent_envs={wanted} or more, or lower {sizes}."
            )


def open_parts(
    run: Run,
    context: Context,
    task: Task | None = None,
    *,
    population: int = 0,
    rank: int = 1,
    reference: bool = False,
    read: Callable[[Run, LanguageModel, Any], Examples] = read_examples,
) -> Parts:
    """Open the parts of a run: task, model, examples, engine.

    Args:
        task: None = the one that the run names.
        population: how many perturbed copies of the weights there are, which never see a backward
            pass, and whose rows may come in mirrored pairs; rank: of their noise.
        reference: keep a frozen copy of the model.
        read: chooses the examples.
    Raises: ConfigError for a model, a task or settings that cannot work.
    """
    checked: Any = Checked(task or build(run.task))
    lm = load(run, context, checked, population=population, reference=reference)
    adapt_task(lm, checked, run.task, task is None)
    if not run.algo.sampling.max_new_tokens:
        sampling = replace(run.algo.sampling, max_new_tokens=longest_answer(lm, checked))
        run = replace(run, algo=replace(run.algo, sampling=sampling))  # which checks them again
    beside = read_beside(run, lm)
    examples = read(run, lm, checked)
    algo, epochs = run.algo.in_steps(len(examples.order.examples))
    run = replace(run, algo=algo)
    # The steps of an algorithm in stages are iterations.
    steps = getattr(algo, "steps", None) or getattr(algo, "iterations", None)
    scorer = Scorer(checked.own, run.scoring, steps)
    engine = open_sampler(run, lm, rank=rank)
    if population and not engine.populations:
        raise ConfigError(
            f"{run.engine['_target_']} cannot sample from perturbed copies of a model, which"
            f" algo={algo.name} needs. Use engine=native."
        )
    return Parts(
        run=run,
        context=context,
        lm=lm,
        task=checked,
        examples=examples,
        beside=beside,
        epochs=epochs,
        scorer=scorer,
        engine=engine,
        reproducible=engine.reproducible,
    )


def open_sampler(run: Run, lm: LanguageModel, copied: Any = None, rank: int = 1) -> Engine:
    """Open the run's engine for a model.

    Args: copied: a copy of the model to sample from, in the compute dtype; None = the model itself;
    rank: of a population's noise.
    """
    compiled, stop = run.opt.compile, run.algo.sampling.stop
    # A population's weights, and those of a copy, are in the compute dtype themselves.
    casts = lm.half and not lm.population and copied is None
    setup = Setup(
        model=lm.model if copied is None else copied,
        context=lm.context,
        adapter=lm.adapter,
        pad_id=lm.tokenizer.pad_token_id,
        stop_ids=lm.stop_ids,
        rows=run.algo.rollout_rows or ROLLOUT_ROWS[lm.device.type],
        floor=2 if lm.population else 1,
        compile_mode=compiled.mode if compiled.enabled else None,
        autocast=lm.precision.compute if casts else None,
        stops=StopTexts(stop, lm.decode) if stop else None,
        members=lm.population,
        rank=rank,
    )
    return open_engine(run.engine, setup)
