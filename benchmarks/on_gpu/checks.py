"""The checks that are run on a GPU, in the order in which a reader wants to know their results.

First what everything else depends on, then the numbers of whole runs, then the figures that others
published and the distance to what the chip allows; at the end the other tests and benchmarks. What
comes before them fits into a call of nine minutes and one of four, but for 8B.
"""

from dataclasses import dataclass

TESTS = ["-m", "pytest", "-q", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider"]
TESTS += ["-p", "benchmarks.on_gpu.plugin"]
TESTS += ["-o", "filterwarnings=default"]  # a warning of another version is no failure here
KERNELS = "tests/oracles/test_philox.py tests/oracles/test_varlen.py tests/unit/test_flash.py"
KERNELS += " tests/unit/test_graphs.py tests/unit/test_hardware.py"
WHOLE_RUNS = "tests/runs/test_gpu.py"
LEAST = 15  # seconds below which no check is begun: most of it is imports
SHARE = 0.5  # the share of its limit without which a check is not begun


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: what it is called in the table.
        seconds: the most that it may take.
        words: the arguments of `python -m benchmarks`, or the files of tests.
        about: what it shows.
    """

    name: str
    seconds: int
    words: str
    about: str

    @property
    def is_test(self) -> bool:
        """Whether it is made of tests."""
        return self.words.startswith("tests/")

    @property
    def least(self) -> float:
        """The seconds without which it is not begun: the next one that fits is."""
        return max(LEAST, SHARE * self.seconds)

    @property
    def command(self) -> list[str]:
        """The arguments of Python."""
        if self.is_test:
            return [*TESTS, *self.words.split()]
        return ["-m", "benchmarks", *self.words.split(), "--device", "cuda"]


CHECKS = [
    Check("kernels", 90, KERNELS, "random numbers, flash attention, CUDA graphs"),
    Check("agreement", 60, "agreement", "short runs beside the same ones on the CPU"),
    Check("layer", 30, "population --layer 8192", "one layer under a population"),
    Check(
        "population-1.5b",
        60,
        "published --row population-1.5b",
        "a step of EGGROLL, 1.5B, 1,536 completions",
    ),
    Check("grpo-0.5b", 60, "published --row grpo-0.5b", "a step of GRPO, 0.5B"),
    Check("distance", 45, "distance --model 0.5b --repeats 3", "distance to the chip, by phase"),
    Check(
        "grpo-gpt2",
        120,
        "grpo --model gpt2 --cumulative --beta 0 --repeats 1",
        "a step of GRPO, GPT-2, switch by switch",
    ),
    Check("deterministic", 50, "published --row deterministic", "the price of opt=[deterministic]"),
    Check("grpo-1.5b-nf4", 50, "published --row grpo-1.5b-nf4", "memory of an adapter on nf4"),
    Check("eggroll", 90, "eggroll --repeats 2", "a step of EGGROLL, switch by switch"),
    Check("rft", 45, "rft --repeats 2", "the sampling of RFT, switch by switch"),
    Check("sampler-0.5b", 45, "sampler --model 0.5b --repeats 2", "sampling beside generate, 0.5B"),
    Check(
        "trl-0.5b",
        90,
        "grpo --model 0.5b --brief --cumulative --beta 0 --repeats 1",
        "a step of GRPO beside TRL, 0.5B",
    ),
    Check(
        "grpo-8b-20k",
        280,
        "published --row grpo-8b-20k",
        "8B with 8 x 20,000 tokens, 19,000 of them shared",
    ),
    Check("whole runs", 240, WHOLE_RUNS, "whole runs, resumed ones, memory that runs out"),
    Check("population-0.5b", 90, "population --model 0.5b --repeats 2", "a population by rows"),
    Check("memory", 90, "memory", "memory of EGGROLL's training beside sampling"),
    Check("loader", 60, "loader --repeats 2", "batches of varying length"),
]
NAMES = {check.name: check for check in CHECKS}
