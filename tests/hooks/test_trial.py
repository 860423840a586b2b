"""Trials of compression: what they decide, of which losses, and which runs they refuse as no pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import run_ranks
from scipy import stats
from support.every import every
from trials import DIFFERENCES, EVEN, decisions
from workers import trial as cases

import gradstats
from gradstats.errors import InputError, NonFiniteGradientError
from gradstats.hooks.trial import Trial, decide


def losses_of(first, last, steps=8):
    """Return a training whose losses fall in a line, to `last` where it is compressed."""

    def train(install, seed):
        end = install(torch.nn.Linear(2, 2))
        for t in range(steps):
            batch = 1e-3 * seed if t == 1 else 0
            yield first + (last(seed, end) - first) * t / (steps - 1) + batch if t else first

    return train


def test_bounds_are_student_s_and_each_look_spends_a_third():
    above = [0.01, 0.03, -0.02, 0.005, 0.0]
    decision, low, high = decide(above, 0.02, 8)
    sem = np.std(above, ddof=1) / np.sqrt(5)
    assert high == pytest.approx(np.mean(above) + stats.t.isf(0.05 / 3, 4) * sem)
    assert low == pytest.approx(np.mean(above) - stats.t.isf(0.05 / 3, 4) * sem)
    assert decision == "undecided"
    assert decide(above[:4], 0.02, 8) == ("undecided", -np.inf, np.inf)  # no look falls there
    assert decide(above[:4], 0.5, 5)[0] == "confirmed"  # of at most five: 3, 4 and 5
    assert decide([0.0, 0.0, 0.0], 0.02, 8)[0] == "confirmed"
    assert decide([0.3, 0.31, 0.3], 0.02, 8)[0] == "refused"


@pytest.mark.parametrize("noise", DIFFERENCES)
def test_a_wrong_decision_is_rare(noise):
    """On the mean that is exactly the tolerance each decision is wrong in at most 5 of 100."""
    rng = np.random.default_rng(3)
    drawn = [decisions(noise, rng) for _ in range(400)]
    share = {
        (mean, said): np.mean([d[mean] == said for d in drawn])
        for mean in drawn[0]
        for said in ("confirmed", "refused")
    }
    allowed = stats.binom.ppf(0.999, len(drawn), 0.05) / len(drawn)
    assert share[0.0, "refused"] <= 0.01
    assert share[0.1, "confirmed"] <= 0.01
    # the mean of a skewed difference is underestimated by most samples, so that side is not promised
    if noise in EVEN:
        assert share[0.02, "confirmed"] <= allowed
    assert share[0.02, "refused"] <= allowed
    if noise != "normal, 2 %":
        # eight pairs that differ in one of ten may all be alike
        least = 0.65 if noise == "a fifth in one of ten" else 0.75
        assert share[0.0, "confirmed"] > least
        assert share[0.1, "refused"] > least


def test_losses_bounds_and_words_of_a_confirmed_trial():
    train = losses_of(2.0, lambda seed, end: 1.0 + 0.001 * (seed % 3) * bool(end))
    done = []
    result = Trial(train, lambda model: "compressed", steps=8, seed=3, last=0.25).run(
        lambda n, most: done.append((n, most))
    )
    assert result.decision == "confirmed"
    assert done == [(n, 16) for n in range(1, 7)]
    assert [pair["seed"] for pair in result.pairs] == [3, 4, 5]
    assert result.losses.shape == (3, 2, 8)
    # the last two of eight
    assert result.pairs[2]["compressed"] == pytest.approx((2 - 0.998 * 6 / 7 + 1.002) / 2)
    assert result.pairs[2]["dense"] == pytest.approx((2 - 6 / 7 + 1.0) / 2)
    mean = np.mean([p["compressed"] / p["dense"] - 1 for p in result.pairs])
    assert result.above == pytest.approx(mean)
    assert result.low < mean < result.high < 0.02
    assert str(result).startswith(
        "Confirmed: at most 2 % above the dense loss. The compressed loss "
    )
    assert f"ends {100 * mean:+.1f} % from" in str(result)
    assert "3 pairs of 8 steps" in str(result)
    assert repr(result) == "<TrialResult: Confirmed: at most 2 % above the dense loss; 3 pairs>"


def test_what_ends_far_below_dense_is_not_within_the_tolerance_of_it():
    better = losses_of(2.0, lambda seed, end: 1.0 - 0.1 * bool(end))
    result = Trial(better, lambda model: True, steps=8, tolerance=0.125).run()
    assert str(result).startswith("Confirmed: at most 12.5 % above the dense loss. The compressed")
    assert "tolerance 12.5 %." in str(result)


@pytest.mark.slow
def test_a_training_that_hardly_learns_confirms_little():
    def tried(first, **options):
        train = losses_of(first, lambda seed, end: 1.0 + 1e-4 * bool(end))
        return Trial(train, lambda model: True, steps=8, **options).run()

    little = tried(1.05)
    # the first of eight steps beside the last two
    fell = 1.05 / ((1.05 - 0.05 * 6 / 7 + 1.0) / 2) - 1
    assert little.fell == pytest.approx(fell, rel=1e-5)  # of losses in float32
    assert (little.decision, little.verdict.warn) == ("confirmed", True)
    assert (
        "That says little: the dense loss itself fell by 4.6 % of where it ended. Take more steps"
        in str(little)
    )
    assert "the dense loss itself did not fall." in str(tried(0.95))
    # a fall of five times the tolerance is enough
    for enough in (tried(1.2), tried(1.05, tolerance=0.009)):
        assert (enough.decision, enough.verdict.warn) == ("confirmed", False)
        assert "says little" not in str(enough)


@pytest.mark.slow
def test_a_refused_and_an_undecided_trial_say_so():
    worse = losses_of(2.0, lambda seed, end: 1.2 + 0.001 * seed if end else 1.0)
    result = Trial(worse, lambda model: True, steps=8).run()
    assert (result.decision, len(result.pairs)) == ("refused", 3)
    assert str(result).startswith("Refused: more than 2 % above the dense loss")
    assert result.verdict.warn
    varied = losses_of(2.0, lambda seed, end: 1.0 + 0.1 * (-1) ** seed * bool(end))
    result = Trial(varied, lambda model: True, steps=8, pairs=5).run()
    assert (result.decision, len(result.pairs)) == ("undecided", 5)
    assert str(result).startswith("Undecided. ")
    assert result.low < 0 < 0.02 < result.high


def test_a_compressed_run_that_diverges_ends_the_trial():
    bad = losses_of(2.0, lambda seed, end: np.nan if end else 1.0)
    result = Trial(bad, lambda model: True, steps=8).run()
    assert (result.decision, len(result.pairs)) == ("refused", 1)
    assert str(result) == (
        "Refused: the compressed training met NaN or infinity. "
        "Its loss is nan at step 1 of seed 0; dense it was finite."
    )


def test_equal_runs_are_said_to_be_equal():
    result = Trial(losses_of(2.0, lambda *_: 1.0), lambda model: None, steps=8).run()
    assert result.decision == "confirmed"
    # as where nothing is lost, or where no hook was registered
    assert result.verdict.headline.startswith("Confirmed, or not tried: no loss differs")
    assert result.verdict.warn
    assert str(result).endswith("see that install registers it.")
    one = losses_of(2.0, lambda seed, end: 1.0 + 1e-6 * (bool(end) and seed == 2))
    result = Trial(one, lambda model: True, steps=8).run()
    assert (result.verdict.headline, result.verdict.warn) == (
        "Confirmed: at most 2 % above the dense loss",
        False,
    )


def test_a_training_that_runs_share_something_of_is_refused():
    """A schedule that is made once: what is trained second, dense or compressed, trains at another rate."""

    def shared(fall):
        taken = []

        def train(install, seed):
            install(torch.nn.Linear(2, 2))
            loss = 2.0 + 0.01 * seed
            for _ in range(30):
                yield loss
                loss *= 1 - fall * 0.9 ** len(taken)
                taken.append(seed)

        return train

    with pytest.raises(InputError) as error:
        Trial(shared(0.05), lambda model: True, steps=30).run()
    said = str(error.value)
    assert said.startswith("the dense training of seed 0 is not the same twice, its loss at step 1")
    assert "schedules, iterators and counters in train" in said
    # a difference below a quarter of the tolerance decides nothing
    assert Trial(shared(1e-3), lambda model: True, steps=30, tolerance=0.1).run().decision


def test_the_global_random_state_is_left_alone_and_both_runs_have_the_seed_s():
    drawn = []

    def train(install, seed):
        install(torch.nn.Linear(2, 2))
        for _ in range(3):
            drawn.append(torch.rand(()).item())
            yield 1.0 + drawn[-1]

    before = torch.get_rng_state()
    Trial(train, lambda model: None, steps=3).run()
    assert torch.equal(torch.get_rng_state(), before)
    # dense, compressed, and the first of the dense ones once more
    assert np.array_equal(drawn[6:9], drawn[:3])
    runs = np.reshape([*drawn[:6], *drawn[9:]], (3, 2, 3))
    assert np.array_equal(runs[:, 0], runs[:, 1])
    assert len(np.unique(runs[:, 0])) == 9


def test_a_run_that_a_hook_refuses_as_not_finite_has_diverged():
    """As where the gradient of a finite loss is not finite: the hook raises it in the backward pass, on all ranks."""

    def train(install, seed):
        compressed = install(torch.nn.Linear(2, 2))
        for step in range(8):
            yield 2.0 - 0.1 * step
            if compressed and step == 4:
                raise NonFiniteGradientError(
                    "step 4: NaN or infinite gradient elements: 2 on rank 0"
                )

    result = Trial(train, lambda model: True, steps=8).run()
    assert (result.decision, len(result.pairs)) == ("refused", 1)
    # the loss was finite: what was not is said as the hook says it, and what skips such steps is named
    assert str(result).startswith("Refused: the compressed training met NaN or infinity. Its hook")
    assert "of seed 0, step 4: NaN or infinite gradient elements: 2 on rank 0; dense" in str(result)
    assert "pass it to the hook's state (scaler=)." in str(result)

    def overflows(install, seed):
        """Refuse the first gradient, before the loss is yielded, as where a loss scaler starts too high."""
        compressed = install(torch.nn.Linear(2, 2))
        for step in range(8):
            if compressed:
                raise NonFiniteGradientError("step 0: NaN or infinite gradient elements: 2")
            yield 2.0 - 0.1 * step

    at_once = Trial(overflows, lambda model: True, steps=8).run()
    assert str(at_once).startswith("Refused: the compressed training met NaN or infinity. Its hook")
    with pytest.raises(NonFiniteGradientError, match="step 4"):  # dense it is no result
        Trial(
            lambda install, seed: train(lambda m: install(m) or True, seed), lambda m: True, steps=8
        ).run()


def test_seeds_that_change_nothing_are_no_pairs():
    def train(install, seed):
        end = install(torch.nn.Linear(2, 2))
        yield from (2.0, 1.0 + 0.019 * bool(end))

    with pytest.raises(
        InputError, match="the dense losses of the seeds 5 and 6 are the same: draw"
    ):
        Trial(train, lambda model: True, steps=2, seed=5).run()


def never_installed(install, seed):
    yield from (1.0, 1.0)


def other_batches(install, seed):
    install(torch.nn.Linear(2, 2))
    other_batches.loss += 0.1
    yield from (other_batches.loss, 1.0)


other_batches.loss = 1.0


def yielding(loss):
    """Return a training whose losses are no numbers."""

    def train(install, seed):
        install(torch.nn.Linear(2, 2))
        yield from (loss, loss)

    return train


@pytest.mark.slow
@every(
    ("train", "options", "words"),
    [
        (never_installed, {}, "train must call install(model) before its first step"),
        (losses_of(2.0, lambda *_: 1.0, steps=2), {"steps": 3}, "each of the 3 steps"),
        (losses_of(2.0, lambda *_: np.inf), {}, "the dense training has a loss of inf at step 1"),
        (losses_of(2.0, lambda *_: -3.0), {"steps": 8}, "yield a loss that is positive"),
        (other_batches, {}, "the first losses of seed 0 differ, 1.1 dense and 1.2 compressed"),
        (None, {}, "train must be a function, not None"),
        (lambda install, seed: None, {}, "the loss of each step, one number; it returned NoneType"),
        (yielding(None), {}, "one number; it yielded None"),
        (yielding({"loss": 1.0}), {}, "one number; it yielded a value of type dict"),
        (yielding("1.0"), {}, "one number; it yielded '1.0'"),
        (yielding(torch.ones(3)), {}, "one number; it yielded 3 numbers"),
        (never_installed, {"tolerance": 0}, "tolerance must be"),
        (never_installed, {"pairs": 2}, "pairs must be at least 3"),
        (never_installed, {"steps": 0}, "steps must be at least 1"),
        (never_installed, {"last": 1.5}, "last must be"),
    ],
)
def test_what_is_no_trial_is_refused_in_one_line(train, options, words):
    with pytest.raises(InputError) as error:
        Trial(train, lambda model: True, **{"steps": 2} | options).run()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_it_is_public():
    assert gradstats.Trial is Trial


@pytest.mark.distributed
def test_ranks_decide_alike_on_the_mean_of_their_losses():
    ranks = run_ranks(2, cases.cases)
    for name, decision in (("all", "confirmed"), ("few", "refused")):
        assert [r[name][0] for r in ranks] == [decision] * 2
        assert np.array_equal(ranks[0][name][3], ranks[1][name][3])
        assert ranks[0][name][1:3] == ranks[1][name][1:3]
    # rows that differ from rank to rank, and the same on all of them
    assert [r["all"][4] for r in ranks] == [False] * 2
    assert [r["same"] for r in ranks] == [[True, True]] * 2
    # all elements, sent by the hook, add up in another order at most
    both = ranks[0]["all"][3]
    assert both[:, 0] == pytest.approx(both[:, 1], rel=1e-5)
    assert [r["short"] for r in ranks] == [
        f"train must yield a loss for each of the 30 steps; on this rank it yielded {n}"
        for n in (30, 29)
    ]
