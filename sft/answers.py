"""The given answers of training examples as token ids, with marks of the tokens that carry loss.

Where they come from (algo.answers): the answer of a row, its worked solution, the assistant's turns
of a conversation, or a game that the task can play (`teach`).
"""

import random
from dataclasses import dataclass
from typing import Any

from common.config import ConfigError, Run
from common.episodes import Given, encode_answer, encode_given, find_end
from common.examples import Examples, read_examples
from common.finetune import Tree
from common.language_model import LanguageModel
from common.model import check_ids, context_length, context_name, encode_prompts
from common.task import Conversation, Example, Messages, TaskFeatures, class_name
from common.tasks import ExampleOrder


@dataclass(frozen=True, kw_only=True)
class GivenExamples(Examples):
    """The examples of an SFT run.

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


class Source:
    """Encodes the answers of examples."""

    def __init__(self, run: Run, lm: LanguageModel, task: Any) -> None:
        self.run, self.lm, self.task = run, lm, task
        features, wanted = TaskFeatures(task), run.algo.answers
        self.solutions, self.teach = features.solutions, features.teach
        if wanted == "auto":
            wanted = "teach" if features.episode and self.teach else "auto"
        lacking = {"solution": not self.solutions, "teach": self.teach is None}
        if lacking.get(wanted):
            what = {"solution": "worked solutions (task.solution_field)", "teach": "method teach"}
            raise ConfigError(
                f"algo.answers={wanted}: {class_name(task)} has no {what[wanted]}. Use"
                " algo.answers=answer."
            )
        self.wanted = wanted

    def encode(self, example: Example) -> Tree:
        """Return the prompt and the answer of an example.

        Raises: ConfigError for an example without an answer.
        """
        given = self._taught(example) if self.wanted == "teach" else self._answered(example)
        return Tree(given.prompt, [given.tokens], [given.trains])

    def _taught(self, example: Example) -> Given:
        """Return an episode that the task plays, a function of the run's seed and the example."""
        assert self.teach is not None
        messages = self.teach(example, random.Random(f"teach {self.run.seed} {example.id}"))
        tools = list(getattr(self.task, "tools", ()))
        return encode_given(self.lm.decode, messages, _first_answer(messages), tools)

    def _answered(self, example: Example) -> Given:
        """Return the prompt of an example and its own answer."""
        answer = example.answer
        if self.wanted in ("auto", "solution"):
            answer = self.solutions.get(example.question, answer)
        if not answer:
            raise ConfigError(
                f"training example {example.id} has no answer to train on. Give task.answer_field,"
                " conversations that end with an answer, or a task whose rows have answers."
            )
        prompt, decode = self.task.prompt(example), self.lm.decode
        if isinstance(prompt, str):
            tokens = [*encode_answer(decode.tokenizer, answer), find_end(decode)]
            return Given(
                encode_prompts(decode.tokenizer, [prompt])[0], tokens, [True] * len(tokens)
            )
        tools = prompt.tools if isinstance(prompt, Conversation) else []
        messages = [*prompt, {"role": "assistant", "content": answer}]
        own = "messages" in example.extra  # other prompts may hold worked examples
        first = _first_answer(messages) if own else len(prompt)
        return encode_given(decode, messages, first, tools)


def _first_answer(messages: Messages) -> int:
    return next(n for n, message in enumerate(messages) if message["role"] == "assistant")
