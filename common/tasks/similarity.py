"""The likeness of two texts: rewards of a completion, and measures of a whole set.

Sentence BLEU is sacrebleu's, with its usual settings (13a tokens, exponential smoothing, effective
order); the measures of a set are corpus BLEU and chrF at sacrebleu's defaults, so their numbers
compare with published ones.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import Levenshtein
import numpy as np
from sacrebleu.metrics import BLEU, CHRF

from common.statistics import contributions
from common.tasks.rows import percent


def text_metrics(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return corpus BLEU and chrF (sacrebleu's defaults), and the percentage of equal texts.

    BLEU counts up to four words in a row, so it is 0 where all texts have fewer.
    """
    return {
        # force: do not warn of tokenized full stops, which here are the model's; the score is the
        # same
        "bleu": min(100.0, BLEU(force=True).corpus_score(hypotheses, [references]).score),
        "chrf": min(100.0, CHRF().corpus_score(hypotheses, [references]).score),
        "exact": percent(map(str.__eq__, hypotheses, references)),
    }


def text_scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """Return by measure of `text_metrics` what each pair of texts adds to it, in points: of the
    corpus measures by the jackknife, from sacrebleu's counts of each pair.
    """
    by_measure = {"exact": [100.0 * (a == b) for a, b in zip(hypotheses, references, strict=True)]}
    measures: dict[str, Any] = {"bleu": BLEU(force=True), "chrf": CHRF()}
    for name, measure in measures.items():
        counts = np.array(measure._extract_corpus_statistics(hypotheses, [references]))

        def compute(rows: np.ndarray, measure: Any = measure) -> np.ndarray:
            scores = (measure._compute_score_from_stats(row).score for row in rows.tolist())
            return np.array([min(100.0, score) for score in scores])

        _, by_measure[name] = contributions(counts, compute)
    return by_measure


# --- completion and target, both stripped -> [0, 1]


def _exact(completion: str, target: str) -> float:
    return float(completion == target)


def _share(measure: Any, completion: str, target: str) -> float:
    # rounding inside sacrebleu can give a little over 100
    return min(1.0, _against(measure, target).corpus_score([completion], None).score / 100)


# A target is scored against many completions (members, samples), so its n-grams are counted once,
# which one object for all targets would not do.
@lru_cache(maxsize=2048)
def _against(measure: Any, target: str) -> Any:
    options: Any = {"effective_order": True} if measure is BLEU else {}
    return measure(references=[[target]], **options)


SIMILARITIES = {
    "levenshtein": Levenshtein.ratio,
    "chrf": partial(_share, CHRF),
    "bleu": partial(_share, BLEU),
    "exact": _exact,
}
