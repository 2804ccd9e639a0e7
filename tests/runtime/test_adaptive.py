"""Draft lengths by schedule and by cost model; the output equals plain decoding."""

import dataclasses
import itertools

import pytest

from jspec.runtime import policies
from jspec.runtime.cost_model import Acceptance, Calibration, LatencyModel, PendingDraft
from jspec.runtime.policies import Adaptive, BatchSizeSchedule, ByThroughput, Costs

COSTS = Costs(passes={1: 10.0, 3: 12.0, 5: 16.0}, drafts={0: 0.0, 2: 0.0, 4: 0.0})


def one_request(costs=COSTS, **options):
    """A policy of up to four drafts for one request in slot 0."""
    drafting = Adaptive(levels=(0, 2, 4), costs=costs, **options)
    policy = ByThroughput(drafting, num_drafts=4, max_requests=1)
    policy.start(0)
    return policy


def feed(policy, outcomes, slot=0):
    """Drafts four tokens again and again, of which as many as given come true."""
    for kept in outcomes:
        policy.observe(slot, [], [1, 2, 3, 4], None)
        policy.observe(slot, [1, 2, 3, 4][:kept] + ([9] if kept < 4 else []), [], None)


# A schedule by batch size.


def test_a_schedule_keeps_the_number_before_a_gap_and_after_the_end():
    schedule = BatchSizeSchedule([(1, 16, 3), (32, 128, 2)])
    table = schedule.table(max_requests=200, num_drafts=4)
    assert len(table) == 200
    assert table[0] == table[15] == table[16] == table[30] == 3
    assert table[31] == table[127] == table[128] == table[199] == 2


def test_a_schedule_never_asks_for_more_than_the_drafter_drafts():
    schedule = BatchSizeSchedule([[1, 2, 8], [3, 3, 0]])
    assert schedule.table(max_requests=4, num_drafts=5) == (5, 5, 0, 0)
    policy = policies.policy(schedule, num_drafts=5, max_requests=4)
    assert policy.levels == (0, 5)
    assert [policy.draft(range(n)) for n in (1, 2, 3, 4)] == [5, 5, 0, 0]
    assert policy.verify({0: 5, 3: 2}) == {0: 5, 3: 2}


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        None,
        "1-4",
        [(1, 4)],
        [(1, 4, 2, 1)],
        [(2, 4, 3)],
        [(0, 4, 3)],
        [(1, 4, -1)],
        [(4, 1, 3)],
        [(1, 4, 3), (4, 8, 2)],
        [(9, 12, 1), (1, 8, 2)],
        [(1, 4, 2.0)],
        [(1, True, 2)],
        [5],
    ],
)
def test_a_schedule_that_is_none_is_refused(ranges):
    with pytest.raises(ValueError, match=r"for example \[\(1, 16, 3\)"):
        BatchSizeSchedule(ranges)


# Estimates.


def test_an_estimate_is_the_faded_mean_of_outcomes_and_of_the_prior():
    acceptance = Acceptance([0.5, 0.5], memory=2.0)
    assert acceptance.survival == [0.5, 0.25]
    acceptance.add(0, True)  # (0.5 * 1 + 1) / (0.5 * 2 + 1): the prior counts as two outcomes
    assert acceptance.rates == pytest.approx([1.5 / 2, 0.5])
    acceptance.add(0, False)  # (0.5 * 1.5) / (0.5 * 2 + 1)
    assert acceptance.rates == pytest.approx([0.75 / 2, 0.5])
    assert acceptance.survival == pytest.approx([0.75 / 2, 0.375 / 2])


def test_expected_drafts_are_corrected_by_accepted_ones_but_never_upwards():
    calibration = Calibration()
    assert calibration.factor == 1.0
    calibration.add(2.0, 7)
    assert calibration.factor == 1.0
    for _ in range(200):
        calibration.add(2.0, 1)
    assert calibration.factor == pytest.approx(0.5, abs=0.01)


def test_drafts_that_are_accepted_less_often_than_expected_are_no_longer_verified():
    policy = one_request()
    feed(policy, [4] * 10)
    assert policy.verify({0: 4}) == {0: 4}
    for _ in range(60):
        policy._expected = {0: 4.0}
        policy.observe(0, [9], [], None)
    assert policy.verify({0: 4}) == {0: 0}


def test_a_draft_is_compared_with_the_next_tokens_verified_or_not():
    pending = PendingDraft([5, 6, 7])
    assert [pending.follow(5), pending.follow(6), pending.depth] == [True, True, 2]
    assert pending.follow(8) is False
    exhausted = PendingDraft([5])
    assert [exhausted.follow(5), exhausted.follow(6)] == [True, None]


