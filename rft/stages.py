"""The four stages of an RFT iteration. Each reads its input from the run folder, and writes its
output there.
"""

import gc
import json
import logging
import shutil
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import optim
from common.config import ConfigError
from common.device import hardware
from common.finetune import Tree
from common.memory import RowLimit
from common.model import encode_prompts, export_model
from common.parts import Parts
from common.report import advice, samples, summary
from common.run import Timer
from common.system import EXIT_NUMBERS, RunStopped, write_jsonl
from common.task import TaskFeatures
from rft import models
from rft.config import RftConfig
from rft.finetune import Tuning
from rft.folder import RunFolder, Sizes, read_json, write_json
from rft.generate import Generator, Record, Store, Wave, find_written, missing, shard_counts
from rft.journal import Journal
from rft.made_with import check_same, evaluated_with, finetuned_with
from rft.prompts import Prompts
from rft.select import Selection, select

log = logging.getLogger("clutch")

MOST_CUT = 0.9  # share of samples cut off that explains why none was accepted
MANY_CUT = 0.1  # share of samples cut off that is worth a warning


@dataclass
class Work:
    """The objects that the stages share.

    Attributes:
        parts: the parts of the run, with the current model.
        cfg: the settings of RFT.
        folder: the run folder.
        journal: the log.
        prompts: the split prompts.
        train_limit: the rows of training forwards.
        sizes: the rows that fitted after memory ran out.
        rollout_rows: the rows of rollout forwards.
        cached_episodes: the number of episodes that may keep their keys and values between turns.
        columns: the tokens of the longest planned row.
        loaded: the finished iteration whose model `parts` has; None = of none.
    """

    parts: Parts
    cfg: RftConfig
    folder: RunFolder
    journal: Journal
    prompts: Prompts
    train_limit: RowLimit
    sizes: Sizes
    rollout_rows: int
    cached_episodes: int
    columns: int
    loaded: int | None = 0

    def load(self, iteration: int, sampling: bool = True) -> None:
        """Load the model of an iteration, unless it is loaded, and open its engine if
        `sampling`.
        """
        self._hold(models.without_sampler(self.parts))
        if self.loaded != iteration:
            self._reload(self.folder.trained(iteration) if iteration else None)
            self.loaded = iteration
        if not sampling:
            return
        self._hold(models.with_sampler(self.parts))
        rows = self.sizes.lower("rollout_rows", self.rollout_rows)
        self.parts.engine.row_limit.lower(
            rows, cached_episodes=self.cached_episodes, columns=self.columns
        )

    def mark_loaded(self, iteration: int | None) -> None:
        """Record that the weights are now those of an iteration; None = of no finished one."""
        self.loaded = iteration

    def _reload(self, folder: Path | None) -> None:
        """Load the weights of a folder, or the run's own with None: an adapter in place, full
        weights as a new LanguageModel.
        """
        parts = self.parts
        if (adapter := parts.lm.adapter) is not None:
            return adapter.load(folder) if folder is not None else adapter.reset()
        emptied = replace(parts.lm, model=None)
        self._hold(replace(parts, lm=emptied))
        del parts  # the last that holds the weights
        gc.collect()
        run, task = self.parts.run, self.parts.task
        self._hold(replace(self.parts, lm=models.load_again(run, emptied, task, folder)))

    def _hold(self, parts: Parts) -> None:
        """Use other parts, here and in the session."""
        self.parts = parts
        self.journal.session.replace_subject(parts)

    def stop_if_asked(self, iteration: int) -> None:
        """Stop the run after an evaluation if a signal has requested it. Raises: RunStopped."""
        if self.journal.session.stopping:
            raise self.journal.stop(iteration, "evaluate")

    def select(self, iteration: int) -> Selection:
        """Select from the samples of this iteration, or of all iterations up to it, using only
        files.
        """
        first = iteration if self.cfg.select.buffer == "last" else 1
        records: list[Record] = []
        for number in range(first, iteration + 1):
            records += self.folder.samples(number, self.prompts)
        return select(records, self.cfg.select, TaskFeatures(self.parts.task).answer is not None)


# --- generate


