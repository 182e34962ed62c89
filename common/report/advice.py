"""Advice from a run's own numbers: each piece once while it runs, and a verdict at its end.

A rule reads the last events of metrics.jsonl. It gives advice if the run will learn nothing if it
continues like this, with the setting to change. docs/quickstart.md has the same advice as a list:
"What to do when a run does not learn".
"""

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from common.config import ScheduleConfig
from common.system import Numbers
from common.uncertainty import is_supported, show_interval, show_p

WINDOW = 20  # events that a rule reads
FEW = 10  # with fewer steps than this, the budget may be the reason that a run did not learn
LEAST = 3  # the fewest events for a mean, if the run has that many
SOLVED = 97.0  # held-out points from which on there is nothing left to learn
# Shares of a reward's known scale: the reward from which little is left to learn; the difference
# that counts as a rise.
HIGH, RISEN = 0.9, 0.1
NOISE = 3.0  # on an unknown scale, a rise is this many times the usual change between two events
ROUNDING = 1e-6  # the tolerance of a reward in [0, 1]
LIKELY = "Likely reason: "
DAMAGED = 0.02  # the relative rise of evaluate.text's bits per byte that is reported


@dataclass(frozen=True)
class Advice:
    """A problem of a run.

    Attributes:
        name: the name of the problem, which is reported once.
        text: its description.
        change: the override to try; "" if no setting helps.
    """

    name: str
    text: str
    change: str = ""

    @property
    def code(self) -> str:
        """The name for programs, which stays the same in later versions: dead-groups."""
        return self.name.replace(" ", "-")

    def content(self) -> dict[str, Any]:
        """Return the advice for result.json: its code, text, and the settings to try by key."""
        key, _, value = self.change.partition("=")
        try:
            setting = json.loads(value)
        except ValueError:
            setting = value
        settings = {key: setting} if key else {}
        return {"code": self.code, "text": self.text.strip(), "settings": settings}


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    Attributes:
        outcome: learnt, worse or not-learnt, each as far as the numbers support it.
        text: the verdict in words.
        change: the override to try next; "" if there is none.
        advice: the problems, the most likely reason first.
    """

    outcome: str
    text: str
    change: str
    advice: list[Advice]


@dataclass(frozen=True)
class Scale:
    """The sizes of rewards that rules compare with.

    Attributes:
        known: whether the reward is in [0, 1]; a user's own may be any finite number.
        rise: the least difference that counts as a rise.
        high: the reward from which a model counts as having learnt, so that steps without a signal
            do no harm.
    """

    known: bool = True
    rise: float = RISEN
    high: float = HIGH

    @classmethod
    def of(cls, events: Sequence[Numbers], algo: dict[str, Any]) -> "Scale":
        """Return the scale of a run; if the reward's range is not known, derived from the changes
        of its rewards.
        """
        rewards = [event["reward"] for event in events if event.get("reward") is not None]
        if algo.get("bounded", True) and all(-ROUNDING <= r <= 1 + ROUNDING for r in rewards):
            return cls()
        changes = [abs(b - a) for a, b in pairwise(rewards)]
        rise = NOISE * median(changes) if len(changes) >= LEAST else math.inf
        rise = rise or math.inf  # of a reward that never changes
        return cls(False, rise, rewards[0] + rise if rewards else math.inf)


def find_advice(events: Sequence[Numbers], algo: dict[str, Any]) -> list[Advice]:
    """Return the advice of all rules for the latest events; only the collapse if there is one,
    since it causes other signs.

    Args: events: the first event, and at least the latest ones; algo: the settings of the
    algorithm.
    """
    algo, recent = _with_measured(algo, events), events[-WINDOW:]
    algo["scale"] = Scale.of(events, algo)
    if (collapse := _collapse(events, algo)) is not None:
        return [collapse]
    return [advice for rule in RULES if (advice := rule(recent, algo)) is not None]


def settings(
    algo: Any, room: int | None = None, task: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the settings that the algorithm uses: no other setting is recommended.

    Args:
        room: the new tokens that the context leaves after the longest prompt; None = not known.
        task: the settings of the task, which determine whether its reward is in [0, 1].
    """
    idle = algo.find_idle()
    heeded = {key: value for key, value in asdict(algo).items() if f"algo.{key}" not in idle}
    return heeded | {"room": room, "bounded": not (task or {}).get("rewards")}


