"""The given answers of training examples as token ids, with marks of the tokens that carry loss.

Where they come from (algo.answers): the answer of a row, its worked solution, the assistant's turns
of a conversation, or a game that the task can play (`teach`).
"""

import random
from dataclasses import dataclass
from typing import Any

from common.config import ConfigError, Run
from common.distributed import Context
from common.episodes import Given, Transcriber
from common.examples import Examples, read_examples, set_aside
from common.finetune import Tree
from common.language_model import LanguageModel
from common.model import check_ids, context_length, context_name
from common.task import Conversation, Example, Messages, TaskFeatures, class_name
from common.tasks import ExampleOrder


@dataclass(frozen=True, kw_only=True)
class GivenExamples(Examples):
    """The examples of a run that learns from given answers.

    Attributes:
        trees: the prompt and the answer of each training example, by its id.
        longest_answer: the number of tokens of the longest answer, with the turns after the first.
        cut: the number of examples that are left out because they do not fit the context.
    """

    trees: dict[int, Tree]
    longest_answer: int
    cut: int


def read_given(run: Run, lm: LanguageModel, task: Any) -> GivenExamples:
    """Read the examples of a run and encode the answers of its training examples.

    Raises: ConfigError for an example without an answer, or one that does not fit the context.
    """
    examples = read_examples(run, lm, task)
    source, context = Source(run, lm, task), context_length(lm.model)
    trees, long = dict[int, Tree](), list[tuple[Any, int]]()
    for example in examples.order.examples:
        tree = source.encode(example)
        size = len(tree.prompt) + len(tree.completions[0])
        ids = [*tree.prompt, *tree.completions[0]]
        check_ids(lm.model, lm.tokenizer, ids, f"training example {example.id}")
        if size > context:
            long.append((example.id, size))
        else:
            trees[example.id] = tree
    if long and (run.prompts.too_long == "error" or not trees):
        which, size = long[0]
        raise ConfigError(
            f"{len(long)} of {len(examples.order.examples)} training examples do not fit the"
            f" model's {context_name(lm.model)} of {context} tokens with their answers: the first"
            f" is example {which} with {size} tokens. Shorten them, or leave them out with"
            " prompts.too_long=skip."
        )
    kept = [example for example in examples.order.examples if example.id in trees]
    fields: dict[str, Any] = vars(examples) | {"order": ExampleOrder(kept, run.seed)}
    longest = max(len(tree.completions[0]) for tree in trees.values())
    return GivenExamples(**fields, trees=trees, longest_answer=longest, cut=len(long))


def check_answers(run: Run, context: Context, task: Any) -> None:
    """Raise ConfigError if training examples lack what algo.answers names. It needs no model, so
    that a mistake is found before a tiny one is pre-trained.
    """
    wanted = choose_source(run, task)
    if wanted == "teach":
        return
    train, _ = set_aside(run, list(task.examples("train")), context.out_dir)
    lacking = [example for example in train if not find_text(task, wanted, example).strip()]
    # With prompts.too_long=skip those that lack one may be left out by their length.
    if lacking and (run.prompts.too_long == "error" or len(lacking) == len(train)):
        raise _no_answer(wanted, lacking[0])


def choose_source(run: Run, task: Any) -> str:
    """Return where a task's answers come from: algo.answers, but teach in place of auto if the task
    has episodes.

    Raises: ConfigError if the task lacks what algo.answers names.
    """
    features, wanted = TaskFeatures(task), run.algo.answers
    if wanted == "auto" and features.episode:
        wanted = "teach"
    if wanted == "teach" and features.teach is None:
        other = "an algorithm that learns from rewards"
        other = other if features.episode else "algo.answers=auto"
        raise ConfigError(
            f"algo.answers={run.algo.answers}: {class_name(task)} has no method teach, which"
            f" plays an episode to learn from. Add one, or use {other}."
        )
    if wanted == "solution" and features.solution is None:
        raise ConfigError(
            f"algo.answers=solution: {class_name(task)} has no worked solutions. With"
            " task=custom give task.solution_field; or use algo.answers=answer."
        )
    return wanted


def find_text(task: Any, wanted: str, example: Example) -> str:
    """Return the answer of an example; "" if it has none. Args: wanted: auto, answer or
    solution.
    """
    answer, solution = "", TaskFeatures(task).solution
    if wanted in ("auto", "solution") and solution is not None:
        answer = solution(example) or ""
    return answer or example.answer if wanted in ("auto", "answer") else answer


def _no_answer(wanted: str, example: Example) -> ConfigError:
    what, advice = "answer", "task.answer_field, or conversations that end with an answer"
    if wanted == "solution":
        what, advice = "worked solution", "one, or use algo.answers=auto"
    return ConfigError(
        f"algo.answers={wanted}: training example {example.id} has no {what} to learn from:"
        f" {example.question!r:.60}. Give {advice}; or leave the row out (task.incomplete=skip, for"
        " rows without what a field of the task names)."
    )


class Source:
    """Encodes the answers of examples.

    Raises: ConfigError if the task lacks what algo.answers names, or the tokenizer an end of text.
    """

    def __init__(self, run: Run, lm: LanguageModel, task: Any) -> None:
        self.run, self.task = run, task
        self.features, self.wanted = TaskFeatures(task), choose_source(run, task)
        self.transcriber = Transcriber(lm.decode, lm.stop_ids)

    def encode(self, example: Example) -> Tree:
        """Return the prompt and the answer of an example.

        Raises: ConfigError for an example without an answer.
        """
        given = self._teach(example) if self.wanted == "teach" else self._answer(example)
        return Tree(given.prompt, [given.tokens], [given.trains])

    def _teach(self, example: Example) -> Given:
        """Return an episode that the task plays, a function of the run's seed and the example."""
        assert self.features.teach is not None
        draw = random.Random(f"teach {self.run.seed} {example.id}")
        messages, tools = self.features.teach(example, draw), getattr(self.task, "tools", ())
        return self.transcriber.converse(messages, _find_answer(messages), tools)

    def _answer(self, example: Example) -> Given:
        """Return the prompt of an example and its own answer."""
        answer = find_text(self.task, self.wanted, example)
        if not answer.strip():
            raise _no_answer(self.wanted, example)
        prompt = self.task.prompt(example)
        if isinstance(prompt, str):
            return self.transcriber.answer(prompt, answer)
        tools = prompt.tools if isinstance(prompt, Conversation) else []
        said = {"role": "assistant", "content": answer}
        if "weight" in example.extra:  # OpenAI's: 0 = no loss
            said["weight"] = example.extra["weight"]
        messages = [*prompt, said]
        # Other prompts may hold worked examples, which are no part of what is learnt.
        first = _find_answer(messages) if self.features.dialogues else len(prompt)
        given = self.transcriber.converse(messages, first, tools)
        if not any(given.trains):
            raise ConfigError(
                f"every turn of training example {example.id} has the weight 0, so there is nothing"
                " to learn from. Leave the row out."
            )
        return given


def _find_answer(messages: Messages) -> int:
    """Return the index of the assistant's first message."""
    return next(n for n, message in enumerate(messages) if message["role"] == "assistant")
