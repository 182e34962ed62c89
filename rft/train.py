"""RFT, the loop: generate, verify, select, fine-tune, evaluate, and again.

    python launch.py algo=rft
    python launch.py algo=rft algo.stage=generate algo.shard=2/8 hydra.run.dir=runs/mine
    python launch.py algo=rft task=gsm8k task.path=data/gsm8k model=hf model.path=... algo.lora.rank=16

After STaR (arXiv:2203.14465), RFT (2308.01825) and ReST-EM (2312.06585). Departures: samples are resumed one by one; prompts
that nothing solved get a second round; of each prompt a few distinct ways are kept, and they share the prompt's forward;
prompts that are also evaluated on are never trained on.

RUN/iteration-K holds samples-*.jsonl, selected.json, selected.jsonl, finetune.json, model/ and evaluation.json; iteration-0 is the base
model. What is there is not made again, so a run that was killed goes on with resume=auto, and stages can be run one by one.
"""

import copy
import gc
import json
import logging
import os
import shutil
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from common import hardware, logprobs, loop, models, optim, precision, report
from common.config import ConfigError, ModelConfig, Run
from common.distributed import Context
from common.evaluation import Evaluation, evaluate
from common.rollout import Sampler
from common.scoring import Scorer
from common.signals import EXIT_SIGNAL, RunStopped, StopSignal
from common.tasks import Example, Task, build
from common.tracking import Tracker, closed_on_error, events
from rft.config import ENVIRONMENT, STAGES, RftConfig, check_switches
from rft.finetune import Finetuner, Tree
from rft.generate import Generator, Record, Store, check_same, made_with, merged, missing, shard_path
from rft.select import Selection, pass_at, select

log = logging.getLogger("clutch")


def train(run: Run, context: Context, task: Task | None = None) -> report.Result | None:
    """Train a model on its own right answers. Every rank returns the same; rank 0 writes. One stage alone returns None.

    Raises: ConfigError for settings that cannot work; RunStopped after a signal, or on NaN or infinity.
    """
    settings: RftConfig = run.algo
    check_switches(run, settings)
    task = task or build(run.task)
    if settings.hint_samples and not hasattr(task, "hint"):
        raise ConfigError(
            f"algo.hint_samples={settings.hint_samples}: {type(task).__name__} has no method `hint(example)`, a prompt that "
            "tells the answer. Set it to 0."
        )
    stages = Stages(run, context, task)
    with (
        closed_on_error(stages.tracker),
        closing(stages.scorer),
        StopSignal() as stages.stop,
        report.profiled(run, context) as stages.traced,
    ):
        if settings.stage != "all":
            getattr(stages, settings.stage)(stages.under_way())
            return stages.leave()
        best, fallen = stages.evaluate(0), 0
        for iteration in range(1, settings.iterations + 1):
            stages.generate(iteration)
            stages.select(iteration)
            stages.finetune(iteration)
            last = stages.evaluate(iteration)
            if not settings.validation_prompts or last["validation"] > best["validation"]:
                best, fallen = last, 0
            else:
                fallen += 1
            if fallen == settings.patience and iteration < settings.iterations:
                log.info(
                    "stopping after iteration %d: the validation %s was best after iteration %d",
                    iteration,
                    best["metric"],
                    best["iteration"],
                )
                break
    return stages.finish(best["iteration"])


