"""Forced ends: a completion that has not ended in time is told to answer (ScaleRL,
arXiv:2510.13786).

Shortly before max_new_tokens it is given a text, which carries no loss as the model has not drawn
it, and the model goes on behind that. Draws are keyed by their position, so that neither batches
nor ranks change them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from common.config import ConfigError, ForcedEndConfig, SamplingConfig
from common.engine import Completions, Engine, Requests, Watch


@dataclass(frozen=True)
class ForcedEnd:
    """ids: the tokens of the text; answer: the tokens that are left behind it, of max_new_tokens;
    pad_id: fills rows.
    """

    ids: Sequence[int]
    answer: int
    pad_id: int

    @classmethod
    def find(cls, cfg: ForcedEndConfig, lm: Any, task: Any) -> "ForcedEnd":
        """Return what the settings ask for. Raises: ConfigError where the text leaves no room, and
        for an environment.
        """
        text, new = cfg.text, lm.run.algo.sampling.max_new_tokens
        ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
        if hasattr(task, "episode"):
            raise ConfigError(
                f"algo.forced_end.text={text!r} does not go with episodes of several turns. Leave"
                " it out."
            )
        if len(ids) + cfg.tokens >= new:
            raise ConfigError(
                f"algo.forced_end.text={text!r} has {len(ids)} tokens; with"
                f" algo.forced_end.tokens={cfg.tokens} behind it nothing is left of"
                f" algo.sampling.max_new_tokens={new}. Raise that, or lower algo.forced_end.tokens."
            )
        return cls(ids, cfg.tokens, lm.tokenizer.pad_token_id)

    def generate(
        self,
        engine: Engine,
        requests: Requests,
        sampling: SamplingConfig,
        watch: Watch | None = None,
    ) -> Completions:
        """Sample completions of max_new_tokens at most, those that are told to answer with the text
        in them.
        """
        assert requests.population is None, "members of a population are not told to answer"
        width = sampling.max_new_tokens
        start = width - self.answer  # of the answer
        first = start - len(self.ids)  # token of the text
        begun = engine.generate(requests, replace(sampling, max_new_tokens=first), watch)
        rows = (~begun.finished & ~begun.broken).nonzero()[:, 0]
        places = [divmod(row, requests.samples) for row in rows.tolist()]
        tokens = F.pad(begun.tokens, (0, width - first), value=self.pad_id)
        logprobs = None if begun.logprobs is None else F.pad(begun.logprobs, (0, width - first))
        lengths, finished, broken = begun.lengths, begun.finished, begun.broken
        if places:
            ids = requests.ids or range(len(requests.prompts))
            tokens[rows, first:start] = torch.tensor(self.ids, device=tokens.device)
            following = replace(
                requests,
                prompts=[
                    [*requests.prompts[prompt], *row[:start]]
                    for (prompt, _), row in zip(places, tokens[rows].tolist(), strict=True)
                ],
                ids=[ids[prompt] for prompt, _ in places],
                samples=1,
                begun=[(requests.first_sample + sample, start) for _, sample in places],
            )
            answers = engine.generate(following, replace(sampling, max_new_tokens=self.answer))
            tokens[rows, start:] = answers.tokens
            lengths[rows] = start + answers.lengths
            finished[rows], broken[rows] = answers.finished, answers.broken
            if logprobs is not None and answers.logprobs is not None:
                logprobs[rows, start:] = answers.logprobs
        trains = torch.arange(width, device=tokens.device) < lengths[:, None]
        trains[rows, first:start] = False
        return Completions(tokens, lengths, finished, logprobs, broken, trains)