def generate(work: Work, iteration: int) -> None:
    """Make the missing samples of this run's shard."""
    cfg, folder, journal, context = work.cfg, work.folder, work.journal, work.parts.context
    index, of = cfg.part()
    mine = work.prompts.of(iteration, cfg.prompts)[index - 1 :: of]
    if folder.finished(iteration):
        return
    if cfg.select.buffer == "all":
        for earlier in range(1, iteration):
            folder.samples(earlier, work.prompts)  # needed later: found missing now
    if shard_counts(folder.of(iteration)) - {of}:
        folder.samples(iteration, work.prompts)  # made in other shards, whole or an error
        return
    store = folder.open_store(iteration, journal.events)
    if not missing(mine, store.held, cfg) or folder.sampling_cut(iteration):
        return
    folder.begin(iteration)
    work.load(iteration - 1)
    limits = journal.sampling_limits(iteration)
    generator = Generator(work.parts, store, iteration)
    # A run that goes on may have used all of it.
    enough = bool(store.held) and journal.budget(limits).spent
    if not enough:
        journal.session.warm_up(lambda: generator.rehearse(missing(mine, store.held, cfg)))
    while not enough and (todo := missing(mine, store.held, cfg)):
        total, done = sum(len(chunk.keys()) for chunk in todo), 0
        journal.begin(f"iteration {iteration}, {todo[0].round} samples", total, 0, "sample")
        for wave in generator.waves(todo, lambda: journal.budget(limits).spent):
            done += len(wave.records)
            _keep_wave(work, store, wave, iteration, done, len(mine))
        enough = journal.budget(limits).spent
    if missing(mine, store.held, cfg):
        if context.main:
            count, path = len(store.held), folder.of(iteration) / "budget.json"
            cut = {"samples": count, "used": journal.used, "budget": work.parts.run.budget.limits()}
            write_json(path, cut)
            log.info(f"iteration {iteration}: the budget is spent after {count} samples")
        context.barrier()


def _keep_wave(
    work: Work, store: Store, wave: Wave, iteration: int, done: int, prompts_in_all: int
) -> None:
    """Add a wave's samples to the store and write its event. Raises: RunStopped after a signal."""
    journal, fresh = work.journal, wave.records
    if wave.offending is not None:
        journal.non_finite("NaN or infinity in a reward or logits", wave.offending)
    with wave.timer("write"):
        store.add(fresh)
    held = store.held.values()
    prompts = {record["prompt"] for record in held}
    solved = {record["prompt"] for record in held if record["accepted"]}
    generated = sum(sum(find_written(record)) for record in fresh)
    accepted = sum(record["accepted"] for record in fresh)
    memory = hardware.peak_memory_gb(work.parts.lm.device)
    journal.used["generated_tokens"] += generated
    journal.used["reward_evaluations"] += len(fresh)
    speed = generated / wave.sampling
    scored = [record for record in fresh if not record.get("unscored")]
    stops = Counter(record["stop"] for record in fresh if "stop" in record)
    event = {
        "stage": "generate",
        "iteration": iteration,
        "round": fresh[0]["round"],
        "seconds": time.perf_counter() - wave.started,
        "phase_seconds": wave.timer.seconds,
        "reward": sum(record["reward"] for record in scored) / max(1, len(scored)),
        "accepted": accepted / len(fresh),
        "prompts": len(prompts),
        "samples": len(store.held),
        "solved": len(solved) / len(prompts),
        "truncated": sum(not record["finished"] for record in fresh) / len(fresh),
        "repeating": sum(record["repeating"] for record in fresh) / len(fresh),
        "entropy": sum(record["entropy"] for record in fresh) / len(fresh),
        "tokens_per_second": speed,
        "samples_per_second": len(fresh) / wave.sampling,
        "accepted_per_minute": 60 * accepted / wave.sampling,
        **journal.used,
        "peak_memory_gb": memory,
        **work.parts.scorer.take_logged(work.parts.context),
    }
    if len(scored) < len(fresh):
        event["unscored"] = 1 - len(scored) / len(fresh)
    if stops:
        event["stops"] = {why: count / len(fresh) for why, count in stops.items()}
    shown = (
        f"{len(prompts)} of {prompts_in_all} prompts, {100 * len(solved) / len(prompts):.0f} %"
        f" solved, {speed:,.0f} tokens/s, {memory:.1f} GB"
    )
    with wave.timer("write"):
        journal.show(_rows(work, wave))
    journal.log(event, done, shown)
    work.sizes.keep("rollout_rows", work.parts.engine.row_limit.rows)
    if journal.session.stopping:
        raise journal.stop(iteration, "generate")