class Stages:
    """The stages of an iteration. Each finds what it needs in the run folder, and leaves what it made there."""

    def __init__(self, run: Run, context: Context, task: Task) -> None:
        self.run, self.context, self.task = run, context, task
        self.settings: RftConfig = run.algo
        self.numbers = precision.resolve(run.opt, context.device.device)
        self.model: Any
        self.model, self.tokenizer = loop.load(run, task, context)
        self.loaded = 0  # the iteration whose model that is; 0 = the base
        self._prepare()
        self.scorer = Scorer(task, run.scoring)
        self.sizes = _Sizes(context, self.settings)
        self.stop: Any = None
        self.traced: Any = None
        self._split()
        self._check_folder()
        self._plan()
        index, of = self.settings.part()
        written = context.out_dir / f"shard-{index}-of-{of}" if self.settings.shard else context.out_dir
        written.mkdir(exist_ok=True)
        self.events = self._kept_events(written / "metrics.jsonl")
        self.seconds = sum(event.get("seconds", 0.0) for event in self.events)
        self.step = len(self.events)
        saved = written / "tracker.json"
        state = json.loads(saved.read_text(encoding="utf-8")) if saved.exists() else {}
        self.tracker = Tracker(run, written, None, self.step, state) if context.main else None
        if self.tracker and not saved.exists():
            saved.write_text(json.dumps(self.tracker.state()), encoding="utf-8")

    # --- the stages

    def generate(self, iteration: int) -> None:
        """Fill this run's shard of samples."""
        settings, context, folder = self.settings, self.context, self._folder(iteration)
        index, of = settings.part()
        mine = self._prompts(iteration)[index - 1 :: of]
        if self._finished(iteration):
            return
        store = self._store(shard_path(folder, index, of), iteration)
        if not missing(mine, store.held, settings):
            return
        model = self._at(iteration - 1)
        if self.numbers.compute != torch.float32:
            # A copy in the dtype that is computed in: casting the weights anew for each token costs more than sampling.
            model = copy.deepcopy(model).to(self.numbers.compute)
        generator = Generator(self.run, context, self.task, self.tokenizer, self.scorer, self.sizes["micro_batch_rows"])
        done = 0

        def begin(name: str, samples: int) -> None:
            nonlocal done
            done = 0
            self._begin(f"iteration {iteration}, {name} samples", samples, 0, "sample")

        def seen(fresh: list[Record], sampling: float, seconds: float, phases: dict[str, float]) -> None:
            nonlocal done
            done += len(fresh)
            held = store.held
            prompts = {record["prompt"] for record in held.values()}
            solved = {record["prompt"] for record in held.values() if record["accepted"]}
            generated, accepted = sum(len(r["tokens"]) for r in fresh), sum(r["accepted"] for r in fresh)
            memory = hardware.peak_memory_gb(context.device.device)
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
                    "solved": len(solved) / len(prompts),
                    "entropy": sum(record["entropy"] for record in fresh) / len(fresh),
                    "tokens_per_second": generated / sampling,
                    "samples_per_second": len(fresh) / sampling,
                    "accepted_per_minute": 60 * accepted / sampling,
                    "peak_memory_gb": memory,
                },
                done,
                f"{len(prompts)} of {len(mine)} prompts, {100 * len(solved) / len(prompts):.0f} % solved, "
                f"{generated / sampling:,.0f} tokens/s, {memory:.1f} GB",
            )
            if self._stopping():
                raise self._stopped(iteration, "generate")

        generator.fill(store, mine, self._sampler(model), iteration, begin, seen)
        self.sizes["micro_batch_rows"] = generator.rows

    def select(self, iteration: int) -> None:
        """Choose training data among the samples, and say what was found."""
        if self._finished(iteration):
            return
        selection = self._selection(iteration)
        stats, folder = selection.stats, self._folder(iteration)
        if self.context.main:
            _write(folder / "selected.json", stats)
            rows = [record for kept in selection.kept.values() for record in kept]
            text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in rows)
            (folder / "selected.jsonl").write_text(text, encoding="utf-8")
            log.info(
                "iteration %d: %d of %d samples right, %.0f %% of %d prompts solved (%.0f %% always right), %.1f ways a solved "
                "prompt, %d completions kept; entropy %.2f",
                iteration,
                stats["accepted"],
                stats["samples"],
                100 * stats["solved_share"],
                stats["prompts"],
                100 * stats["all_right_share"],
                stats["paths_per_solved_prompt"],
                stats["kept"],
                stats["entropy"],
            )
            log.info("%s", _histogram(stats["prompts_by_share_right"]))
        if not selection.kept:
            raise ConfigError(
                f"no completion of iteration {iteration} was accepted, so there is nothing to learn from: "
                f"{100 * stats['answered_share']:.0f} % had an answer, {100 * stats['truncated_share']:.0f} % were cut off. "
                "Take more samples (algo.samples_per_prompt, algo.second_round_samples), tell the answer "
                "(algo.hint_samples), raise algo.sampling.max_new_tokens or lower algo.select.accept."
            )

    def finetune(self, iteration: int) -> None:
        """Train on the selected completions; leaves the model in RUN/iteration-K/model."""
        if self._finished(iteration):
            return
        settings, context, folder = self.settings, self.context, self._folder(iteration)
        selection = self._selection(iteration)
        asked = self._prompts_by_id()
        prompts = models.encode_prompts(self.tokenizer, [self.task.prompt(asked[i]) for i in selection.kept])
        trees = [
            Tree(prompt, [record["tokens"] for record in rows])
            for prompt, rows in zip(prompts, selection.kept.values(), strict=True)
        ]
        start = 0 if settings.start_from == "base" else iteration - 1
        model = self._at(start)
        tuner = Finetuner(model, trees, self.run, context, self.numbers, folder, self.run.seed + iteration)
        tuner.rows = self.sizes["batch_rows"]
        record = self._finetuned_with()
        tuner.resume(record, check_same)
        self.loaded = -1  # neither the base nor an iteration's model any more
        self._begin(f"iteration {iteration}, fine-tuning", tuner.total, tuner.done, "step")

        def seen(event: dict[str, float], phases: dict[str, float]) -> None:
            speed = event["trained_tokens"] / event["seconds"]
            self._log(
                {
                    "stage": "finetune",
                    "iteration": iteration,
                    "train_step": tuner.done,
                    **event,
                    "phase_seconds": phases,
                    "tokens_per_second": speed,
                    "peak_memory_gb": hardware.peak_memory_gb(context.device.device),
                },
                tuner.done,
                f"loss {event['loss']:.4f}, {speed:,.0f} tokens/s",
            )
            stopping = self._stopping()
            due = self.run.checkpoint.every and tuner.done % self.run.checkpoint.every == 0
            if context.main and tuner.done < tuner.total and (due or stopping):
                tuner.save({"made_with": record, "iteration": iteration})
            context.barrier()
            if stopping and tuner.done < tuner.total:
                raise self._stopped(iteration, "finetune")

        tuner.train(seen)
        self.sizes["batch_rows"] = tuner.rows
        self.model = tuner.finish().eval()
        if context.main:
            _write(
                folder / "finetune.json",
                {"made_with": record, "steps": tuner.total, "completions": selection.stats["kept"]},
            )
            models.export(self.model, self.tokenizer, folder / "model")
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        self.loaded = iteration
        self._prepare()
        context.barrier()

    def evaluate(self, iteration: int) -> dict[str, Any]:
        """Measure an iteration's model on the held-out and on the validation prompts; 0 = the base model."""
        path = self._folder(iteration) / "evaluation.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        started = time.perf_counter()
        sampler = self._sampler(self._at(iteration))
        held_out = self._measure(sampler, self.held_out)
        found = {
            "iteration": iteration,
            "metric": held_out.name,
            "metrics": self._with_answers(held_out) | self._pass_rates(sampler),
            "validation": self._measure(sampler, self.validation).value if self.validation else held_out.value,
            "completions": held_out.completions,
        }
        if self.context.main:
            _write(path, found)
            what = "base" if iteration == 0 else f"iteration {iteration}"
            log.info("%s: held-out %s", what, ", ".join(f"{k} {v:.1f}" for k, v in found["metrics"].items()))
        self.context.barrier()
        self.step += 1
        if self.tracker:
            self.tracker.write(
                {
                    "step": self.step,
                    "stage": "evaluate",
                    "iteration": iteration,
                    "evaluate_seconds": time.perf_counter() - started,
                    "metric": held_out.value,
                    "metric_name": held_out.name,
                    "metrics": found["metrics"],
                    "validation": found["validation"],
                }
            )
        return found

    # --- the ends of a run

    def under_way(self) -> int:
        """The iteration that the stage asked for belongs to: the first without a model, or for evaluate the last with one."""
        done = 0
        while self._finished(done + 1):
            done += 1
        return done if self.settings.stage == "evaluate" else done + 1

    def leave(self) -> None:
        """After one stage: where things are, and what comes next."""
        if self.tracker:
            self.tracker.close()
        if self.context.main:
            after = STAGES[(STAGES.index(self.settings.stage) + 1) % len(STAGES)]
            log.info("%s is done; %s. Next: algo.stage=%s", self.settings.stage, self.context.out_dir, after)

    def finish(self, best: int) -> report.Result:
        """Result, export and summary of the whole run, with the best iteration's model."""
        first, last = (json.loads((self._folder(k) / "evaluation.json").read_text(encoding="utf-8")) for k in (0, best))
        samples = [
            record
            for folder in sorted(self.context.out_dir.glob("iteration-*"))
            for path in folder.glob("samples-*.jsonl")
            for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()[1:])
        ]
        steps = [
            json.loads(p.read_text(encoding="utf-8"))["steps"]
            for p in self.context.out_dir.glob("iteration-*/finetune.json")
        ]
        state = {
            "before": first,
            "step": sum(steps),
            "seconds": self.seconds,
            "generated": sum(len(record["tokens"]) for record in samples),
            "evaluations": len(samples),
        }
        evaluation = Evaluation(last["metrics"], last["completions"], 0)
        return loop.finish(
            self.run,
            self.context,
            self.task,
            self._at(best),
            self.tokenizer,
            self.held_out,
            state,
            evaluation,
            self.numbers.name,
            self.tracker,
        )

    # --- inside

    def _split(self) -> None:
        """Training, validation and held-out examples; the prompts of the latter two are never trained on."""
        run, task = self.run, self.task
        everything = list(task.examples("test"))
        self.held_out = loop.held_out(task, run)
        measured = {_same(task.prompt(example)) for example in everything}
        examples = list(task.examples("train"))
        self.train = [example for example in examples if _same(task.prompt(example)) not in measured]
        overlap = len(examples) - len(self.train) + getattr(task, "overlap", 0)
        order = loop.Order(self.train, run.seed)
        count = self.settings.validation_prompts
        self.validation = order.take(0, count) if count < len(self.train) else []
        if count and not self.validation:
            raise ConfigError(
                f"algo.validation_prompts={count} leaves none of the {len(self.train)} training prompts to train on. Lower it."
            )
        measured = {_same(task.prompt(example)) for example in self.validation}
        self.train = [example for example in self.train if _same(task.prompt(example)) not in measured]
        self.overlap = (
            f"{overlap} training prompts are evaluation prompts too: left out"
            if overlap
            else f"none of {len(examples):,} training prompts is among the {len(everything):,} evaluation prompts"
        )
        self.order = loop.Order(self.train, run.seed)
        splits = {"train": (*self.train, *self.validation), "test": self.held_out}
        loop.longest_prompt(
            models.context_length(self.model), self.tokenizer, task, splits, self.settings.sampling.max_new_tokens
        )

    def _prompts(self, iteration: int) -> list[Example]:
        """The training prompts of an iteration, in the order in which they are sampled."""
        count = min(self.settings.prompts or len(self.train), len(self.train))
        return list({e.id: e for e in self.order.take((iteration - 1) * count, count)}.values())

    def _prompts_by_id(self) -> dict[int, Example]:
        return {example.id: example for example in self.train}

    def _selection(self, iteration: int) -> Selection:
        """Of the samples of this iteration, or of all up to it. A function of the files alone."""
        first = iteration if self.settings.select.buffer == "last" else 1
        records: list[Record] = []
        for number in range(first, iteration + 1):
            header = made_with(self.run, number)
            records += merged(self._folder(number), self._prompts(number), header, self.settings)
        return select(records, self.settings.select)

    def _finetuned_with(self) -> dict[str, Any]:
        """The settings that a fine-tuned model depends on, beside its samples."""
        settings = self.settings
        keys = ("start_from", "epochs", "packing", "pack_tokens", "lr", "warmup", "grad_clip")
        return {
            "seed": self.run.seed,
            "algo": {key: getattr(settings, key) for key in keys}
            | {key: asdict(getattr(settings, key)) for key in ("select", "lr_schedule", "optimizer", "lora")}
            | {"batch_rows * accumulate": settings.batch_rows * settings.accumulate},
        }

    def _folder(self, iteration: int) -> Path:
        return self.context.out_dir / f"iteration-{iteration}"

    def _finished(self, iteration: int) -> bool:
        """Whether an iteration has its model. Raises: ConfigError where it was made with other settings."""
        folder = self._folder(iteration)
        if not (folder / "model").is_dir():
            return False
        path = folder / "finetune.json"
        check_same(path, json.loads(path.read_text(encoding="utf-8"))["made_with"], self._finetuned_with())
        return True

    def _check_folder(self) -> None:
        """Refuse to write over another run."""
        settings, index = self.settings, self.settings.part()
        if self.run.resume == "auto" or settings.stage in ("select", "finetune", "evaluate"):
            return
        present = (
            self._folder(1).exists()
            if settings.stage == "all"
            else shard_path(self._folder(self.under_way()), *index).exists()
        )
        self.context.barrier()  # no rank looks after another has begun to write
        if present:
            raise ConfigError(
                f"{self.context.out_dir} already holds a run. Use resume=auto to go on with it, or another hydra.run.dir."
            )

    def _store(self, path: Path, iteration: int) -> Store:
        """The samples of a shard; rank 0 mends the file before the others read it."""
        header = made_with(self.run, iteration)
        store = Store(path, header, writes=True) if self.context.main else None
        self.context.barrier()
        return store or Store(path, header, writes=False)

    def _kept_events(self, path: Path) -> list[dict[str, Any]]:
        """What is logged and stays: not the fine-tuning steps after the checkpoint that they will be done again from."""
        kept = []
        for event in events(path):
            if event["stage"] == "finetune" and not self._finished(event["iteration"]):
                folder = self._folder(event["iteration"]) / "checkpoints"
                saved = max((int(p.name.removeprefix("step-")) for p in folder.glob("step-????????")), default=0)
                if event["train_step"] > saved:
                    break
            kept.append(event)
        return kept

    def _at(self, iteration: int) -> Any:
        """The model of an iteration, 0 = the base; kept until another one is asked for."""
        if self.loaded != iteration:
            self.model = None
            gc.collect()
            run, path = self.run, self._folder(iteration) / "model"
            if iteration > 0:
                local = ModelConfig(
                    name="hf", path=str(path), revision=None, gguf_file=None, attention=run.model.attention
                )
                run = replace(run, model=local)
            self.model, _ = loop.load(run, self.task, self.context)
            self.loaded = iteration
            self._prepare()
        return self.model

    def _prepare(self) -> None:
        logprobs.prepare(self.model)
        optim.no_dropout(self.model)

    def _sampler(self, model: Any) -> Sampler:
        compute = self.numbers.compute
        return Sampler(
            model,
            pad_id=self.tokenizer.pad_token_id,
            stop_ids=models.stop_ids(model, self.tokenizer),
            rows=self.sizes["micro_batch_rows"],
            compile_mode=self.run.opt.compile.mode if self.run.opt.compile.enabled else None,
            autocast=compute if compute != torch.float32 and model.dtype == torch.float32 else None,
        )

    def _measure(self, sampler: Sampler, examples: list[Example]) -> Evaluation:
        tokens = self.settings.sampling.max_new_tokens
        return evaluate(sampler, self.tokenizer, self.task, examples, tokens, self.context)

    def _with_answers(self, found: Evaluation) -> dict[str, float]:
        """The task's measures, and the share of completions that give an answer at all."""
        if "answered" in found.metrics or not hasattr(self.task, "answer"):
            return found.metrics
        answered = sum(self.task.answer(text) is not None for text in found.completions)  # type: ignore[attr-defined]
        return found.metrics | {"answered": 100 * answered / len(found.completions)}

    def _pass_rates(self, sampler: Sampler) -> dict[str, float]:
        """pass@1 and pass@k in percent, from samples drawn as in training."""
        count = self.settings.pass_samples
        if not count:
            return {}
        context, mine = self.context, self.held_out[self.context.rank :: self.context.world_size]
        right: list[int] = []
        if mine:
            prompts = models.encode_prompts(self.tokenizer, [self.task.prompt(example) for example in mine])

            def sample(rows: int) -> Any:
                sampler.rows = rows
                return sampler.generate(
                    prompts,
                    self.settings.sampling,
                    samples_per_prompt=count,
                    seed=self.run.seed,
                    prompt_ids=[example.id for example in mine],
                )

            made, sampler.rows = hardware.halving(sample, sampler.rows, floor=1)
            repeated = [example for example in mine for _ in range(count)]
            rewards = self.scorer.submit(repeated, made.texts(self.tokenizer)).result().rewards
            accept = self.settings.select.accept - 1e-9
            good = [reward >= accept and done for reward, done in zip(rewards, made.finished.tolist(), strict=True)]
            right = [sum(good[i : i + count]) for i in range(0, len(good), count)]
        everyone = [n for part in context.gather_objects(right) for n in part]
        return {
            f"pass@{k}": 100 * sum(pass_at(n, count, k) for n in everyone) / len(everyone) for k in sorted({1, count})
        }

    def _begin(self, what: str, total: int, done: int, unit: str) -> None:
        if self.tracker:
            self.tracker.begin(what, total, done, unit)

    def _log(self, event: dict[str, Any], done: int, shown: str) -> None:
        """An event of sampling or fine-tuning, with its progress line."""
        self.step += 1
        self.seconds += event["seconds"]
        if self.tracker:
            self.tracker.log({"step": self.step, **event}, done, shown)
        self.traced()

    def _stopping(self) -> bool:
        return self.context.any(self.stop.name is not None)

    def _stopped(self, iteration: int, stage: str) -> RunStopped:
        return RunStopped(
            f"stopped in iteration {iteration}, stage {stage}; what is done is in {self.context.out_dir}. "
            f"Go on with hydra.run.dir={self.context.out_dir} resume=auto.",
            EXIT_SIGNAL,
        )

    def _plan(self) -> None:
        """Print what will be done, with sizes."""
        run, settings, context = self.run, self.settings, self.context
        if not context.main:
            return
        size = sum(p.numel() for p in self.model.parameters())
        taken = min(settings.prompts or len(self.train), len(self.train))
        environment = [
            f"{name}={os.environ[name]}"
            for name, key in ENVIRONMENT.items()
            if os.environ.get(name) == str(getattr(settings, key))
        ]
        rows = {
            "algorithm": f"rft, {settings.iterations} iterations from the {settings.start_from} weights"
            + (f"; stage {settings.stage}" if settings.stage != "all" else "")
            + (f", shard {settings.shard}" if settings.shard else ""),
            "task": f"{getattr(self.task, 'name', type(self.task).__name__)}: {len(self.train):,} training prompts, {taken:,} an "
            f"iteration; {len(self.validation)} for validation, {len(self.held_out)} held out",
            "overlap": self.overlap,
            "model": f"{run.model.path or run.model.name}, {size / 1e6:.2f}M parameters",
            "device": f"{context.device.name}, {context.device.memory_gb:.0f} GB; hardware={run.hardware.name}",
            "numbers": f"{self.numbers.name}{', GradScaler' if self.numbers.scaler else ''}, masters float32",
            "ranks": str(context.world_size),
            "generate": f"{settings.samples_per_prompt} samples a prompt, {settings.second_round_samples} more for unsolved ones, "
            f"{settings.hint_samples} with a hint; chunks of {settings.prompts_per_batch} prompts x {settings.chunk_size} samples, "
            f"{self.sizes['micro_batch_rows']} rows a forward",
            "select": f"reward from {settings.select.accept:g}, up to {settings.select.keep_per_prompt} ways a prompt, buffer "
            f"{settings.select.buffer}",
            "fine-tune": f"{_trained(settings)}, {settings.epochs} epochs, lr {settings.lr:g}, {settings.batch_rows} completions "
            f"a forward x {settings.accumulate}{', packed' if settings.packing else ''}",
            "environment": ", ".join(environment),
            "folder": str(context.out_dir),
        }
        report.plan({key: value for key, value in rows.items() if value})
        if not settings.shard:
            report.write_run(run, context.out_dir, context.device.name)