def test_a_tree_is_followed_along_the_branch_that_came_true():
    parents = [-1, -1, 1, 1, 3]
    pending = PendingDraft([5, 6, 7, 8, 9], parents)
    assert [pending.follow(token) for token in (6, 8, 9)] == [True] * 3 and pending.depth == 3
    assert pending.follow(1) is None
    assert PendingDraft([5, 6, 7, 8, 9], parents).follow(7) is False


def test_outcomes_of_a_request_are_those_of_its_positions_and_end_at_the_first_error():
    policy = one_request(memory=1e6)
    policy.observe(0, [], [1, 2, 3, 4], None)
    policy.observe(0, [1, 2, 9], [5, 6, 7, 8], None)
    policy.observe(0, [5], [], None)
    policy.observe(0, [6], [], None)
    kept = policy._requests[0]
    prior = 2 * policies._PRIOR_RATE  # it counts as two outcomes
    right, wrong = (prior + 2) / 4, prior / 3
    assert kept.rates == pytest.approx([right, right, wrong, policies._PRIOR_RATE], abs=1e-4)


def test_a_new_request_starts_from_what_others_knew_and_forgets_the_one_before():
    policy = one_request()
    feed(policy, [0] * 30)
    policy.observe(0, [], [1, 2, 3, 4], None)
    policy.start(0)
    assert policy._requests[0].rates == policy._pool.rates
    assert policy._pool.rates[0] < 0.1
    policy.observe(0, [1, 2, 3], [], None)  # drafts of the request before are gone
    assert policy._requests[0].rates == policy._pool.rates


# Choices, with costs of 10, 12 and 16 for one, three and five rows.


def test_nothing_is_verified_where_nothing_was_ever_kept():
    policy = one_request()
    feed(policy, [0] * 20)
    assert policy.verify({0: 4}) == {0: 0}


def test_everything_is_verified_where_everything_was_kept():
    policy = one_request()
    feed(policy, [4] * 20)
    assert policy.verify({0: 4}) == {0: 4}
    assert policy.verify({0: 1}) == {0: 1}
    assert policy.verify({0: 0}) == {0: 0}


@pytest.mark.parametrize(
    "chances, count",
    [
        # tokens by rows 1, 3, 5: 1, 1.110, 1.111; rates 0.1, 0.0925, 0.069
        ([0.1, 0.1, 0.1, 0.1], 0),
        # 1, 1.24, 1.2496: 0.1, 0.1033, 0.078: a gain of 3 % is within the error
        ([0.2, 0.2, 0.2, 0.2], 0),
        # 1, 1.3125, 1.332: 0.1, 0.1094, 0.083
        ([0.25, 0.25, 0.25, 0.25], 2),
        # 1, 2.25, 2.29: 0.1, 0.1875, 0.143
        ([1.0, 0.25, 0.1, 0.5], 2),
        # 1, 2.71, 4.10: 0.1, 0.226, 0.256
        ([0.9, 0.9, 0.9, 0.9], 4),
        # 1, 2, 3.95: only the later ones would pay, if the second were not sure to fail
        ([1.0, 0.0, 1.0, 1.0], 2),
    ],
)
def test_what_is_verified_follows_from_the_arithmetic(chances, count):
    policy = one_request()
    policy._requests[0] = Acceptance(chances, memory=8.0)
    assert policy.verify({0: 4}) == {0: count}


def test_of_equal_rates_the_fewest_drafts_win():
    policy = one_request(Costs(passes={1: 10.0, 3: 15.0, 5: 20.0}, drafts=COSTS.drafts))
    policy._requests[0] = Acceptance([0.5, 0.0, 0.0, 0.0], memory=8.0)  # 1 / 10 = 1.5 / 15
    assert policy.verify({0: 4}) == {0: 0}


def test_more_rows_never_count_as_cheaper():
    policy = one_request(Costs(passes={1: 10.0, 3: 9.0, 5: 8.0}, drafts=COSTS.drafts))
    policy._requests[0] = Acceptance([0.0] * 4, memory=8.0)
    assert policy.verify({0: 4}) == {0: 0}


def test_requests_share_the_rows_by_their_chances():
    costs = Costs(passes={3: 10.0, 9: 11.0, 15: 100.0}, drafts=COSTS.drafts)
    drafting = Adaptive(levels=(0, 2, 4), costs=costs)
    policy = ByThroughput(drafting, num_drafts=4, max_requests=3)
    for slot, chance in enumerate((0.9, 0.1, 0.6)):
        policy.start(slot)
        policy._requests[slot] = Acceptance([chance] * 4, memory=8.0)
    # Nine rows hold six drafts: 0.9, 0.81, 0.729, 0.656 of the first, 0.6, 0.36 of the third.
    assert policy.verify({0: 4, 1: 4, 2: 4}) == {0: 4, 1: 0, 2: 2}
    assert policy.verify({0: 1, 1: 4, 2: 4}) == {0: 1, 1: 1, 2: 4}
    assert policy.verify({2: 4}) == {2: 4}  # eight of nine rows are free beside its own


