"""What measuring implementations finds: planted ones that are slow, wrong or broken, and the names of cases."""

import jax
import jax.numpy as jnp
import pytest

from argosy.core.errors import BadInput
from argosy.ops.attention import ATTENTION, Score, See, attention, attention_reference
from argosy.ops.attention.case import AttentionCase
from argosy.ops.grouped import GROUPED_MATMUL, grouped_matmul
from argosy.ops.grouped.case import GroupedCase
from argosy.ops.op import Implementation, Op, implementations, recorded_cases, winners
from argosy.ops.tuning import difference, measure, winner
from tests.helpers import later

CASE = AttentionCase((2, 12, 2, 4), (2, 12, 1, 4), (2, 12, 1, 4), "float32", segments=True)
SLEEP_S = 0.02


def slow(*args, **more):
    return later(attention_reference(*args, **more), SLEEP_S)


def op_with(default: Implementation, **others: Implementation) -> Op:
    """An op whose default on CPUs is `default`, with the reference as its specification."""
    op = Op("attention", "attention", prefer={"cpu": ("usual",)})
    op.add("reference", Implementation(attention_reference))
    op.add("usual", default)
    for name, candidate in others.items():
        op.add(name, candidate)
    return op


def test_the_faster_wins_and_the_slow_lose():
    timings = measure(op_with(Implementation(slow), slower=Implementation(lambda *a, **m: later(slow(*a, **m), SLEEP_S))), CASE, 0.01)
    by = {candidate.implementation: candidate for candidate in timings}
    assert [candidate.implementation for candidate in timings if candidate.default] == ["usual"] == [timings[0].implementation]
    assert winner(timings) is by["reference"]
    assert by["reference"].ratio > 2
    assert by["slower"].ratio < 0.9
    assert by["slower"].seconds >= 2 * SLEEP_S
    assert not by["slower"].wins
    assert by["reference"].faster > 0.5
    assert 0 <= by["slower"].faster < 0.5
    assert all(candidate.faster <= 1 for candidate in timings)


def test_a_default_that_is_the_fastest_stays():
    timings = measure(op_with(Implementation(attention_reference), slow=Implementation(slow)), CASE, 0.01)
    best = winner(timings)
    assert best is None or best.implementation == "reference", "which is the same function as the default"
    assert not next(candidate for candidate in timings if candidate.implementation == "slow").wins


@pytest.mark.parametrize("off", [1e-3, float("nan")])
def test_what_is_wrong_wins_nothing(off: float):
    wrong = Implementation(lambda *a, **m: attention_reference(*a, **m) * (1 + off))
    timings = measure(op_with(Implementation(slow), wrong=wrong), CASE, 0.01)
    candidate = next(candidate for candidate in timings if candidate.implementation == "wrong")
    assert candidate.ratio > 2
    assert candidate.reason.startswith("wrong")
    assert not candidate.wins
    assert winner(timings).implementation == "reference"


def test_a_wrong_gradient_alone_is_found():
    @jax.custom_vjp
    def same(y):
        return y

    same.defvjp(lambda y: (y, None), lambda _, g: (1.01 * g,))
    timings = measure(
        op_with(Implementation(slow), wrong=Implementation(lambda *a, **m: same(attention_reference(*a, **m)))), CASE, 0.01
    )
    candidate = next(candidate for candidate in timings if candidate.implementation == "wrong")
    assert candidate.error == pytest.approx(0.01, rel=0.01)
    assert not candidate.wins


def test_what_breaks_or_refuses_is_no_hindrance():
    def broken(*_, **__):
        raise RuntimeError("no such kernel")

    refused = Implementation(attention_reference, lambda *_: "not here")
    timings = measure(op_with(Implementation(slow), broken=Implementation(broken), refused=refused), CASE, 0.01)
    assert {candidate.implementation: candidate.reason for candidate in timings} == {
        "usual": "",
        "reference": "",
        "broken": "RuntimeError: no such kernel",
    }
    assert winner(timings).implementation == "reference"


def test_without_memory_for_the_reference_nothing_is_chosen():
    timings = measure(op_with(Implementation(slow)), CASE, 0.01, memory=CASE.reference_bytes)
    assert winner(timings) is None
    assert all(candidate.reason for candidate in timings)


