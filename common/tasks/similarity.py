"""Text similarity: edit distance, chrF, BLEU; as rewards of a completion, and as measures of a
whole set.

Sentence BLEU is sacrebleu's, with its usual settings (exponential smoothing, effective order); the
measures of a set are corpus BLEU and chrF at sacrebleu's defaults, so that their numbers compare
with published ones. BLEU's tokenizer is sacrebleu's for the target language, 13a for languages with
blanks between words; `signatures` names it.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import Levenshtein
import numpy as np
from sacrebleu.metrics import BLEU, CHRF

from common.config import ConfigError
from common.tasks.base import percent
from common.uncertainty import contributions

log = logging.getLogger("clutch")


USUAL = "13a"  # sacrebleu's tokenizer of languages with blanks between words
# The tokenizers of other languages; char (one token per character) if sacrebleu has none.
TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab", "char": "char"}
# Their codes (ISO 639) and English names.
LANGUAGES = {
    "zh": "zh zho chi cmn yue wuu nan hak lzh chinese mandarin cantonese",
    "ja": "ja jpn japanese",
    "ko": "ko kor korean",
    "char": "th tha thai lo lao km khm khmer my mya bur burmese bo bod tib tibetan dz dzo dzongkha",
}
_BY_NAME = {name: kind for kind, names in LANGUAGES.items() for name in names.split()}
# One match a character, or a word of the scripts that have words.
_UNITS = re.compile(
    "(?P<kana>[\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f])"
    "|(?P<han>[\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af])"
    "|(?P<ko>[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]+)"
    "|(?P<char>[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff])"
    r"|(?P<words>[^\W\d_])[a-zA-Z\u00c0-\u052f]*"
)
_SAMPLE = 2000  # the most references whose script is examined


def find_tokenizer(language: str | None, references: Iterable[str], key: str = "language") -> str:
    """Return the name of sacrebleu's BLEU tokenizer for a language: a code such as zh, pt-BR or
    zho_Hans, or an English name; None = by the script of most references.

    Raises: ConfigError for an unknown language, with the setting `key`.
    """
    if language is None:
        kind = _find_script(references)
    else:
        first = re.split("[-_ (]", language.strip().lower())[0]
        kind = _BY_NAME.get(first)
        if kind is None and not re.fullmatch("[a-z]{2,3}", first):
            raise ConfigError(
                f"{key}={language!r} is no code of a language. Give one such as zh, ja, ko, th, de"
                " or pt-BR, or null: the script of the answers then says it."
            )
    return USUAL if kind is None else _installed(TOKENIZERS[kind])


def _find_script(references: Iterable[str]) -> str | None:
    """Return the key of LANGUAGES for the language of texts; None for languages with blanks between
    words.
    """
    texts = list(references)
    texts = texts[:: max(1, len(texts) // _SAMPLE)]
    found = Counter(match.lastgroup for text in texts for match in _UNITS.finditer(text[:1000]))
    chinese, kana = found.pop("han", 0), found.pop("kana", 0)
    # Japanese text has a kana for every character or two of Chinese origin.
    found["ja" if 10 * kana > chinese else "zh"] = chinese + kana
    kind, count = max(found.items(), key=lambda item: item[1])
    return kind if count and kind != "words" else None


@cache
def _installed(tokenizer: str) -> str:
    """Return the tokenizer, or char if its packages are not installed."""
    try:
        BLEU(tokenize=tokenizer)
    except (RuntimeError, ImportError):
        log.warning(
            "sacrebleu's tokenizer %s needs a package that is not installed, so BLEU counts"
            " characters (tok:char). Install: pip install 'sacrebleu[%s]'",
            *(tokenizer, tokenizer.partition("-")[0]),
        )
        return "char"
    return tokenizer


def signatures(tokenizer: str = USUAL) -> dict[str, str]:
    """Return sacrebleu's signatures of the measures of a set, with which others can
    reproduce them.
    """
    found = {}
    for name, measure in _measures(tokenizer).items():
        measure.corpus_score(["a"], [["a"]])  # which fills in the number of references
        found[name] = str(measure.get_signature())
    return found


def count_words(text: str, tokenizer: str = USUAL) -> int:
    """Return the number of words that BLEU counts in a text."""
    words = text if tokenizer == USUAL else BLEU(tokenize=tokenizer).tokenizer(text.strip())
    return len(words.split())


def _measures(tokenizer: str) -> dict[str, Any]:
    # force: do not warn of tokenized full stops, which here are the model's; the score is the same
    return {"bleu": BLEU(force=True, tokenize=tokenizer), "chrf": CHRF()}


def text_metrics(
    hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = USUAL
) -> dict[str, float]:
    """Return corpus BLEU and chrF (sacrebleu's defaults except for BLEU's tokenizer), and the
    percentage of equal texts.

    BLEU counts up to four words in a row, so it is 0 if all texts have fewer.
    """
    found = {
        name: min(100.0, measure.corpus_score(hypotheses, [references]).score)
        for name, measure in _measures(tokenizer).items()
    }
    return found | {"exact": percent(map(str.__eq__, hypotheses, references))}


def text_scores(
    hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = USUAL
) -> dict[str, list[float]]:
    """Return per measure of `text_metrics` the contribution of each pair of texts, in points; those
    of corpus measures by the jackknife, from sacrebleu's counts of each pair.
    """
    by_measure = {"exact": [100.0 * (a == b) for a, b in zip(hypotheses, references, strict=True)]}
    for name, measure in _measures(tokenizer).items():
        counts = np.array(measure._extract_corpus_statistics(hypotheses, [references]))

        def compute(rows: np.ndarray, measure: Any = measure) -> np.ndarray:
            scores = (measure._compute_score_from_stats(row).score for row in rows.tolist())
            return np.array([min(100.0, score) for score in scores])

        _, by_measure[name] = contributions(counts, compute)
    return by_measure


# --- completion and target, both stripped -> [0, 1]


def _exact(completion: str, target: str) -> float:
    return float(completion == target)


def _share(measure: Any, completion: str, target: str, tokenizer: str = USUAL) -> float:
    # rounding inside sacrebleu can give a little over 100
    scorer = _against(measure, target, tokenizer)
    return min(1.0, scorer.corpus_score([completion], None).score / 100)


# A target is scored against many completions (members, samples), so its n-grams are counted once
# and cached in an object per target.
@lru_cache(maxsize=2048)
def _against(measure: Any, target: str, tokenizer: str) -> Any:
    options: Any = {"effective_order": True, "tokenize": tokenizer} if measure is BLEU else {}
    return measure(references=[[target]], **options)


SIMILARITIES = {
    "levenshtein": Levenshtein.ratio,
    "chrf": partial(_share, CHRF),
    "bleu": partial(_share, BLEU),
    "exact": _exact,
}


def find_similarity(name: str, tokenizer: str = USUAL) -> Callable[[str, str], float]:
    """Return one of SIMILARITIES, with BLEU's words split by a tokenizer."""
    return (
        partial(SIMILARITIES["bleu"], tokenizer=tokenizer) if name == "bleu" else SIMILARITIES[name]
    )
