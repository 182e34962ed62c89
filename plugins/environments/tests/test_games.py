"""The ready environments: their rules, games that are taught, and texts of a model that looks for
holes.
"""

import random

import pytest

from common.config import ConfigError, shipped
from common.episodes import Turns
from common.model import Decoder, byte_tokenizer
from common.task import build, plain
from launch import compose
from plugins.environments.games import Guess, Maze
from plugins.environments.tools import CHARACTERS, Calculator, Search, Sql
from tests.support.refusals import refuses

GAMES = (Guess, Maze, Calculator, Search, Sql)
TOOLS = (Calculator, Search, Sql)


def play(game, texts):
    """The outcomes of a game, until it is over."""
    outcomes = []
    for text in texts:
        outcomes.append(game.step(text))
        if outcomes[-1][2]:
            break
    return outcomes


def answers(messages):
    return [message["content"] for message in messages if message["role"] == "assistant"]


# --- all of them


@pytest.mark.parametrize("kind", GAMES)
def test_a_seed_is_a_game(kind):
    game, other = kind(), kind()
    starts = [game.reset(seed)[0] for seed in range(30)]
    assert starts == [other.reset(seed)[0] for seed in range(30)]
    taught = game.teach(5, random.Random(1))
    assert taught[0]["content"] == starts[5]
    assert taught == other.teach(5, random.Random(1)), "nothing is left of another game"
    if kind is not Guess:
        assert len(set(starts)) > 1


@pytest.mark.parametrize("kind", GAMES)
def test_taught_games_end_and_are_of_both_kinds(kind):
    draw, earned = random.Random(0), []
    for seed in range(200):
        game = kind()
        messages = game.teach(seed, draw)
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        game.reset(seed)
        outcomes = play(game, answers(messages))
        replies = [m["content"] for m in messages[2:] if m["role"] == "user"]
        assert replies == [outcome[0] for outcome in outcomes[:-1]]
        assert outcomes[-1][2], "the last answer ends the game"
        assert all(reward == 0 for _, reward, *_ in outcomes[:-1])
        earned.append(outcomes[-1][1])
    assert set(earned) == {0.0, 1.0}
    assert 30 < sum(earned) < 170


@pytest.mark.parametrize("kind", GAMES)
def test_games_fit_the_settings_of_their_files(kind):
    node = shipped(f"task/{kind.__name__.lower()}.yaml")
    task, draw = build(node), random.Random(0)
    assert task.name == kind.__name__.lower()
    turns = Turns(task, Decoder(byte_tokenizer()), ())
    for example in task.examples("train")[:200]:
        prompt, rest = task.pretraining(example, draw)
        longest = len(plain(prompt)) + 2 * node["max_new_tokens"] + task.reply_tokens
        assert longest <= 256, "that is the context of model=tiny"
        said = answers(rest)
        assert len(said) <= task.max_turns
        assert sum(len(text) + 1 for text in said) <= node["max_new_tokens"]
        replies = [m for m in rest if m["role"] == "user"]
        assert sum(len(turns.render([m], None)) for m in replies) <= task.reply_tokens


@pytest.mark.parametrize("kind", GAMES)
@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "\0", "\ud800", "9" * 10_000, "١٢", "?NEAR(a b)", "?text:x*"),
        *("=" * 10_000, "?" + '"' * 5000, "?" + "x " * 5000, "SELECT " + "(" * 5000),
        *("=9**9**9**9", "=__import__('os')", "=1/0", "=" + "(" * 150),
        *("SELECT", "SELECT ?", "SELECT '\0'", "SELECT '\ud800'"),
    ],
)
def test_no_text_raises_or_earns_or_has_a_long_reply(kind, text):
    game = kind()
    for seed in range(3):
        game.reset(seed)
        for reply, reward, *_ in play(game, [text] * 20):
            assert reward == 0
            assert len(reply) <= CHARACTERS


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (Guess, {"largest": 1}, "task.settings.largest=1 is not a whole number from 2 to 10000"),
        (Maze, {"size": 10}, "task.settings.size=10 is not a whole number from 2 to 9"),
        (Calculator, {"numbers": 1}, "task.settings.numbers=1 is not a whole number from 2 to 10"),
        (Search, {"people": 1000}, "task.settings.people=1000 is not a whole number from 1 to 132"),
        (Sql, {"calls": 0}, "task.settings.calls=0 is not a whole number from 1 to"),
    ],
)
def test_settings_out_of_range_are_refused(kind, settings, words):
    with pytest.raises(ConfigError) as caught:
        kind(**settings)
    assert words in str(caught.value)