def _rows(work: Work, wave: Wave) -> list[samples.Row]:
    ids = list(dict.fromkeys(record["prompt"] for record in wave.records))
    kept = samples.kept_prompts(work.parts.run, len(ids))
    places = {one: place for place, one in enumerate(ids[:kept])}
    return [row | {"group": places[row["id"]]} for row in wave.shown if row["id"] in places]


# --- select


def select_samples(work: Work, iteration: int) -> str | None:
    """Select training data from the samples. If there is none, return the reason that ends the run:
    the budget, or that all is learnt.

    Raises: ConfigError if there is none for another reason.
    """
    if work.folder.finished(iteration):
        return None
    selection = work.select(iteration)
    work.folder.begin(iteration)
    work.journal.count_shards(iteration)
    if work.parts.context.main:
        _write_selection(work, selection, iteration)
    # No rank continues before the files exist. Only rank 0 knows whether they were logged.
    work.journal.agree()
    if selection.kept:
        return None
    if work.folder.sampling_cut(iteration):
        if work.parts.context.main:
            log.warning(f"iteration {iteration}: no sample was accepted within the budget")
        return work.journal.budget().limit
    if iteration > 1 and selection.stats["dropped_all_right"]:
        if work.parts.context.main:
            log.info(f"stopping: every prompt that iteration {iteration} solves is always right")
        return "algo.select.drop_all_right=true"
    raise _lacks_data(work, selection, iteration)


def _lacks_data(work: Work, selection: Selection, iteration: int) -> ConfigError:
    """Return the error for an iteration without completions to train on."""
    names = ("answered_share", "unscored_share", "truncated_share", "dropped_all_right")
    answered, unscored, cut, dropped = (selection.stats[name] for name in names)
    if dropped:
        return ConfigError(
            f"algo.select.drop_all_right=true leaves nothing of iteration {iteration} to learn"
            f" from: all samples of {dropped} prompts were right, and none of the others. Use"
            " harder prompts, or algo.select.drop_all_right=false."
        )
    hint = ", algo.hint_samples" if TaskFeatures(work.parts.task).hint else ""
    had = f"{100 * answered:.0f} % had an answer, " if answered is not None else ""
    had += f"{100 * unscored:.0f} % had no reward (None), " if unscored else ""
    advice = (
        f"Take more samples (algo.samples_per_prompt, algo.second_round_samples{hint}), or lower"
        " algo.select.accept."
    )
    if cut >= MOST_CUT:  # more samples would be cut off as well
        tokens = work.cfg.sampling.max_new_tokens
        advice = (
            "Those are never accepted, however many there are. Give them room to end:"
            f" algo.sampling.max_new_tokens={2 * tokens} (now {tokens}); if as many are cut off"
            " then, the model writes no end: use a model or a template that ends its answers."
        )
    return ConfigError(
        f"no completion of iteration {iteration} was accepted, so there is nothing to learn from:"
        f" {had}{100 * cut:.0f} % were cut off. {advice}"
    )


def _write_selection(work: Work, selection: Selection, iteration: int) -> None:
    stats, folder = selection.stats, work.folder.of(iteration)
    fresh = json.loads(json.dumps({"made_with": asdict(work.cfg.select), **stats}))
    if fresh != read_json(folder / "selected.json"):  # else a run that was killed has logged it
        work.journal.write("select", iteration, **stats)
        work.journal.sync()
    write_json(folder / "selected.json", fresh)
    rows = [record for records in selection.kept.values() for record in records]
    write_jsonl(folder / "selected.jsonl", rows, ascii_only=False)
    percent = {key: f"{100 * stats[f'{key}_share']:.0f} %" for key in ("solved", "all_right")}
    cut = f"{100 * stats['truncated_share']:.0f} %"
    log.info(
        f"iteration {iteration}: {stats['accepted']} of {stats['samples']} samples right,"
        f" {percent['solved']} of {stats['prompts']} prompts solved ({percent['all_right']} always"
        f" right), {stats['paths_per_solved_prompt']:.1f} ways per solved prompt, {stats['kept']}"
        f" completions kept; {cut} were cut off; entropy {stats['entropy']:.2f}"
    )
    if stats["truncated_share"] > MANY_CUT:
        event = {name: stats[f"{name}_share"] for name in ("truncated", "repeating")}
        why, _ = advice.explain_cut_off([event], advice.settings(work.cfg))
        log.warning(f"{cut} of the samples were cut off, and those are never accepted. {why}")
    histogram = stats["prompts_by_share_right"]
    log.info("samples right  " + "  ".join(f"{name:>9}" for name in histogram))
    log.info("prompts        " + "  ".join(f"{count:>9}" for count in histogram.values()))