# --- rules


def _mean(recent: Sequence[Numbers], name: str) -> float | None:
    values = [event[name] for event in recent if event.get(name) is not None]
    return fmean(values) if len(values) >= min(LEAST, len(recent)) and values else None


def _with_measured(algo: dict[str, Any], events: Sequence[Numbers]) -> dict[str, Any]:
    """Return the settings with each "auto" replaced by the number that the run logged, before its
    schedule was applied.
    """
    measured = {}
    for key in [key for key, value in algo.items() if value == "auto"]:
        schedule, steps = algo.get(f"{key}_schedule"), algo.get("steps")
        before = [event[key] for event in events if event.get(key)]
        if schedule and steps:
            factor, last = ScheduleConfig(**schedule).factor, max(1, steps - 1)
            before = [e[key] / factor((e["step"] - 1) / last) for e in events if e.get(key)]
        if before:  # the largest, as a warm-up comes before it
            measured[key] = max(before)
    return algo | measured


def _times(algo: dict[str, Any], key: str, factor: float) -> str:
    """Return the override that multiplies a setting; "" if the algorithm does not have it."""
    value: Any = algo
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(value, (int, float)) or not value:
        return ""
    # A rate may be given as a whole number, too, but a count is only ever raised.
    new = round(value * factor) if isinstance(value, int) and factor > 1 else value * factor
    return f"algo.{key}={new:.3g}" if isinstance(new, float) else f"algo.{key}={new}"


_DEAD = {
    "dead_all_wrong": "no sample is right, so the prompts are too hard for this model. Begin with"
    " easier ones, use a reward that has parts, or a better base model",
    "dead_all_right": "all samples are right, so there is nothing left to learn in them. Give"
    " harder prompts",
    "dead_cut_off": "all samples are cut off",
    "dead_unscored": "no sample has a reward (None)",
    "dead_all_equal": "all samples earn the same. Use a finer reward, or draw more varied samples",
}


def _dead_groups(recent: Sequence[Numbers], algo: dict[str, Any]) -> Advice | None:
    share = _mean(recent, "dead_groups")
    cause = max(_DEAD, key=lambda name: _mean(recent, name) or 0.0)
    learns = _rises if cause == "dead_all_right" else _learns
    if share is None or share < 0.6 or learns(recent, algo) or _unscored(recent, algo):
        return None
    helpless = ("dead_all_right", "dead_unscored")
    change = "" if cause in helpless else _times(algo, "samples_per_prompt", 2)
    text = f"{share:.0%} of the groups teach nothing: in most of them {_DEAD[cause]}."
    if cause == "dead_cut_off":
        why, change = explain_cut_off(recent, algo)
        text += f" {why}"
    return Advice("dead groups", text, change)


def _unscored(recent: Sequence[Numbers], algo: dict[str, Any]) -> Advice | None:
    scored = [event for event in recent if event.get("reward") is not None]
    share = fmean([event.get("unscored") or 0.0 for event in scored] or [0.0])
    if share < 0.5:
        return None
    text = f"{share:.0%} of the samples have no reward (None), and teach nothing. Let the reward be"
    return Advice("unscored", f"{text} a number wherever a sample can be judged.")


def _truncated(recent: Sequence[Numbers], algo: dict[str, Any]) -> Advice | None:
    share = _mean(recent, "truncated")
    if share is None or share < 0.5 or _is_high(recent, algo):
        return None
    why, change = explain_cut_off(recent, algo)
    text = f"{share:.0%} of the samples are cut off before they end. {why}"
    return Advice("truncation", text, change)


_END = "reward an end, first fine-tune on samples that do end, or take a larger model"


