"""The parts of a run that trains a language model, opened once, in one order for every algorithm.

    parts = open_parts(run, context, task)
    parts.lm          the model with its tokenizer, adapter and precision
    parts.examples    the training examples in their order, and the held-out examples
    parts.engine      samples completions from the model
    parts.rollouter   requests, samples and scores the completions of examples
    parts.evaluator   measures on the held-out examples

All parts are frozen: no part writes into another one. In `parts.run`, settings that depend on the
length of prompts and answers have been filled in.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from common.config import ConfigError, Run
from common.distributed import Context
from common.engine import Engine, Setup, open_engine
from common.evaluation import Accepts, Evaluation, Evaluator, Extras, read_extras
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

# Rows of a rollout forward if algo.rollout_rows is null, before they are fitted to the memory.
ROLLOUT_ROWS = {"cpu": 256, "cuda": 1024}


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """The parts of a run. It is the Subject of its session (common/session.py)."""

    run: Run
    context: Context
    lm: LanguageModel
    # The run's task, wrapped so that its errors are reported (common.tasks.Checked).
    task: Any
    examples: Examples
    # The tasks of evaluate.also and the text of evaluate.text.
    extras: Extras
    # The origin of the number of steps, for the plan: " (2 epochs of 100 training prompts)".
    epochs: str
    scorer: Scorer
    # None between two stages of an algorithm that closes the engine to free its memory.
    engine: Any
    # Whether the same command reproduces the same numbers.
    reproducible: bool

    @cached_property
    def rollouter(self) -> Rollouter:
        """The Rollouter of the run's task, which samples and scores completions."""
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
        """The Evaluator of the run, which measures on the held-out examples."""
        return Evaluator(
            run=self.run,
            lm=self.lm,
            rollouter=self.rollouter,
            held_out=self.held_out,
            validation=self.examples.validation,
            extras=self.extras,
        )

    # --- the interface of a session's subject

    @property
    def name(self) -> str:
        """The path of the model, or the name of its configuration if it has no path."""
        return self.lm.name

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.lm.model

    @property
    def precision(self) -> Any:
        """The Precision of forward passes."""
        return self.lm.precision

    @property
    def held_out(self) -> list[Example]:
        """The examples that every evaluation measures on."""
        return self.examples.held_out

    @property
    def validator(self) -> Callable[[], Evaluation] | None:
        """Measures the headline on the validation examples, which choose the exported model; None
        if there are none, or if nothing depends on it.
        """
        run = self.run
        ends = getattr(run.algo, "patience", None) or run.evaluate.stop_at
        used = (run.keep == "best" or ends) and run.evaluate.every != 0
        return self.evaluator.validate if self.examples.validation and used else None

    @property
    def digests(self) -> dict[str, str]:
        """Hashes of the task's rows ("rows") and of the rows of evaluate.also and evaluate.text
        ("beside").
        """
        return {"rows": digest(self.task), "beside": self.extras.digest}

    def wake(self) -> None:
        """Start the engine if it runs in another process, and send it the current weights."""
        with self.lm.sharding.gathered():
            self.engine.refresh()

    def evaluate(self, accepts: Accepts | None = None) -> Evaluation:
        """Evaluate on all that the run's `evaluate` settings name. Every rank returns the same
        result.

        Args: accepts: decides which samples are right, for evaluate.samples; None = by
        task.right_at.
        Raises: RunStopped if the model's logits are NaN or infinite.
        """
        return self.evaluator.evaluate(accepts)

    def gather(self) -> dict[str, Tensor] | None:
        """Return the full weights of a sharded model for `export`, on rank 0; else None."""
        return self.lm.gather()

    def export(self, folder: Path, weights: dict[str, Tensor] | None) -> Path:
        """Write the model, or its adapter, into a folder below `folder`, and return that folder."""
        return self.lm.export(folder, weights)

    def close(self) -> None:
        """Stop the worker processes that score, and an engine that runs in another process."""
        self.scorer.close()
        if self.engine is not None:
            self.engine.close()

    # --- for plans

    @property
    def idle_bytes(self) -> float:
        """Bytes that the engine holds between two calls of `generate`."""
        return self.engine.peak_bytes(0, Load(1, self.run.algo.sampling))

    @property
    def room(self) -> int:
        """The most tokens that a completion can have after the longest prompt, within the context
        length.
        """
        left = context_length(self.lm.model) - self.examples.longest_prompt
        replies = self.examples.reply_tokens
        return (left - replies) // 2 if replies else left  # an episode has another turn

    def check_sessions(self, episodes: int, sizes: str) -> None:
        """Check that the environment server allows as many sessions as all ranks play episodes at a
        time.

        It concerns task.settings.base_url; servers of OpenEnv allow one session unless configured
        otherwise.
        Args:
            episodes: the episodes that this rank plays in one call.
            sizes: the settings that determine this number, for the error message.
        Raises: ConfigError if the server refuses a session.
        """
        task: Any = self.task.own
        held_out = self.context.share(self.held_out)
        if self.context.device.planned or "base_url" not in getattr(task, "settings", ()):
            return
        each = max(self.run.evaluate.samples or 1, self.run.evaluate.repeats)
        evaluated = len(held_out) * each, "evaluate.examples"
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
    noise_rank: int = 1,
    floor: int | None = None,
    reference: bool = False,
    read: Callable[[Run, LanguageModel, Any], Examples] = read_examples,
    check: Callable[[Run, Context, Any], None] | None = None,
) -> Parts:
    """Open the parts of a run: task, model, examples, engine.

    Args:
        task: the task; None = the one that the run's configuration names.
        population: the number of perturbed copies of the weights, which are trained without
            backward passes and whose rows may come in mirrored pairs; 0 = none.
        noise_rank: the rank of the population's noise.
        floor: the fewest rows of a forward that make sense; None = 2 for a population, whose rows
            may come in mirrored pairs, else 1.
        reference: whether to keep a frozen copy of the initial model.
        read: chooses the examples.
        check: raises ConfigError for a task that the algorithm cannot use. It is called before the
            model is loaded, since a tiny one is pre-trained first.
    Raises: ConfigError for a model, a task or settings that cannot work.
    """
    checked: Any = Checked(task or build(run.task))
    if check is not None:
        check(run, context, checked)
    lm = load(run, context, checked, population=population, reference=reference)
    adapt_task(lm, checked, run.task, task is None)
    if not run.algo.sampling.max_new_tokens:
        sampling = replace(run.algo.sampling, max_new_tokens=longest_answer(lm, checked))
        run = replace(run, algo=replace(run.algo, sampling=sampling))  # checks the settings again
    extras = read_extras(run, lm)
    examples = read(run, lm, checked)
    algo, epochs = run.algo.in_steps(len(examples.order.examples))
    counted = replace(run.evaluate, validation_examples=len(examples.validation))
    run = replace(run, algo=algo, evaluate=counted if algo.chooses else run.evaluate)
    # The steps of an algorithm in stages are iterations.
    steps = getattr(algo, "steps", None) or getattr(algo, "iterations", None)
    scorer = Scorer(checked.own, run.scoring, steps)
    engine = open_sampler(run, lm, noise_rank=noise_rank, floor=floor)
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
        extras=extras,
        epochs=epochs,
        scorer=scorer,
        engine=engine,
        reproducible=engine.reproducible,
    )


def open_sampler(
    run: Run, lm: LanguageModel, copied: Any = None, noise_rank: int = 1, floor: int | None = None
) -> Engine:
    """Open the run's engine for a model.

    Args:
        copied: a copy of the model to sample from, in the compute dtype; None = the model itself.
        noise_rank: the rank of a population's noise.
        floor: the fewest rows of a forward, as in `open_parts`.
    """
    compiled, stop = run.opt.compile, run.algo.sampling.stop
    # The weights of a population and of a copy are already in the compute dtype.
    casts = lm.half and not lm.population and copied is None
    setup = Setup(
        model=lm.model if copied is None else copied,
        context=lm.context,
        adapter=lm.adapter,
        pad_id=lm.tokenizer.pad_token_id,
        stop_ids=lm.stop_ids,
        rows=run.algo.rollout_rows or ROLLOUT_ROWS[lm.device.type],
        floor=floor or (2 if lm.population else 1),
        compile_mode=compiled.mode if compiled.enabled else None,
        autocast=lm.precision.compute if casts else None,
        stops=StopTexts(stop, lm.decode) if stop else None,
        members=lm.population,
        noise_rank=noise_rank,
    )
    return open_engine(run.engine, setup)
