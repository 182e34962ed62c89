"""The stages of an iteration of RFT, each on what lies in the run folder."""

import functools
import gc
import itertools
import json
import logging
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from common import hardware, loop, optim, precision, resume
from common.config import BudgetConfig, ConfigError, Run
from common.distributed import fsdp
from common.distributed.context import Context
from common.evaluation import Evaluation, evaluate
from common.files import problem, write_text
from common.model import logprobs
from common.model.export import export_model
from common.model.half import narrowed
from common.model.prompts import context_length, encode_prompts, stop_ids
from common.nonfinite import NotFinite
from common.report import page, summary
from common.report.events import events
from common.report.tracker import Tracker
from common.sampling.native import Sampler
from common.signals import EXIT_NUMBERS, EXIT_SIGNAL, RunStopped
from common.tasks import Example, Task
from common.tasks.scoring import Scorer
from rft.config import STAGES, RftConfig
from rft.evaluate import pass_rates
from rft.finetune import Finetuner, Tree, check_lora
from rft.generate import (
    Generator,
    Record,
    Store,
    check_same,
    made_with,
    merged,
    missing,
    shard_counts,
    shard_path,
)
from rft.plan import fitted, plan
from rft.prompts import split
from rft.select import Selection, select

log = logging.getLogger("clutch")

MANY_CUT = 0.1  # share of samples cut off that is worth a warning