def explain_cut_off(recent: Sequence[Numbers], algo: dict[str, Any]) -> tuple[str, str]:
    """Return the reason that samples are cut off, with advice, and the override to try."""
    share, loops, reward = (_mean(recent, n) or 0.0 for n in ("truncated", "repeating", "reward"))
    most, room = algo["sampling"]["max_new_tokens"], algo.get("room")
    twice = 2 * most if room is None else min(2 * most, room)
    more = f"algo.sampling.max_new_tokens={twice}" if twice > most else ""
    if loops <= share / 2 and share < 0.9:
        return "Others end, so the limit is short of the answers: give them more tokens.", more
    known = algo.get("scale", Scale()).known
    if loops <= share / 2 and (reward < RISEN or not known):
        text = "The limit is short of the answers, or the model goes on behind them: give more"
        return f"{text} tokens once, and if as few end then, {_END}.", more
    why = f"They earn {reward:.2f} all the same: the model writes no stop token."
    if loops > share / 2:
        why = "Most of these repeat themselves, which more tokens do not change."
    # A penalty ranks the members of a group if one of them is right, and has no effect otherwise.
    mixed = known and reward >= RISEN
    buffer = most // 4 if mixed and algo.get("overlong_buffer") == 0 else 0
    change = f"algo.overlong_buffer={buffer}" if buffer else ""
    return f"{why} To make them end, {_END}.", change


def _rises(recent: Sequence[Numbers], _: dict[str, Any]) -> bool:
    rewards = [event["reward"] for event in recent if event.get("reward") is not None]
    half = len(rewards) // 2
    return half > 0 and fmean(rewards[half:]) > fmean(rewards[:half])


def _is_high(recent: Sequence[Numbers], algo: dict[str, Any]) -> bool:
    """Return whether the reward leaves little to learn, or, on an unknown scale, has risen."""
    reward = _mean(recent, "reward")
    return reward is not None and reward > algo["scale"].high


def _learns(recent: Sequence[Numbers], algo: dict[str, Any]) -> bool:
    """Return whether the reward rises, or leaves little to learn, in which case few samples have a
    signal.
    """
    return _rises(recent, algo) or _is_high(recent, algo)


# Numbers that fall, and shares that rise, when the samples of a model become all alike.
_FALLS = {"entropy": "the entropy", "length": "the length of samples"}
_SHARES = {"dead_groups": "groups that teach nothing", "repeating": "samples in a loop"}


def _ends(events: Sequence[Numbers], name: str) -> tuple[float, float]:
    values = [event[name] for event in events if event.get(name) is not None]
    return (values[0], fmean(values[-LEAST:])) if len(values) > LEAST else (1.0, 1.0)


def _collapse(events: Sequence[Numbers], algo: dict[str, Any]) -> Advice | None:
    first, last = _ends(events, "reward")
    scale = algo["scale"]
    least = min(RISEN, (1 - first) / 5) if scale.known else scale.rise
    if last > scale.high or last - first >= least:
        return None  # a model that learns grows sure of itself
    ends = {name: _ends(events, name) for name in (*_FALLS, *_SHARES)}
    said = [(_FALLS[n], *ends[n]) for n in _FALLS if ends[n][1] < ends[n][0] / 5]
    said += [(_SHARES[n], *ends[n]) for n in _SHARES if ends[n][0] < 0.6 and ends[n][1] > 0.9]
    if not said:
        return None
    said = ", ".join(f"{what} went from {a:.2g} to {b:.2g}" for what, a, b in said)
    text = f"the model has collapsed: {said}, at a reward of {last:.2f}, {first:.2f} at first."
    advice = "It moves too fast: begin anew with smaller steps, as more of them only go on."
    return Advice("collapse", f"{text} {advice}", _times(algo, "lr", 0.1))


def _drift(recent: Sequence[Numbers], algo: dict[str, Any]) -> Advice | None:
    drift = max((event.get("drift") or 0.0 for event in recent), default=0.0)
    if drift < 0.7 or _learns(recent, algo):  # a small model that learns moves far
        return None
    text = f"the weights have moved by {drift:.0%} of their own size, which few models survive."
    return Advice("drift", f"{text} Lower the step size.", _times(algo, "lr", 0.3))


def _pull(recent: Sequence[Numbers], algo: dict[str, Any]) -> Advice | None:
    kl = _mean(recent, "kl")
    if kl is None or kl < 1:
        return None
    text = f"the KL to the initial model is {kl:.2g} per token, so what it knew may be lost."
    return Advice("kl", f"{text} Lower the learning rate.", _times(algo, "lr", 0.3))


