"""The state of a run in a checkpoint: one flat dict, whatever keeps it."""

import json

import pytest

from common.run import RunState


def test_a_checkpoint_holds_one_flat_dict():
    state = RunState(digests={"rows": "1"}, own={"cursor": 3})
    content = json.loads(json.dumps(state.content()))
    assert content == {
        "step": 0,
        "seconds": 0.0,
        "generated": 0,
        "evaluations": 0,
        "skipped": 0,
        "tracker": {},
        "reproducible": True,
        "digests": {"rows": "1"},
        "cursor": 3,
    }


def test_a_state_takes_over_what_it_has_written():
    written = RunState(step=4, before={"metrics": {"a": 1.0}}, updates_left=2, own={"best": [1]})
    state = RunState(own={"best": [], "idle": 0})
    own = state.own
    state.update(json.loads(json.dumps(written.content())))
    assert (state.step, state.before, state.updates_left) == (4, {"metrics": {"a": 1.0}}, 2)
    assert state.own is own == {"best": [1], "idle": 0}


def test_a_checkpoint_that_lacks_a_field_leaves_it():
    state = RunState(step=1, skipped=2)
    state.update({"step": 5})
    assert (state.step, state.skipped) == (5, 2)


def test_an_own_key_is_no_field():
    with pytest.raises(ValueError, match=r"'step'.*another name"):
        RunState(own={"step": 1}).content()


def test_a_checkpoint_names_reward_evaluations_as_ever():
    content = RunState(reward_evaluations=7).content()
    assert (content["evaluations"], "reward_evaluations" in content) == (7, False)
    state = RunState()
    state.update(content)
    assert (state.reward_evaluations, state.own) == (7, {})