# --- the maze


def test_a_maze_is_a_tree_whose_doors_have_two_sides():
    back = {"n": "s", "s": "n", "e": "w", "w": "e"}
    for size in range(2, 10):
        game = Maze(size=size, moves=size**2 - 1)
        game.reset(size)
        doors = sum(len(ways) for ways in game.ways.values())
        assert doors == 2 * (size**2 - 1), "as many doors as a tree has, from both sides"
        for room, ways in game.ways.items():
            for way in ways:
                assert back[way] in game.ways[room + Maze.WAYS[way]]
        assert [game.step(way)[1] for way in game.route][-1] == 1.0


def test_a_walk_ends_at_the_goal_or_after_the_moves():
    game = Maze(size=2, moves=3)
    look, _ = game.reset(0)
    closed = next(way for way in "es" if way not in look.partition(": ")[2])
    at = look.partition(". ")[2]
    assert play(game, [closed, "nonsense", f"go {closed}", "n"]) == [
        (at, 0.0, False, False, {}),
        (at, 0.0, False, False, {}),
        (at, 0.0, True, False, {}),
    ]
    texts = (
        {"e": "I go East.", "s": "south, please", "n": "North", "w": "west!"},
        # The s of let's and the e of i.e. are no ways.
        {"e": "Let's go e.", "s": "It's s", "n": "i.e. North", "w": "That's w, s"},
    )
    for names in texts:
        game = Maze(size=2)
        game.reset(0)
        assert play(game, [names[way] for way in game.route])[-1][1:3] == (1.0, True)


def test_every_maze_has_a_way_that_is_short_enough():
    refuses(lambda: Maze(size=9), key="moves", value="12")
    for seed in range(50):
        game = Maze(size=4, moves=15)
        game.reset(seed)
        assert len(game.route) <= 15


# --- questions with a tool


def test_a_point_between_digits_is_no_end_of_a_word():
    game = Calculator()
    for text, right in (("{}.0", 1), ("it is {}.", 1), ("1.{}", 0), ("5/{}", 0), ("-{}", 0)):
        game.reset(3)
        assert game.step(text.format(game.answer))[1] == right, text


def test_a_comma_between_thousands_is_no_end_of_a_word():
    game = Calculator(digits=4)
    game.reset(0)
    assert len(game.answer) > 3
    assert game.step(f"It is {int(game.answer):,}.")[1] == 1.0


@pytest.mark.parametrize("kind", TOOLS)
def test_the_first_text_that_is_no_call_is_the_answer(kind):
    for seed in range(20):
        game = kind()
        question, _ = game.reset(seed)
        assert game.answer not in question.split("?")[0].split()
        reply, reward, ended, *_ = game.step(f" {game.call}\n")
        assert (reward, ended) == (0.0, False)
        assert game.answer in reply.split()
        assert game.step(f"It is {game.answer.upper()}.")[1:3] == (1.0, True)
        assert game.step(f"{game.answer}, or something else")[1:3] == (0.0, True)


@pytest.mark.parametrize("kind", TOOLS)
def test_calls_are_counted(kind):
    game = kind(calls=2)
    game.reset(1)
    outcomes = play(game, [game.call] * 5)
    assert [outcome[2] for outcome in outcomes] == [False, False, True]
    assert not any(outcome[1] for outcome in outcomes)