def _spread(recent: Sequence[Numbers], algo: dict[str, Any]) -> Advice | None:
    spread = _mean(recent, "reward_std")
    if "sigma" not in algo or spread is None or spread > 1e-9 or _learns(recent, algo):
        return None
    text = "all members of the population earn the same, so there is no direction to move in."
    advice = "Raise the noise, or use a finer reward."
    return Advice("zero spread", f"{text} {advice}", _times(algo, "sigma", 3))


def _unsolved(recent: Sequence[Numbers], algo: dict[str, Any]) -> Advice | None:
    solved = next((e["solved"] for e in reversed(recent) if e.get("solved") is not None), None)
    if solved is None or solved >= 0.1:
        return None
    text = f"only {solved:.0%} of the prompts are ever solved, so there is little to learn from."
    advice = "Take more samples, easier prompts, or a better base model."
    return Advice("unsolved", f"{text} {advice}", _times(algo, "samples_per_prompt", 2))


def _identical(recent: Sequence[Numbers], algo: dict[str, Any]) -> Advice | None:
    share = _mean(recent, "identical_pairs")
    if share is None or share < 0.7 or _learns(recent, algo):  # the others teach enough
        return None
    text = f"{share:.0%} of the answers of mirrored members are the same text and teach nothing."
    return Advice("identical pairs", f"{text} Raise the noise.", _times(algo, "sigma", 2))


def _idle(recent: Sequence[Numbers], algo: dict[str, Any]) -> Advice | None:
    share, same = _mean(recent, "zero_fitness"), _mean(recent, "identical_pairs")
    spread = _mean(recent, "reward_std") or 0.0
    # Identical answers, and rewards without a spread, have an advice of their own.
    if (
        share is None
        or share < 0.7
        or (same or 0.0) >= 0.7
        or spread <= 1e-9
        or _learns(recent, algo)
    ):
        return None
    text = f"{share:.0%} of the members move nothing, although they answer differently: they earn"
    advice = "the same as their mirrored ones. Use a finer reward, or give a step more prompts."
    return Advice("idle members", f"{text} {advice}", _times(algo, "prompts_per_step", 2))


def _rounded(recent: Sequence[Numbers], algo: dict[str, Any]) -> Advice | None:
    followed = [e["applied_cosine_all"] for e in recent if e.get("applied_cosine_all") is not None]
    if not followed or followed[-1] >= 0.5 or _learns(recent, algo):
        return None
    text = "most of what the weights have moved is lost in rounding: the cosine of the model that"
    text += f" answers with the float32 masters is {followed[-1]:.2f}."
    advice = "More steps add up in the masters; larger ones are seen at once."
    return Advice("rounding", f"{text} {advice}", _times(algo, "lr", 2))


def _broken(recent: Sequence[Numbers], algo: dict[str, Any]) -> Advice | None:
    looked = [event for event in recent if event.get("reward_centre") is not None]
    reward, centre = _mean(looked, "reward"), _mean(looked, "reward_centre")
    if reward is None or centre is None or centre < RISEN or reward > centre / 2:
        return None
    if not algo["scale"].known:  # half of it says nothing then
        return None
    text = f"members earn {reward:.2f} where the model without noise earns {centre:.2f}."
    return Advice("broken", f"{text} Lower the noise.", _times(algo, "sigma", 0.5))


def _luck(recent: Sequence[Numbers], algo: dict[str, Any]) -> Advice | None:
    agreement = _mean(recent, "prompt_agreement")
    if agreement is None or agreement > 0.03 or _learns(recent, algo):
        return None  # a run that learns averages luck out over its steps
    text = f"two halves of a step's prompts disagree on the members (cosine {agreement:.2f})."
    advice = "What a member earns is mostly luck: give a step more prompts."
    return Advice("luck", f"{text} {advice}", _times(algo, "prompts_per_step", 2))


def _one_sided(recent: Sequence[Numbers], algo: dict[str, Any]) -> Advice | None:
    looked = [event["component_cosine"] for event in recent if event.get("component_cosine")]
    names = {name for cosines in looked for name in cosines}
    means = {name: fmean(c.get(name, 0.0) for c in looked) for name in names}
    earned = [event.get("components") or {} for event in recent]
    # A component that nearly all samples earn has no signal left.
    left = [name for name in means if (_mean(earned, name) or 0.0) < 0.9]
    if not left:
        return None
    most, least = max(means, key=lambda n: means[n]), min(left, key=lambda n: means[n])
    if means[most] < 0.7 or means[least] > 0.2:
        return None
    advice = "If that is what counts, give it more weight."
    if algo.get("fitness") == "component_zscore":  # which counts all alike
        advice = "If that is what counts, use algo.fitness=zscore with more weight for it."
    return Advice(
        "one component",
        f"the updates follow the component {most} of the reward (cosine {means[most]:.2f}) and"
        f" hardly {least} ({means[least]:.2f}). {advice}",
    )