class Stages:
    """The stages of an iteration. Each finds what it needs in the run folder, and leaves what it
    made there.
    """

    def __init__(self, run: Run, context: Context, task: Task) -> None:
        self.run, self.context, self.task = run, context, task
        self.settings: RftConfig = run.algo
        self.numbers = precision.resolve(run.opt, context.device.device)
        self.model: Any
        self.model, self.tokenizer = loop.load(run, task, context)
        self.loaded = 0  # the iteration whose model that is; 0 = the base
        self._prepare()
        index, of = self.settings.part()
        # Shards run side by side in one folder, so each has its own log.
        self.written = (
            context.out_dir / f"shard-{index}-of-{of}" if self.settings.shard else context.out_dir
        )
        self.written.mkdir(exist_ok=True)
        self.prompts = split(run, task, self.tokenizer, context_length(self.model))
        self._check_folder()
        rows, batch, peak = fitted(
            run, context, self._sampler(self.model), self.prompts.longest, self.numbers
        )
        self.sizes = _Sizes(self.written, context.main, rows, batch)
        if context.main:
            plan(
                run,
                context,
                task,
                self.model,
                self.prompts,
                self.numbers,
                self.sizes["micro_batch_rows"],
                peak,
            )
        self.scorer = Scorer(task, run.scoring)
        self._check_training()
        self.stop: Any = None
        self.traced: Any = None
        if context.main and self.settings.stage == "all":
            self._reopen()
        context.barrier()
        self.events = self._logged()
        context.barrier()  # no rank reads the log after rank 0 has begun to write it
        self.seconds: Counter[int] = Counter()  # by iteration
        for event in self.events:
            self.seconds[event["iteration"]] += event.get("seconds", 0.0)
        counted = ("generated_tokens", "reward_evaluations")
        self.unusual = NotFinite(
            run, context, max((event.get("skipped_steps", 0) for event in self.events), default=0)
        )
        self.used = {
            key: max((event.get(key, 0) for event in self.events), default=0) for key in counted
        }
        self.step = len(self.events)
        self.tracker: Tracker | None = None
        if context.main:
            saved = self.written / "tracker.json"
            self.tracker = Tracker(run, self.written, None, self.step, _read(saved))
            _write(saved, self.tracker.state())

    # --- the stages

    def generate(self, iteration: int) -> None:
        """Fill this run's shard of samples."""
        settings, context, folder = self.settings, self.context, self._folder(iteration)
        index, of = settings.part()
        mine = self.prompts.of(iteration, settings.prompts)[index - 1 :: of]
        if self._finished(iteration):
            return
        if settings.select.buffer == "all":
            for earlier in range(1, iteration):
                self._samples(earlier)  # they will be needed: found missing now, not after hours
        if shard_counts(folder) - {of}:
            self._samples(iteration)  # made in other shards, whole or an error
            return
        store = self._store(shard_path(folder, index, of), iteration)
        self._as_logged(store, iteration)
        if not missing(mine, store.held, settings) or self._cut(iteration):
            return
        sampler = self._sampler(self._at(iteration - 1))
        generator = Generator(
            self.run,
            context,
            self.task,
            self.tokenizer,
            self.scorer,
            self.sizes["micro_batch_rows"],
        )
        done = 0

        def begin(name: str, samples: int) -> None:
            nonlocal done
            done = 0
            self._begin(f"iteration {iteration}, {name} samples", samples, 0, "sample")

        def seen(
            fresh: list[Record], sampling: float, seconds: float, phases: dict[str, float]
        ) -> bool:
            nonlocal done
            done += len(fresh)
            held = store.held
            prompts = {record["prompt"] for record in held.values()}
            solved = {record["prompt"] for record in held.values() if record["accepted"]}
            generated, accepted = (
                sum(len(r["tokens"]) for r in fresh),
                sum(r["accepted"] for r in fresh),
            )
            memory = hardware.peak_memory_gb(context.device.device)
            self.used["generated_tokens"] += generated
            self.used["reward_evaluations"] += len(fresh)
            self._log(
                {
                    "stage": "generate",
                    "iteration": iteration,
                    "round": fresh[0]["round"],
                    "seconds": seconds,
                    "phase_seconds": phases,
                    "reward": sum(record["reward"] for record in fresh) / len(fresh),
                    "accepted": accepted / len(fresh),
                    "prompts": len(prompts),
                    "samples": len(held),
                    "solved": len(solved) / len(prompts),
                    "entropy": sum(record["entropy"] for record in fresh) / len(fresh),
                    "tokens_per_second": generated / sampling,
                    "samples_per_second": len(fresh) / sampling,
                    "accepted_per_minute": 60 * accepted / sampling,
                    **self.used,
                    "skipped_steps": self.unusual.skipped,
                    "peak_memory_gb": memory,
                },
                done,
                f"{len(prompts)} of {len(mine)} prompts, {100 * len(solved) / len(prompts):.0f} %"
                f" solved, {generated / sampling:,.0f} tokens/s, {memory:.1f} GB",
            )
            self.sizes["micro_batch_rows"] = sampler.rows
            if self._stopping():
                raise self._stopped(iteration, "generate")
            return self._used(for_samples)[0] >= 1

        for_samples = self._for_sampling(iteration)
        if (
            not store.held or self._used(for_samples)[0] < 1
        ):  # a run that goes on may have used all of it
            generator.fill(
                store,
                mine,
                sampler,
                iteration,
                begin,
                seen,
                lambda rows: self._met("NaN or infinity in a reward or logits", rows),
            )
        if missing(mine, store.held, settings):
            if context.main:
                _write(folder / "budget.json", {"samples": len(store.held), "used": self.used})
                log.info(
                    "iteration %d: the budget for samples is spent after %d of them",
                    iteration,
                    len(store.held),
                )
            context.barrier()

    def select(self, iteration: int) -> bool:
        """Choose training data among the samples, and say what was found. Returns whether there is
        any.

        Raises: ConfigError where there is none, unless a budget ended the sampling.
        """
        if self._finished(iteration):
            return True
        selection = self._selection(iteration)
        stats, folder = selection.stats, self._folder(iteration)
        if self.context.main:
            fresh = json.loads(json.dumps({"made_with": asdict(self.settings.select), **stats}))
            if fresh != _read(folder / "selected.json"):  # else a run that was killed has logged it
                self._write({"stage": "select", "iteration": iteration, **stats})
                assert self.tracker is not None
                self.tracker.sync()  # before the file that tells that it is logged
            _write(folder / "selected.json", fresh)
            rows = [record for kept in selection.kept.values() for record in kept]
            text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in rows)
            (folder / "selected.jsonl").write_text(text, encoding="utf-8")
            log.info(
                "iteration %d: %d of %d samples right, %.0f %% of %d prompts solved (%.0f %% always"
                " right), %.1f ways a solved prompt, %d completions kept; %.0f %% were cut off;"
                " entropy %.2f",
                iteration,
                stats["accepted"],
                stats["samples"],
                100 * stats["solved_share"],
                stats["prompts"],
                100 * stats["all_right_share"],
                stats["paths_per_solved_prompt"],
                stats["kept"],
                100 * stats["truncated_share"],
                stats["entropy"],
            )
            if stats["truncated_share"] > MANY_CUT:
                log.warning(
                    "%.0f %% of the samples were cut off, and those are never accepted. Raise"
                    " algo.sampling.max_new_tokens.",
                    100 * stats["truncated_share"],
                )
            log.info("%s", _histogram(stats["prompts_by_share_right"]))
        self.context.barrier()  # no rank goes on before the files are there
        if not selection.kept and self._cut(iteration):
            if self.context.main:
                log.warning(
                    "iteration %d: none of the samples that the budget allowed was accepted",
                    iteration,
                )
            return False
        if not selection.kept:
            answered = stats["answered_share"]
            hint = "tell the answer (algo.hint_samples), " if hasattr(self.task, "hint") else ""
            raise ConfigError(
                f"no completion of iteration {iteration} was accepted, so there is nothing to learn"
                " from: "
                + (f"{100 * answered:.0f} % had an answer, " if answered is not None else "")
                + f"{100 * stats['truncated_share']:.0f} % were cut off. Take more samples"
                f" (algo.samples_per_prompt, algo.second_round_samples), {hint}raise"
                " algo.sampling.max_new_tokens or lower algo.select.accept."
            )
        return True

    def finetune(self, iteration: int) -> None:
        """Train on the selected completions; leaves the model in RUN/iteration-K/model."""
        if self._finished(iteration):
            return
        settings, context, folder = self.settings, self.context, self._folder(iteration)
        self._check_selected(folder / "selected.json")
        selection = self._selection(iteration)
        asked = {example.id: example for example in self.prompts.train}
        prompts = encode_prompts(
            self.tokenizer, [self.task.prompt(asked[i]) for i in selection.kept]
        )
        trees = [
            Tree(prompt, [record["tokens"] for record in rows])
            for prompt, rows in zip(prompts, selection.kept.values(), strict=True)
        ]
        start = 0 if settings.start_from == "base" else iteration - 1
        model = self._at(start)
        ids = dict(zip(map(tuple, prompts), selection.kept, strict=True))

        def unusual(what: str, behind: list[Tree]) -> None:
            rows = [
                {
                    "id": ids[tuple(tree.prompt)],
                    "prompt": self.tokenizer.decode(tree.prompt),
                    "completion": self.tokenizer.decode(tokens),
                }
                for tree in behind
                for tokens in tree.completions
            ]
            self._met(what, rows, optim.Guards.ADVICE)

        seed = self.run.seed + iteration
        tuner = Finetuner(model, trees, self.run, context, self.numbers, folder, seed, unusual)
        tuner.rows = self.sizes["batch_rows"]
        record = self._finetuned_with()
        tuner.resume(record, check_same)
        self.loaded = -1  # neither the base nor an iteration's model any more
        self._begin(f"iteration {iteration}, fine-tuning", tuner.total, tuner.done, "step")
        for_training = replace(self.run.budget, tokens=None)  # it generates none

        def seen(event: dict[str, float], phases: dict[str, float]) -> bool:
            speed = event["trained_tokens"] / event["seconds"]
            self._log(
                {
                    "stage": "finetune",
                    "iteration": iteration,
                    "train_step": tuner.done,
                    **event,
                    "phase_seconds": phases,
                    "skipped_steps": self.unusual.skipped,
                    "tokens_per_second": speed,
                    "peak_memory_gb": hardware.peak_memory_gb(context.device.device),
                },
                tuner.done,
                f"loss {event['loss']:.4f}, {speed:,.0f} tokens/s",
            )
            self.sizes["batch_rows"] = tuner.rows
            stopping = self._stopping()
            enough = self._used(for_training)[0] >= 1
            due = self.run.checkpoint.every and tuner.done % self.run.checkpoint.every == 0
            if tuner.done < tuner.total and (due or stopping):
                if self.tracker:
                    self.tracker.sync()
                tuner.save({"made_with": record, "iteration": iteration})
            context.barrier()
            if stopping and tuner.done < tuner.total:
                raise self._stopped(iteration, "finetune")
            return enough

        if (
            not tuner.done or self._used(for_training)[0] < 1
        ):  # a run that goes on may have used all of it
            tuner.train(seen)
        if context.main and tuner.done < tuner.total:
            log.info(
                "iteration %d: the budget is spent after %d of %d steps",
                iteration,
                tuner.done,
                tuner.total,
            )
        self.model = tuner.finish().eval()
        weights = fsdp.whole(self.model)
        if self.tracker:
            self.tracker.sync()
        if context.main:
            _write(
                folder / "finetune.json",
                {"made_with": record, "steps": tuner.done, "completions": selection.stats["kept"]}
                | ({"cut": True} if tuner.done < tuner.total else {}),
            )
            export_model(self.model, self.tokenizer, folder / "model", weights)
            if self.tracker:
                self.tracker.artifact("model", folder / "model", f"iteration-{iteration}")
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        self.loaded = iteration
        self._prepare()
        context.barrier()

    def evaluate(self, iteration: int) -> dict[str, Any]:
        """Measure an iteration's model on the held-out and on the validation prompts; 0 = the base
        model.
        """
        path = self._folder(iteration) / "evaluation.json"
        record = self._measured_with()
        saved = _read(path)
        if saved.get("made_with") == json.loads(json.dumps(record)):
            self._tell(saved)
            return saved
        self.context.barrier()  # no rank looks after rank 0 has written
        started = time.perf_counter()
        sampler = self._sampler(self._at(iteration))
        sampler.rows = self.sizes["micro_batch_rows"]
        held_out = self._measure(sampler, self.prompts.held_out)
        rates = pass_rates(
            self.run,
            self.context,
            sampler,
            self.tokenizer,
            self.task,
            self.scorer,
            self.prompts.held_out,
        )
        validation = (
            self._measure(sampler, self.prompts.validation).value
            if self.prompts.validation
            else None
        )
        found = {
            "made_with": record,
            "iteration": iteration,
            "metric": held_out.name,
            "metrics": self._with_answers(held_out) | rates,
            "validation": validation,
            "completions": held_out.completions,
        }
        self._write(
            {
                "stage": "evaluate",
                "iteration": iteration,
                "evaluate_seconds": time.perf_counter() - started,
                "metric": held_out.value,
                "metric_name": held_out.name,
                "metrics": found["metrics"],
                "validation": validation,
                **self.used,
            }
        )
        if self.tracker:
            rows = summary.completion_rows(self.task, self.prompts.held_out, held_out.completions)
            name = f"iteration-{iteration}" if iteration else "before"
            self.tracker.completions(name, self.step, rows)
            self.tracker.sync()
            _write(path, found)  # last: with it the evaluation is done
        self._tell(found)
        self.context.barrier()
        if self._stopping() and self.settings.stage == "all":
            raise self._stopped(iteration, "evaluate")
        return found

    # --- the ends of a run

    def under_way(self) -> int:
        """The iteration that the stage asked for belongs to: the first without a model, or for
        evaluate the last with one.
        """
        done = 0
        while self._finished(done + 1):
            done += 1
        return done if self.settings.stage == "evaluate" else done + 1

    def leave(self) -> None:
        """After one stage: where things are, and what comes next."""
        if self.tracker:
            self.tracker.close()
        if self.context.main:
            if (
                self.written == self.context.out_dir
            ):  # shards run side by side: python -m common.report when all are done
                page.write_or_warn(self.context.out_dir)
            after = STAGES[(STAGES.index(self.settings.stage) + 1) % len(STAGES)]
            log.info(
                "%s is done; %s. Next: algo.stage=%s",
                self.settings.stage,
                self.context.out_dir,
                after,
            )

    @property
    def iterations(self) -> range:
        """Their numbers; no end in sight where a budget is to end the run."""
        return range(1, (self.settings.iterations or sys.maxsize) + 1)

    def finish(self, best: int, ended_by: str | None = None) -> summary.Result:
        """Result, export and summary of the whole run, with the best iteration's model. ended_by:
        see report.Result.
        """
        first, last = (_read(self._folder(k) / "evaluation.json") for k in (0, best))
        done = list(itertools.takewhile(self._finished, self.iterations))
        samples = [record for k in done for record in self._samples(k)]
        steps = [_read(self._folder(k) / "finetune.json")["steps"] for k in done]
        used = self._used(self.run.budget)
        if self.context.main:
            loop.warn_if_overshot(*used)
            whose = (
                f"of iteration {best}"
                if best
                else "the base: no iteration was better on the validation prompts"
            )
            log.info("the model is %s", whose)
        state = {
            "before": first,
            "step": sum(steps),
            "seconds": self.seconds.total(),
            # Shards are logged apart, and samples that nothing came of are in the log alone.
            "generated": max(
                sum(len(record["tokens"]) for record in samples), self.used["generated_tokens"]
            ),
            "evaluations": max(len(samples), self.used["reward_evaluations"]),
            "skipped": self.unusual.skipped,
        }
        evaluation = Evaluation(last["metrics"], last["completions"], 0)
        return loop.finish(
            self.run,
            self.context,
            self.task,
            self._at(best),
            self.tokenizer,
            self.prompts.held_out,
            state,
            evaluation,
            self.numbers.name,
            self.tracker,
            best,
            ended_by,
        )

    # --- the budget

    def spent(self, iteration: int) -> str | None:
        """The limit that leaves nothing for an iteration that has not begun, such as
        budget.tokens=200000; None = go on.
        """
        used, limit = self._used(self.run.budget)
        return limit if used >= 1 and not shard_counts(self._folder(iteration)) else None

    def _used(self, budget: BudgetConfig) -> tuple[float, str]:
        """The share that is used of the limit that is nearest to its end, and that limit; on every
        rank the same.
        """
        found = budget.nearest(self.used["generated_tokens"], self.seconds.total())
        return (
            max(self.context.gather_objects(found)) if budget.seconds is not None else found
        )  # their clocks differ

    def _for_sampling(self, iteration: int) -> BudgetConfig:
        """Of the seconds that are left before an iteration, half are for its samples."""
        budget = self.run.budget
        if budget.seconds is None:
            return budget
        before = self.seconds.total() - self.seconds[iteration]
        return replace(budget, seconds=(before + budget.seconds) / 2)

    def _cut(self, iteration: int) -> bool:
        """Whether the budget ended the sampling of an iteration."""
        return (self._folder(iteration) / "budget.json").exists()

    # --- inside

    def _selection(self, iteration: int) -> Selection:
        """Of the samples of this iteration, or of all up to it. A function of the files alone."""
        first = iteration if self.settings.select.buffer == "last" else 1
        records: list[Record] = []
        for number in range(first, iteration + 1):
            records += self._samples(number)
        return select(records, self.settings.select, hasattr(self.task, "answer"))

    def _samples(self, iteration: int) -> list[Record]:
        """All samples of an iteration. Raises: ConfigError where some are missing."""
        prompts = self.prompts.of(iteration, self.settings.prompts)
        made = made_with(self.run, iteration)
        return merged(
            self._folder(iteration), prompts, made, self.settings, whole=not self._cut(iteration)
        )

    def _finetuned_with(self) -> dict[str, Any]:
        """The settings that a fine-tuned model depends on, beside its samples."""
        settings = self.settings
        keys = ("start_from", "epochs", "packing", "pack_tokens", "lr", "warmup", "grad_clip")
        return {
            "seed": self.run.seed,
            "algo": (
                {key: getattr(settings, key) for key in keys}
                | {
                    key: asdict(getattr(settings, key))
                    for key in ("select", "lr_schedule", "optimizer", "lora")
                }
                | {"batch_rows * accumulate": settings.batch_rows * settings.accumulate}
            ),
        }

    def _folder(self, iteration: int) -> Path:
        return self.context.out_dir / f"iteration-{iteration}"

    def _finished(self, iteration: int) -> bool:
        """Whether an iteration has its model. Raises: ConfigError where it was made with other
        settings.
        """
        folder = self._folder(iteration)
        if not (folder / "model").is_dir():
            return False
        path = folder / "finetune.json"
        if "made_with" not in (record := _read(path)):
            raise ConfigError(
                f"{path} is missing or damaged beside {folder}/model. Remove {folder}/model to make"
                " it again."
            )
        check_same(path, record["made_with"], self._finetuned_with())
        return True

    def _check_folder(self) -> None:
        """Refuse to write over another run, or to look for one where there is none."""
        settings, out_dir = self.settings, self.context.out_dir
        resume.check_algorithm(self.run, out_dir)
        present = any(out_dir.glob("iteration-*"))
        if settings.stage == "generate":
            present = shard_path(self._folder(self.under_way()), *settings.part()).exists()
        self.context.barrier()  # no rank looks after another has begun to write
        if settings.stage in ("select", "finetune", "evaluate"):
            if not present and settings.stage != "evaluate":
                raise ConfigError(
                    f"{out_dir} holds no samples for algo.stage={settings.stage}. Give the folder"
                    " of algo.stage=generate: hydra.run.dir=FOLDER."
                )
        elif present and self.run.resume != "auto":
            raise ConfigError(
                f"{out_dir} already holds a run. Use resume=auto to go on with it, or another"
                " hydra.run.dir."
            )

    def _check_training(self) -> None:
        """Find mistakes in the settings of fine-tuning before hours of sampling."""
        settings = self.settings
        optim.optimizer(settings.optimizer, [torch.nn.Parameter(torch.zeros(1))], settings.lr)
        if settings.lora.rank:
            check_lora(self.model, settings.lora)

    def _check_selected(self, path: Path) -> None:
        """The stage `select` shows what fine-tuning will train on: both must have the same
        settings.
        """
        if "made_with" not in (saved := _read(path)):
            raise ConfigError(f"{path} is missing. Make it: algo.stage=select.")
        check_same(path, saved["made_with"], asdict(self.settings.select))

    def _store(self, path: Path, iteration: int) -> Store:
        """The samples of a shard; rank 0 mends the file before the others read it."""
        header = made_with(self.run, iteration)
        store = Store(path, header, writes=True) if self.context.main else None
        self.context.barrier()
        return store or Store(path, header, writes=False)

    def _reopen(self) -> None:
        """Take up an iteration that a smaller budget had cut short, as if it had not been cut."""
        last = max(
            (
                int(path.name.removeprefix("iteration-"))
                for path in self.context.out_dir.glob("iteration-*")
            ),
            default=0,
        )
        found = events(self.written / "metrics.jsonl")
        tokens = max((event.get("generated_tokens", 0) for event in found), default=0)
        seconds = sum(event.get("seconds", 0.0) for event in found)
        if not last or not self.was_cut(last) or self.run.budget.nearest(tokens, seconds)[0] >= 1:
            return
        folder = self._folder(last)
        log.info("iteration %d goes on: the budget that cut it short is no longer spent", last)
        for name in ("model", "adapter", "checkpoints"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in (
            "finetune.json",
            "evaluation.json",
            "selected.json",
            "selected.jsonl",
            "budget.json",
        ):
            (folder / name).unlink(missing_ok=True)

    def was_cut(self, iteration: int) -> bool:
        """Whether the budget ended the sampling or the fine-tuning of an iteration."""
        return self._cut(iteration) or _read(self._folder(iteration) / "finetune.json").get(
            "cut", False
        )

    def limit(self) -> str:
        """Of the budget, the limit that is nearest to its end, such as budget.tokens=200000."""
        return self._used(self.run.budget)[1]

    def _logged(self) -> list[dict[str, Any]]:
        """The events of an interrupted run, without those that will come again."""
        path = self.written / "metrics.jsonl"
        self.continued = path.exists()
        steps_saved = functools.cache(self._steps_saved)

        def redone(event: dict[str, Any]) -> bool:
            """Whether it is a fine-tuning step after the checkpoint that it will be done again
            from.
            """
            iteration = event["iteration"]
            return (
                event.get("stage") == "finetune"
                and not self._finished(iteration)
                and event["train_step"] > steps_saved(iteration)
            )

        found = _kept_events(path, redone)
        while found and not self._came_to_be(found[-1]):
            found.pop()
        return found

    def _came_to_be(self, event: dict[str, Any]) -> bool:
        """Whether what the last event tells of is there: a kill may have come between the two."""
        iteration = event["iteration"]
        folder = self._folder(iteration)
        if event["stage"] == "evaluate":
            return (folder / "evaluation.json").exists()
        if event["stage"] == "select" and not self._finished(iteration):
            told = {
                key: value
                for key, value in event.items()
                if key not in ("step", "stage", "iteration")
            }
            saved = _read(folder / "selected.json")
            return told == {key: value for key, value in saved.items() if key != "made_with"}
        path = shard_path(folder, *self.settings.part())
        if event["stage"] == "generate" and path.exists() and not self._finished(iteration):
            return path.read_bytes().count(b"\n") - 1 >= event.get("samples", 0)
        return True

    def _as_logged(self, store: Store, iteration: int) -> None:
        """Drop the samples of a wave whose event a kill prevented: both are made again, as in a run
        that was not killed.
        """
        of_iteration = [
            e for e in self.events if e["stage"] == "generate" and e["iteration"] == iteration
        ]
        logged = of_iteration[-1].get("samples") if of_iteration else 0
        settings = self.settings
        wave = settings.prompts_per_batch * settings.chunk_size * self.context.world_size
        # More than a wave comes from elsewhere, such as a file that was copied into this folder.
        if self.continued and logged is not None and 0 < len(store.held) - logged <= wave:
            store.keep(logged)

    def _steps_saved(self, iteration: int) -> int:
        """Fine-tuning steps in the checkpoint that an iteration goes on from."""
        folders = (self._folder(iteration) / "checkpoints").glob("step-????????")
        sound = (path for path in folders if problem(path) is None)
        return max((int(path.name.removeprefix("step-")) for path in sound), default=0)

    def _at(self, iteration: int) -> Any:
        """The model of an iteration, 0 = the base; kept until another one is asked for."""
        if self.loaded != iteration:
            self.model = None
            gc.collect()
            run, path = self.run, self._folder(iteration) / "model"
            if iteration > 0:
                options: dict[str, Any] = {
                    "revision": None,
                    "gguf_file": None,
                    "lora": None,
                    "tiny": None,
                }
                run = replace(run, model=replace(run.model, name="hf", path=str(path), **options))
            self.model, _ = loop.load(run, self.task, self.context)
            self.loaded = iteration
            self._prepare()
        return self.model

    def _prepare(self) -> None:
        if fsdp.of(self.model):  # fine-tuned in place
            return
        logprobs.prepare(self.model)
        optim.no_dropout(self.model)
        fsdp.shard([self.model], self.run, self.context, self.numbers)

    def _sampler(self, model: Any) -> Sampler:
        return Sampler(
            narrowed(model, self.numbers.compute),
            pad_id=self.tokenizer.pad_token_id,
            stop_ids=stop_ids(model, self.tokenizer),
            rows=self.settings.micro_batch_rows,
            compile_mode=self.run.opt.compile.mode if self.run.opt.compile.enabled else None,
            graphs=self.run.hardware.cuda_graphs,
        )

    def _measured_with(self) -> dict[str, Any]:
        """The settings that an evaluation depends on, beside the model."""
        settings = self.settings
        return {
            "seed": self.run.seed,
            "model": asdict(self.run.model),
            "task": self.run.task,
            "examples": len(self.prompts.held_out),
            "validation_prompts": len(self.prompts.validation),
            "pass_samples": settings.pass_samples,
            "accept": settings.select.accept,
            "sampling": asdict(settings.sampling),
        }

    def _measure(self, sampler: Sampler, examples: list[Example]) -> Evaluation:
        tokens = self.settings.sampling.max_new_tokens
        return evaluate(sampler, self.tokenizer, self.task, examples, tokens, self.context)

    def _with_answers(self, found: Evaluation) -> dict[str, float]:
        """The task's measures, and the share of completions that give an answer at all."""
        if "answered" in found.metrics or not hasattr(self.task, "answer"):
            return found.metrics
        answered = sum(self.task.answer(text) is not None for text in found.completions)  # type: ignore[attr-defined]
        return found.metrics | {"answered": 100 * answered / len(found.completions)}

    def _tell(self, found: dict[str, Any]) -> None:
        if self.context.main:
            what = f"iteration {found['iteration']}" if found["iteration"] else "base"
            log.info(
                "%s: held-out %s",
                what,
                ", ".join(f"{k} {v:.1f}" for k, v in found["metrics"].items()),
            )

    def _begin(self, what: str, total: int, done: int, unit: str) -> None:
        if self.tracker:
            self.tracker.begin(what, total, done, unit)

    def _write(self, event: dict[str, Any]) -> None:
        """An event that moves no progress line."""
        self.step += 1
        if self.tracker:
            self.tracker.write({"step": self.step, **event})

    def _log(self, event: dict[str, Any], done: int, shown: str) -> None:
        """An event of sampling or fine-tuning, with its progress line."""
        self.step += 1
        self.seconds[event["iteration"]] += event["seconds"]
        if self.tracker:
            self.tracker.log({"step": self.step, **event}, done, shown)
        self.traced()

    def _met(self, what: str, rows: list[dict[str, Any]], advice: str = "") -> None:
        """Numbers that are not finite, in the step whose event comes next; on all ranks together."""
        if (trouble := self.unusual.met(self.step + 1, what, rows, advice)) is not None:
            raise RunStopped(f"step {self.step + 1}: {trouble}", EXIT_NUMBERS)

    def _stopping(self) -> bool:
        return self.context.any(self.stop.name is not None)

    def _stopped(self, iteration: int, stage: str) -> RunStopped:
        return RunStopped(
            f"stopped in iteration {iteration}, stage {stage}; what is done is in"
            f" {self.context.out_dir}. Go on with hydra.run.dir={self.context.out_dir}"
            " resume=auto.",
            EXIT_SIGNAL,
        )


class _Sizes:
    """Rows a forward, those that held after memory ran out; kept in FOLDER/sizes.json across a
    restart.
    """

    def __init__(self, folder: Path, writes: bool, micro_batch_rows: int, batch_rows: int) -> None:
        self.path, self.writes = folder / "sizes.json", writes
        asked = {"micro_batch_rows": micro_batch_rows, "batch_rows": batch_rows}
        held = _read(self.path)
        self.rows = {key: min(value, held.get(key, value)) for key, value in asked.items()}

    def __getitem__(self, key: str) -> int:
        return self.rows[key]

    def __setitem__(self, key: str, rows: int) -> None:
        if rows < self.rows[key]:
            self.rows[key] = rows
            if self.writes:
                _write(self.path, self.rows)


def _kept_events(path: Path, redone: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """What is logged, up to the first event that will come again."""
    return list(itertools.takewhile(lambda event: not redone(event), events(path)))


def _histogram(prompts: dict[str, int]) -> str:
    """Prompts by the share of their samples that is right, as a row of counts."""
    widths = [max(len(name), len(str(count))) for name, count in prompts.items()]
    head = "  ".join(name.rjust(width) for name, width in zip(prompts, widths, strict=True))
    body = "  ".join(
        str(count).rjust(width) for count, width in zip(prompts.values(), widths, strict=True)
    )
    return f"samples right  {head}\nprompts        {body}"


def _write(path: Path, value: dict[str, Any]) -> None:
    """JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _read(path: Path) -> dict[str, Any]:
    """What `_write` wrote; empty where there is no such file, or a damaged one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