def test_blocks_of_any_size_equal_the_reference():
    case = AttentionCase((2, 40, 4, 8), (2, 40, 2, 8), (2, 40, 2, 8), "float32", segments=True, window=17)
    inputs, more = case.arguments()

    def of(name: str):
        def passes(*inputs):
            y, back = jax.vjp(lambda *a: case.call(ATTENTION[name], a, more), *inputs)
            return y, *back(jnp.sin(y))

        lowered = jax.jit(passes).lower(*inputs)
        return lowered.as_text(), lowered.compile()(*inputs)

    (small, got), (default_value, _), (_, expected) = map(of, ("blocked:16", "blocked", "reference"))
    assert small != default_value
    assert difference(got, expected) < 1e-5


def test_an_implementation_without_blocks_says_so():
    with pytest.raises(BadInput, match="no sizes of blocks"):
        ATTENTION["reference:32"]


def test_a_call_is_described_as_it_is_made_and_its_winner_is_taken():
    inputs, more = CASE.arguments()
    cast = GroupedCase(10, (3, 4, 5), "float32", "float32")
    (x, w), rest = cast.arguments()

    def both(q, k, v, x, w):
        *_, see, score, _ = CASE.described((q, k, v), more)
        return attention(q, k, v, see, score), grouped_matmul(x, w, rest["sizes"])

    with recorded_cases() as cases:
        jax.eval_shape(both, *inputs, x, w)
    assert list(cases.values()) == [CASE, cast]
    assert list(cases) == [
        "attention float32 B2 T16 S16 N2 K1 H4 U4 causal aligned segments",
        "experts float32 X16 E3 D4 M5",
    ]

    def text(**selection: str | None) -> str:
        with implementations(**selection):
            return jax.jit(lambda *a: both(*a)).lower(*inputs, x, w).as_text()

    plain, reference = text(), text(attention="reference")
    assert plain != reference
    with winners({CASE.name: "reference"}):
        assert text() == reference
        assert text(attention="blocked") == plain, "what a setting names still wins"
    with winners({CASE.name: "splash", cast.name: "of a package that is gone"}):
        assert text() == plain, "one that refuses or is gone leaves the choice to the op"
    with winners({CASE.name.replace("B2", "B4"): "reference"}):
        assert text() == plain, "of another shape"


def test_arguments_of_a_case_make_the_case():
    cases = [
        CASE,
        AttentionCase((1, 8, 4, 4), (1, 8, 2, 4), (1, 8, 2, 6), "bfloat16", window=3, cap=5.0, sinks=True),
        AttentionCase(
            (1, 8, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4), "float32", causal=False, aligned=False, bias=True, picked=True, lse=True
        ),
    ]
    for case in cases:
        inputs, more = case.arguments()
        assert ATTENTION.case(*case.described(inputs, more)) == case
        y = jax.eval_shape(lambda *a: case.call(ATTENTION["reference"], a, more), *inputs)  # noqa: B023
        assert y.shape == (*case.q[:3], case.v[-1])
    for stored in ("float32", "int8"):
        case = GroupedCase(20, (4, 8, 8), "float32", stored)
        inputs, more = case.arguments()
        assert GROUPED_MATMUL.case(*case.described(inputs, more)) == case
        assert len(inputs) == (1 if stored == "int8" else 2)
        assert int(more["sizes"].sum()) == 20
        y = jax.eval_shape(lambda *a: case.call(GROUPED_MATMUL["ragged_dot"], a, more), *inputs)  # noqa: B023
        assert y.shape == (20, 8)


def test_other_masks_are_other_cases():
    q = jnp.zeros((1, 4, 2, 4))
    at = jnp.zeros((1, 4), jnp.int32)
    plain = ATTENTION.case(q, q, q, See(at, at, aligned=True), Score(1.0), False)
    near = ATTENTION.case(q, q, q, See(at, at, aligned=True), Score(1.0, 2), False)
    packed = ATTENTION.case(q, q, q, See(at, at, at, at, aligned=True), Score(1.0), False)
    assert len({plain.name, near.name, packed.name}) == 3