Rule = Callable[[Sequence[Numbers], dict[str, Any]], Advice | None]
RULES: tuple[Rule, ...] = (_unscored, _dead_groups, _truncated, _drift, _pull, _spread)
RULES += (_unsolved, _broken, _identical, _idle, _rounded, _luck, _one_sided)


class Adviser:
    """Applies the rules to each event; returns advice that has not been given yet."""

    def __init__(self, algo: dict[str, Any]) -> None:
        self.algo, self.recent, self.given = algo, [], set[str]()
        self.began: Numbers = {}  # by name the first value

    def look(self, event: Numbers) -> list[Advice]:
        """Add an event. Returns new advice, once there are enough events."""
        self.recent = [*self.recent, event][-WINDOW:]
        self.began = event | self.began
        if len(self.recent) < WINDOW:
            return []
        fresh = find_advice([self.began, *self.recent], self.algo)
        fresh = [advice for advice in fresh if advice.name not in self.given]
        self.given |= {advice.name for advice in fresh}
        return fresh


# --- the end of a run


def judge(result: Any, examples: int, events: Sequence[Numbers], algo: dict[str, Any]) -> Verdict:
    """Return the verdict on a run.

    Args: result: the outcome of the run; examples: the number of held-out examples, at least 1.
    """
    algo = _with_measured(algo, events)
    algo["scale"] = Scale.of(events, algo)
    gain, sure = result.after - result.before, result.intervals.get(result.metric, {})
    within, p = sure.get("change"), sure.get("p_value")
    known = f"95 % {show_interval(within, signed=True)}, {show_p(p)}, " if within else ""
    what = (
        f"held-out {result.metric} {result.before:.1f} -> {result.after:.1f}, {gain:+.1f} points"
        f" ({known}{examples} examples)"
    ) + (f" by {result.answered_by}" if result.answered_by else "")
    slower = _times(algo, "lr", 0.3)
    lost = _loss_of_gain(result, events, (within[1] - within[0]) / 2) if within else ""
    texts = {"lost gain": "" if result.chosen else lost, "fallen": _fallen(result)}
    texts["forgetting"] = _damage(result.metrics)
    damages = [Advice(name, text, slower) for name, text in texts.items() if text]
    damage = "".join(one.text for one in damages)
    if gain > 0 and is_supported(within, p):
        change = slower if damage else ""
        return Verdict("learnt", f"it has learnt: {what}.{damage}", change, damages)
    worse = gain < 0 and is_supported(within, p)
    reason = _reason(result, events, algo, worse or bool(damage))
    if (damage and not reason.change.startswith("algo.lr=")) or (worse and not reason.change):
        reason = replace(reason, change=slower)
    verdict = "got worse" if worse else "not measurably learnt"
    text = f"it has {verdict}: {what}. {reason.text}{damage}"
    outcome = "worse" if worse else "not-learnt"
    likely = replace(reason, text=reason.text.removeprefix(LIKELY))
    return Verdict(outcome, text, reason.change, [likely, *damages])


def _loss_of_gain(result: Any, events: Sequence[Numbers], least: float) -> str:
    """Return a sentence on the best evaluation if it was at least `least` points above the last
    one, else "".
    """
    measured = [e for e in events if e.get("metric_name") == result.metric and "stage" not in e]
    best = max(measured, key=lambda event: event["metric"], default=None)
    if best is None or best["metric"] - result.after <= least:
        return ""
    return f" But it stood at {best['metric']:.1f} after step {best['step']}: take smaller steps."


def _fallen(result: Any) -> str:
    """Return a sentence on the choice of a model before the last one, else ""."""
    chosen = result.chosen
    if not chosen or chosen["step"] in (0, result.steps):
        return ""
    return (
        f" It is the model of step {chosen['step']}: later ones were worse on the validation"
        f" examples ({chosen['value']:.1f} -> {chosen['last']:.1f}). Take smaller steps, or fewer."
    )


