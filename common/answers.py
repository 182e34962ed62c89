"""The given answers of training examples as token ids, with marks of the tokens that carry loss.

Where they come from (algo.answers): the answer of a row, its worked solution, the assistant's turns
of a conversation, or a game that the task can play (`teach`).
"""

import random
from dataclasses import dataclass
from typing import Any

from common.config import ConfigError, Run
from common.episodes import Given, Transcriber
from common.examples import Examples, read_examples
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


class Source:
    """Encodes the answers of examples.

    Raises: ConfigError if the task lacks what algo.answers names, or the tokenizer an end of text.
    """

    def __init__(self, run: Run, lm: LanguageModel, task: Any) -> None:
        self.run, self.task = run, task
        self.features, self.wanted = TaskFeatures(task), run.algo.answers
        self.transcriber = Transcriber(lm.decode, lm.stop_ids)
        solution, teach = self.features.solution, self.features.teach
        if self.wanted == "auto" and self.features.episode:
            self.wanted = "teach"
        if self.wanted == "teach" and teach is None:
            other = "an algorithm that learns from rewards"
            other = other if self.features.episode else "algo.answers=auto"
            raise ConfigError(
                f"algo.answers={run.algo.answers}: {class_name(task)} has no method teach, which"
                f" plays an episode to learn from. Add one, or use {other}."
            )
        if self.wanted == "solution" and solution is None:
            raise ConfigError(
                f"algo.answers=solution: {class_name(task)} has no worked solutions. With"
                " task=custom give task.solution_field; or use algo.answers=answer."
            )

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
        answer, solution = "", self.features.solution
        if self.wanted in ("auto", "solution") and solution is not None:
            answer = solution(example) or ""
        if self.wanted == "auto" or self.wanted == "answer":
            answer = answer or example.answer
        if not answer.strip():
            what, advice = "answer", "task.answer_field, or conversations that end with an answer"
            if self.wanted == "solution":
                what, advice = "worked solution", "one, or use algo.answers=auto"
            raise ConfigError(
                f"algo.answers={self.wanted}: training example {example.id} has no {what} to learn"
                f" from: {example.question!r:.60}. Give {advice}; or leave the row out"
                " (task.incomplete=skip, for rows without what a field of the task names)."
            )
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