# --- fine-tune


def finetune(work: Work, iteration: int) -> None:
    """Train on the selected completions; writes the model, or the adapter, to RUN/iteration-K."""
    cfg, journal, folder = work.cfg, work.journal, work.folder.of(iteration)
    if work.folder.finished(iteration):
        return
    if "made_with" not in (saved := read_json(folder / "selected.json")):
        raise ConfigError(f"{folder / 'selected.json'} is missing. Make it: algo.stage=select.")
    # The stage `select` shows the training data of fine-tuning: both must have the same settings.
    check_same(folder / "selected.json", saved["made_with"], asdict(cfg.select))
    selection = work.select(iteration)
    if not selection.kept:
        raise _lacks_data(work, selection, iteration)
    work.folder.begin(iteration)
    asked = {example.id: example for example in work.prompts.train}
    prompts = encode_prompts(
        work.parts.lm.tokenizer, [work.parts.task.prompt(asked[i]) for i in selection.kept]
    )
    pairs = zip(prompts, selection.kept.values(), strict=True)
    trees = [
        Tree(
            prompt, [record["tokens"] for record in rows], [find_written(record) for record in rows]
        )
        for prompt, rows in pairs
    ]
    ids = dict(zip(map(tuple, prompts), selection.kept, strict=True))
    work.load(0 if cfg.start_from == "base" else iteration - 1, sampling=False)
    parts = work.parts
    work.train_limit.lower(work.sizes.lower("train_rows", work.train_limit.rows))
    tuning = Tuning(parts, trees, folder, parts.run.seed + iteration, work.train_limit)
    record = finetuned_with(parts.run)
    tuning.resume(record)
    work.mark_loaded(None)  # until the iteration is finished
    journal.begin(f"iteration {iteration}, fine-tuning", tuning.total, tuning.done, "step")
    limits = replace(parts.run.budget, tokens=None)  # it generates none
    # A run that goes on may have used all of it.
    enough = bool(tuning.done) and journal.budget(limits).spent
    if parts.run.opt.compile.training and not enough:
        journal.session.warm_up(tuning.tuner.rehearse)
    for step in () if enough else tuning.steps[tuning.done :]:
        make_step(work, tuning, step, ids, iteration)
        enough, stopping = journal.budget(limits).spent, journal.session.stopping
        every, left = parts.run.checkpoint.every, tuning.done < tuning.total
        if left and ((every and tuning.done % every == 0) or stopping):
            journal.sync()
            tuning.save({"made_with": record, "iteration": iteration})
        if stopping and left:
            raise journal.stop(iteration, "finetune")
        if enough:
            break
    _export(work, tuning, selection, iteration)


def make_step(
    work: Work, tuning: Tuning, trees: list[Tree], ids: dict[Any, Any], iteration: int
) -> None:
    """Make an optimizer step and write its event. Raises: RunStopped."""
    journal, parts = work.journal, work.parts
    started, timer, tuner = time.perf_counter(), Timer(), tuning.tuner
    numbers = tuning.step(trees, timer)
    if (what := tuner.guards.not_finite(numbers)) is not None:
        rows = [
            {
                "id": ids[tuple(tree.prompt)],
                "prompt": parts.lm.tokenizer.decode(tree.prompt),
                "completion": parts.lm.tokenizer.decode(tokens),
            }
            for tree in tuner.offending(trees)
            for tokens in tree.completions
        ]
        journal.non_finite(what, rows, optim.Guards.ADVICE)
    elif (trouble := tuner.guards.trouble(numbers)) is not None:
        raise RunStopped(f"fine-tuning step {tuning.done}: {trouble}", EXIT_NUMBERS)
    seconds = time.perf_counter() - started
    speed = numbers["trained_tokens"] / seconds
    event = {
        "stage": "finetune",
        "iteration": iteration,
        "train_step": tuning.done,
        **numbers,
        "seconds": seconds,
        "phase_seconds": timer.seconds,
        "tokens_per_second": speed,
        "peak_memory_gb": hardware.peak_memory_gb(parts.lm.device),
    }
    journal.log(event, tuning.done, f"loss {numbers['loss']:.4f}, {speed:,.0f} tokens/s")
    work.sizes.keep("train_rows", tuner.limit.rows)