def _damage(metrics: dict[str, dict[str, float]]) -> str:
    """Return a sentence on the loss on evaluate.text, or "" if it is small."""
    old, new = (metrics[when].get("text/bits_per_byte", 0.0) for when in ("before", "after"))
    if not old or new <= (1 + DAMAGED) * old:  # it may be measured since the run was resumed
        return ""
    text = (
        f" But evaluate.text went from {old:.2f} to {new:.2f} bits per byte ({new / old - 1:+.0%})"
    )
    return f"{text}: the model loses what it knew. Take smaller steps."


def _reason(result: Any, events: Sequence[Numbers], algo: dict[str, Any], worse: bool) -> Advice:
    """Return the likely reason that a run learnt nothing, with the override to try next."""
    own = result.metric == "reward" and not algo["scale"].known  # no percentage
    if result.before >= SOLVED and not own:
        return Advice("solved", "There was nothing left to learn: give harder prompts.")
    if result.steps == 0:
        text = "No step was made: what came before the first one used up the budget."
        return Advice("no step", text)
    if collapse := _collapse(events, algo):
        return replace(collapse, text=LIKELY + collapse.text)
    if (result.ended_by or "").startswith("algo.retire_at"):
        text = "Its prompts were solved: give more of them, or raise algo.retire_at."
        return Advice("retired", text)
    key, _, limit = (result.ended_by or "").partition("=")
    if key.startswith("budget.") and result.steps < FEW and not worse:
        count = "one step" if result.steps == 1 else f"{result.steps} steps"
        text = f"{result.ended_by} left time for {count} alone, which is too few to tell."
        return Advice("short budget", text, f"{key}={float(limit) * 10:g}")
    if result.chosen and result.chosen["step"] == 0:
        text = "Every later model was worse than the base on the validation examples, so the base"
        text += " is exported. Take smaller steps."
        return Advice("base is best", text, _times(algo, "lr", 0.3))
    if result.iteration == 0:
        text = "No iteration was better than the base model on the validation prompts."
        return Advice("no better iteration", text, _times(algo, "samples_per_prompt", 2))
    rewards = [event["reward"] for event in events if event.get("reward") is not None]
    part = max(1, len(rewards) // 5)
    first, last = 0.0, 0.0
    if len(rewards) >= LEAST:
        first, last = fmean(rewards[:part]), fmean(rewards[-part:])
    rise = algo["scale"].rise
    if last - first >= rise:
        return Advice(
            "memorised",
            f"The reward of training samples rose from {first:.2f} to {last:.2f}, so it has"
            " learnt its training rows, or what the reward counts, and not what is measured."
            " Give more rows, and read completions/ for a reward that is gamed.",
        )
    reasons = find_advice(events, algo)  # in a worse model, larger steps would lose more
    if reasons := [advice for advice in reasons if not (worse and advice.name == "rounding")]:
        return replace(reasons[0], text=LIKELY + reasons[0].text)
    if first - last >= rise and "lr" in algo:
        text = f"The reward of training samples fell from {first:.2f} to {last:.2f}."
        return Advice("falling reward", f"{text} It moves too fast.", _times(algo, "lr", 0.3))
    known = len(rewards) >= LEAST
    if worse and "lr" in algo:
        text = "The reward of training samples hardly moved meanwhile. " if known else ""
        return Advice("large steps", f"{text}Smaller steps lose less.", _times(algo, "lr", 0.3))
    text = "Nothing better has been found: it needs more steps."
    if "lr" in algo and known:
        text = "The reward of training samples hardly moved: it needs more steps, or larger ones."
    change = _times(algo, "steps", 3) or _times(algo, "iterations", 2) or _times(algo, "lr", 3)
    return Advice("more steps", text, change)


def command(arguments: Sequence[str], change: str) -> str:
    """Return the command of a run with one override changed, and without its run folder."""
    key = change.partition("=")[0]
    dropped = (f"{key}=", "hydra.run.dir=", "resume=")
    if key == "algo.steps":  # which epochs are another way to give
        dropped += ("algo.epochs=",)
    others = [text for text in arguments if not text.lstrip("+").startswith(dropped)]
    return shlex.join(["python", "launch.py", *others, change])