class _Sizes:
    """Rows a forward, those that held after memory ran out; kept in RUN/sizes.json across a restart."""

    def __init__(self, context: Context, settings: RftConfig) -> None:
        self.path = context.out_dir / "sizes.json"
        self.writes = context.main
        asked = {"micro_batch_rows": settings.micro_batch_rows, "batch_rows": settings.batch_rows}
        held = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        self.rows = {key: min(value, held.get(key, value)) for key, value in asked.items()}

    def __getitem__(self, key: str) -> int:
        return self.rows[key]

    def __setitem__(self, key: str, rows: int) -> None:
        if rows < self.rows[key]:
            self.rows[key] = rows
            if self.writes:
                _write(self.path, self.rows)


def _same(prompt: Any) -> str:
    """Prompts that differ in spaces alone are one. Letter case counts: 1 Mb is not 1 mb."""
    return " ".join(str(prompt).split())


def _trained(settings: RftConfig) -> str:
    return f"LoRA of rank {settings.lora.rank}" if settings.lora.rank else "all weights"


def _histogram(prompts: dict[str, int]) -> str:
    """Prompts by the share of their samples that is right, as a row of counts."""
    widths = [max(len(name), len(str(count))) for name, count in prompts.items()]
    head = "  ".join(name.rjust(width) for name, width in zip(prompts, widths, strict=True))
    body = "  ".join(str(count).rjust(width) for count, width in zip(prompts.values(), widths, strict=True))
    return f"samples right  {head}\nprompts        {body}"


def _write(path: Path, value: dict[str, Any]) -> None:
    """JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(beside, path)