def _export(work: Work, tuning: Tuning, selection: Selection, iteration: int) -> None:
    """Write the model of an iteration, and the settings that it was made with."""
    parts, journal, folder = work.parts, work.journal, work.folder.of(iteration)
    cut = tuning.done < tuning.total
    if parts.context.main and cut:
        done = f"{tuning.done} of {tuning.total} steps"
        log.info(f"iteration {iteration}: the budget is spent after {done}")
    weights = parts.lm.sharding.whole() if parts.lm.adapter is None else None
    journal.sync()
    if parts.context.main:
        about = {"made_with": finetuned_with(parts.run), "steps": tuning.done}
        about |= {"completions": selection.stats["kept"]} | ({"cut": True} if cut else {})
        write_json(folder / "finetune.json", about)
        place = work.folder.trained(iteration)
        if parts.lm.adapter is None:
            export_model(parts.lm.model, parts.lm.tokenizer, place, weights)
        else:
            parts.lm.adapter.save(place, parts.lm.tokenizer)
        if journal.tracker:
            journal.tracker.artifact("model", place, f"iteration-{iteration}")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    parts.lm.model.eval()
    work.mark_loaded(iteration)
    parts.context.meet()  # the export may take longer than a collective waits


# --- evaluate


def evaluate(work: Work, iteration: int) -> dict[str, Any]:
    """Evaluate an iteration's model on held-out and validation prompts; 0 = the base model."""
    journal, prompts = work.journal, work.prompts
    if (saved := work.folder.evaluated(iteration, prompts)) is not None:
        _tell(work, saved)
        return saved
    work.parts.context.barrier()  # no rank reads after rank 0 has written
    started = time.perf_counter()
    work.load(iteration)
    parts = work.parts
    held_out = parts.evaluate(work.cfg.select.accepts)
    if iteration == 0:
        completions = len(prompts.held_out) * parts.run.evaluate.repeats
        journal.session.budget.foresee(parts.run, held_out, completions)
    validation = parts.evaluator.measure(prompts.validation).value if prompts.validation else None
    if "answered" not in held_out.metrics and TaskFeatures(parts.task).answer:
        answered = [100.0 * (parts.task.answer(text) is not None) for text in held_out.completions]
        held_out.add({"answered": (sum(answered) / len(answered), answered)})
    evaluated = {
        "made_with": evaluated_with(parts.run, prompts, work.folder.digests),
        "iteration": iteration,
        "metric": held_out.name,
        "validation": validation,
        **held_out.content(),
    }
    event = {
        "evaluate_seconds": time.perf_counter() - started,
        "metric": held_out.value,
        "metric_name": held_out.name,
        "metrics": held_out.metrics,
        "validation": validation,
    }
    journal.write("evaluate", iteration, **event, **journal.used)
    if journal.tracker:
        rows = summary.completion_rows(parts.task, prompts.held_out, held_out.content())
        name = f"iteration-{iteration}" if iteration else "before"
        journal.tracker.completions(name, journal.step, rows)
        journal.sync()
        # Last: with it the evaluation is done.
        write_json(work.folder.of(iteration) / "evaluation.json", evaluated)
    _tell(work, evaluated)
    parts.context.barrier()
    return evaluated


def _tell(work: Work, found: dict[str, Any]) -> None:
    if work.parts.context.main:
        what = f"iteration {found['iteration']}" if found["iteration"] else "base"
        measures = ", ".join(f"{name} {value:.1f}" for name, value in found["metrics"].items())
        log.info("%s: held-out %s", what, measures)