def test_a_tree_is_verified_whole_or_not_at_all():
    costs = Costs(passes={1: 10.0, 8: 15.0}, drafts={0: 0.0, 7: 0.0})
    policy = ByThroughput(Adaptive(costs=costs), num_drafts=7, max_requests=1, tree_depth=2)
    assert policy.levels == (0, 7)
    policy.start(0)
    policy._requests[0] = Acceptance([0.5, 0.5], memory=8.0)  # 1.75 / 15 > 1 / 10
    assert policy.verify({0: 7}) == {0: 7}
    policy._requests[0] = Acceptance([0.4, 0.2], memory=8.0)  # 1.48 / 15 < 1 / 10
    assert policy.verify({0: 7}) == {0: 0}


def test_drafting_is_chosen_by_what_it_costs():
    costs = dataclasses.replace(COSTS, drafts={0: 0.0, 2: 3.0, 4: 6.0})
    policy = one_request(costs, probe_share=0.0)
    policy._requests[0] = Acceptance([0.9] * 4, memory=8.0)  # 0.1, 2.71 / 15, 4.10 / 22
    assert policy.draft([0]) == 4
    policy._requests[0] = Acceptance([0.8] * 4, memory=8.0)  # 0.1, 2.44 / 15, 3.36 / 22
    assert policy.draft([0]) == 2
    policy._requests[0] = Acceptance([0.3] * 4, memory=8.0)  # 0.1, 1.39 / 15, 1.43 / 22
    assert policy.draft([0]) == 0


def test_probes_take_their_share_of_the_time_and_no_more():
    """Of steps of 10, 2 % save up 0.2 each: after the first one, 15 steps pay for a draft of 3."""
    costs = dataclasses.replace(COSTS, drafts={0: 0.0, 2: 3.0, 4: 3.0})
    policy = one_request(costs)
    feed(policy, [0] * 20)
    drafted = [policy.draft([0]) for _ in range(150)]
    assert [i for i, count in enumerate(drafted) if count] == list(range(0, 150, 15))
    assert set(drafted) == {0, 4}


def test_drafts_that_cost_nothing_are_always_made():
    policy = one_request(probe_share=0.0)
    feed(policy, [0] * 20)
    assert [policy.draft([0]) for _ in range(3)] == [4, 4, 4]


def test_a_policy_at_zero_finds_back_when_drafts_come_true_again():
    policy = one_request(dataclasses.replace(COSTS, drafts={0: 0.0, 2: 0.4, 4: 0.8}))
    feed(policy, [0] * 50)
    assert policy.verify({0: 4}) == {0: 0}
    text = itertools.count()
    upcoming = [next(text) for _ in range(200)]
    for step in range(100):  # one token a step, as nothing is verified; drafts are right now
        count = policy.draft([0])
        if policy.verify({0: count})[0]:
            break
        policy.observe(0, [upcoming[step]], upcoming[step + 1 : step + 1 + count], None)
    assert step < 30


# Costs.


def test_one_slow_step_does_not_count():
    meter = LatencyModel({1: 2.0, 3: 3.0}, {0: 0.0, 4: 1.0})
    assert [meter.run(1), meter.run(3), meter.draft(4)] == [2.0, 3.0, 1.0]
    for seconds in (300.0, 3.0, 3.0):
        meter.observe(1, 4, seconds)
        assert [meter.run(1), meter.run(3), meter.draft(4)] == [2.0, 3.0, 1.0]


def test_a_machine_that_slows_down_does_so_for_every_shape():
    meter = LatencyModel({1: 2.0, 3: 3.0}, {0: 0.0, 4: 1.0})
    for _ in range(3):
        meter.observe(1, 0, 4.0)
    assert [meter.run(1), meter.run(3), meter.draft(4)] == [4.0, 6.0, 2.0]


def test_a_shape_that_costs_more_than_measured_at_first_is_learned():
    meter = LatencyModel({1: 2.0, 3: 3.0}, {0: 0.0, 4: 1.0})
    for _ in range(3):
        meter.observe(1, 0, 2.0)
        meter.observe(1, 4, 3.0)
        meter.observe(3, 0, 6.0)
    assert [meter.run(1), meter.run(3), meter.draft(4)] == [2.0, 6.0, 1.0]


def test_drafting_more_never_counts_as_cheaper():
    assert LatencyModel({1: 1.0}, {0: 0.0, 2: 0.5, 4: 0.25}).draft(4) == 0.5