def test_the_calculator_says_why_there_is_no_value():
    game = Calculator()
    game.reset(0)
    assert game.reply("=7 * (5 - 12)") == "-49"
    assert game.reply("=1/3") == "1/3"
    assert game.reply("=1/0") == "a division by zero"
    assert game.reply("=x") == "not whole numbers of up to 12 digits with + - * / ( )"
    assert game.reply("7*5") is None


def test_a_search_finds_the_passage_of_the_rarest_words():
    game = Search()
    texts = ["Ada Cole of Riga is a baker", "Ada Falk of Riga is a judge", "Ben Cole"]
    game.passages = [(text,) for text in texts]
    assert game.reply("?ada riga judge") == texts[1]
    assert game.reply("?Ben") == "Ben Cole"
    assert game.reply("?Cole") == "Ben Cole", "a shorter passage says more with a word"
    assert (
        game.reply("?zebra")
        == game.reply("?")
        == game.reply("?_ ²")
        == game.reply('?"*:^')
        == "nothing"
    )
    assert game.reply('?Ben" OR "Ada') is not None, "quotes have no meaning"


def test_collections_and_tables_differ_between_games():
    search, sql = Search(), Sql()
    kept = []
    for seed in (1, 2):
        search.reset(seed)
        sql.reset(seed)
        kept.append((search.passages, sql.sales))
    assert kept[0][0] != kept[1][0]
    assert kept[0][1] != kept[1][1]
    assert len({passage.partition(" of ")[0] for (passage,) in kept[0][0]}) == 40


def test_a_query_reads_rows():
    game = Sql()
    game.reset(0)
    game.sales = [(482, 5), (731, 7), (482, 9)]
    assert game.reply("select item, Sum(price) from sales group by 1") == "482, 14\n731, 7"
    assert game.reply("SELECT price FROM sales WHERE price > 100") == "no rows"
    assert game.reply("SELECT max(p) FROM (SELECT price AS p FROM sales)") == "9"
    assert game.reply("SELECT name FROM sales") == "error: no such column: name"
    assert game.reply("DELETE FROM sales") is None, "that is an answer, and a wrong one"
    game.sales = [(482, number) for number in range(50)]
    assert game.reply("SELECT price FROM sales").splitlines() == [str(n) for n in range(10)]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM sqlite_master",
        "SELECT * FROM pragma_database_list",
        "SELECT * FROM json_each('[1]')",
        "SELECT load_extension('evil')",
        "SELECT fts3_tokenizer('a', x'00')",
        "SELECT randomblob(1000000000)",
        "SELECT zeroblob(1000000000)",
        "SELECT printf('%1000000000d', 1)",
        "SELECT hex(item) FROM sales",
        "SELECT * FROM (WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
        " SELECT x FROM c)",
        "SELECT 1; DROP TABLE sales",
        "SELECT sum(a.price) FROM sales a, sales b, sales c, sales d, sales e, sales f",
        "SELECT a.item FROM sales a, sales b, sales c, sales d, sales e ORDER BY 1",
        f"SELECT {'(' * 400}1{')' * 400}",
        f"SELECT '{'x' * 1000}'",
        "SELECT item || '" + "' || '".join(["x" * 90] * 9) + "' || item FROM sales a, sales",
    ],
)
def test_a_query_can_do_nothing_else(query):
    game = Sql()
    game.reset(0)
    assert game.reply(query).startswith("error: "), game.reply(query)
    assert len(game.step(query)[0]) <= CHARACTERS
    assert game.reply("SELECT count(price) FROM sales") == "30", "the table is as it was"


def test_a_game_has_the_settings_of_every_environment():
    run = compose(["algo=grpo", "task=guess", "task.call_seconds=5", "task.overlap=true"])
    assert (run.task["call_seconds"], run.task["overlap"]) == (5, True)
    assert run.task["settings"] == {"largest": 31, "guesses": 5}
    assert build(run.task).name == "guess"
