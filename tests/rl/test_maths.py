"""Answers of mathematics, on cases of public test suites and of our own.

HENDRYCKS: github.com/hendrycks/math, modeling/math_equivalence_test.py (all). MATH_VERIFY: github.com/huggingface/Math-Verify,
tests/test_all.py and test_mixed_number_extraction.py: those that `maths` promises; what it decides otherwise is in DIFFERENT.
"""

import time

import pytest

from argosy.rl.expressions import NoExpression, equivalent, values
from argosy.rl.rewards.final_answer import final_answer
from argosy.rl.rewards.maths import equal, grade, reference_answer

HENDRYCKS = [
    (r"\tfrac{1}{2} + \frac1{72}", r"\frac{1}{2} + 2/3", False),
    ("10, 4, -2", "4, 10, -2", False),
    ("10, 4, 2", "4, 12, 2", False),
    (r"\tfrac{1}{2} +\! \frac1{72}", r"\dfrac{1}{2} +\frac{1}{72}", True),
    (r"10\text{ units}", "10 ", True),
    (r"10\text{ units}", "100 ", False),
    ("10", r"\$10", True),
    (r"\left(x-2\right)\left(x+2\right)", "(x-2)(x+2)", True),
    ("0.1, 4, 2", "4, .1, 2", False),
    ("0.1", ".1", True),
    (r"10\%", "10", True),
    (r"10\sqrt{3} + \sqrt4", r"10\sqrt3 + \sqrt{4}", True),
    (r"\frac34i", r"\frac{3}{4}i", True),
    (r"\tfrac83", r"\frac{8}{3}", True),
    ("5x - 7y + 11z + 4 = 0", "x + y - z + 2 = 0", False),
    ("1/2", r"\frac{1}{2}", True),
]

# Answer, text, whether it is right.
MATH_VERIFY = [
    ("-5", "-5", True),
    ("7425000", "7,425,000", True),
    ("1000", "1000.0", True),
    ("1000.0", "1,000.0", True),
    ("0.4", ".4", True),
    ("1000.99", "$1,000.99", True),
    ("1000.99", "1,000.99$", True),
    ("1000.99", "the number is not 10 which is 1,000.99€", True),
    ("1000.99", "so the number is 10 which is 1,000.99m²", True),
    ("1000.99", "not it's not 10 it's 1,000.99m²", True),
    ("2", "AZYUK2A", False),
    ("10/9", r"\boxed{\frac{10}{9}}", True),
    ("-10/9", r"\boxed{-\frac{10}{9}}", True),
    ("$[0,1)$", r"\boxed{[0,1)}", True),
    ("$[0,9)$", r"\boxed{[0,1)}", False),
    ("$(0,9)$", r"\boxed{[0,9)}", False),
    ("$1$", r"\boxed{-[0,1)}", False),
    ("$9$", "Answer $ 9 $", True),
    ("$10$", r"\boxed{(9+1)}", True),
    ("$1/3$", r"\boxed{\frac13 }", True),
    ("$1$", r"\boxed{\frac3{3} }", True),
    (r"$\sqrt{3}$", r"\boxed{\sqrt3 }", True),
    ("$1/3$", r"\boxed{\cfrac{1}{3}}", True),
    ("$1/3$", r"\boxed{\left( \frac{1}{3} \right)}", True),
    ("$1/3$", r"\boxed{\frac{1}{3} \text{meters}}", True),
    ("$1/3$", r"\boxed{\frac{1}{3} \textbf{meters}}", True),
    ("$1/3$", r"\boxed{k = \frac{1}{3}}", True),
    (r"$28\%$", r"\boxed{28\%}", True),
    (r"$28\%$", r"\boxed{28 \text{ percent}}", True),
    (r"$28\%$", r"\boxed{28 percent}", True),
    (r"$28\%$", r"\boxed{28 pct}", True),
    (r"$28\%$", "28 %", True),
    (r"$28\%$", "28", True),
    ("$0.28$", "28", False),
    ("$28/100$", "28", False),
    ("$28$", "28/100", False),
    (r"$\frac{28}{100}$", "28", False),
    ("$2-2p$", r"If $2-x=p$, then $x=2-p$. Thus $x-p=\boxed{2-2p}$.", True),
    (
        r"In order for $N$ to be divisible by 12 ... Therefore, $\boxed{14{,}916}$ is our answer.",
        "Final Answer: The final answer is $14 {, }916$. I hope it is correct. Note: the solution assumes 12.",
        True,
    ),
    (r"$(3, \frac{\pi}{2})$", r"the polar coordinates are $\boxed{\left( 3, \frac{\pi}{2} \right)}.$", True),
    (r"$\frac{14}{3}$", r"$f(-2)+f(-1)+f(0)=2+\frac{5}{3}+1=\boxed{\frac{14}{3}}$", True),
    (r"$\text{Evelyn}$", r"Therefore, $\boxed{\text{Evelyn}}$ is our answer.", True),
    (r"$90^\circ$", r"so the angle is $\boxed{90^\circ}$", True),
    (r"\boxed{12\text{ and }13}", r"\boxed{12, 13}", True),
    (r"$\begin{bmatrix}0 & 0 \\0 & 0\end{bmatrix}$", r"\boxed{\begin{pmatrix}0 & 0 \\0 & 0\end{pmatrix}}", True),
    (
        r"$\begin{pmatrix}\frac{1}{2} & \frac{3}{4} \\ \frac{5}{6} & \frac{7}{8}\end{pmatrix}$",
        r"\boxed{\begin{pmatrix}\frac12 & 0.75 \\ \frac{5}{6} & 7/8\end{pmatrix}}",
        True,
    ),
    (r"$\begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix}$", r"\boxed{\begin{pmatrix}1 & 2 \\ 3 & 5\end{pmatrix}}", False),
    (r"$\frac{1}{12}$", "$0.0833333333333333$", True),
    (r"$(1,\frac{9}{2})$", r"\boxed{(1,4.5)}", True),
    (r"$\frac{x+2}{7}$", r"\boxed{\frac{x}{7}+\frac{2}{7}}", True),
    (r"$\tan^2(y)+1$", r"\boxed{\sec^2(y)}", True),
    ("$34x+45y-20z+100=0$", r"\boxed{-34x-45y+20z-100=0}", True),
    (
        r"$\frac{\sqrt{\sqrt{11}+\sqrt{194}}}{15+2\sqrt{33}}$",
        r"\boxed{\frac{\sqrt{\sqrt{11}+\sqrt{194}}}{2\sqrt{33}+15}}",
        True,
    ),
    ("$(a+5)(b+2)$", r"\boxed{(+5)(b+2)}", False),
    ("$2$", r"\boxed{\frac{1+\sqrt{5}}{2}}", False),
    ("$4$", r"\boxed{\frac{34}{16}+\frac{\sqrt{1358}}{16}}", False),
    (r"$1\sqrt{19}$", r"\boxed{1}", False),
    ("$x+2n+1$", r"\boxed{x+1}", False),
    ("$2/3$", "P(A) = (1/2) * (4/3) P(A) = 2/3 Therefore, the probability that Alice wins the game is 2/3.", True),
    ("$[0,1)$", "Final Answer: The final answer is $(0, 1)$. I hope it is correct. <|im_start|>user", False),
    ("$16386.20$", r"worth $\boxed{\$16,\!386.20}$ at the end. The answer is $16,\!386.20$.", True),
    ("12000023", "Final Answer: The final answer is 12,000,023. I hope it is correct. <|im_start|>user", True),
    ("$14916$", r"The smallest possible value of $N$ is $\boxed{14{,}916}$. I hope it is correct.", True),
    ("40/9", "The answer is 4 4/9.", True),
    ("-40/9", r"\boxed{-4 4/9}", True),
    ("4", "The answer is 4 4/9.", False),
    ("71/6", r"\boxed{11 5/6}", True),
    ("9004/9", r"\boxed{1 000 4/9}", True),
    *((number, r"\boxed{4 4/0}", False) for number in ("4", "0")),
    *((number, r"\boxed{11 7/6}", False) for number in ("11", "7/6", "73/6", "59/6")),
    ("1000", r"\boxed{1 000}", True),
    ("4/9", "There are 4 objects and 4/9 remain.", True),
]

# Read otherwise by math-verify: a comma as the decimal point; a list as a set.
DIFFERENT = [("1.22", r"\boxed{1,22}"), ("1, 2", r"\boxed{2, 1}")]

OURS = [
    (r"\sin^2 x + \cos^2 x", "1", True),
    (r"\sqrt{x^2}", "x", False),
    (r"\sqrt{x^2}", "|x|", True),
    (r"(x+1)^2", "x^2+2x+1", True),
    (r"\frac{1}{x-1}-\frac1{x+1}", r"\frac{2}{x^2-1}", True),
    (r"2^{100}", "1267650600228229401496703205376", True),
    (r"2^{100}", "1267650600228229401496703205377", False),
    ("1000000", "1000001", False),
    ("0.000001", "0.000002", False),
    ("123456789.5", "123456789.4", False),
    ("0.3333333", "1/3", True),
    ("0.33", "1/3", False),
    (r"\sqrt[3]{-8}", "-2", True),
    (r"\log_2 8", "3", True),
    (r"\binom{5}{2}", "10", True),
    ("5!", "120", True),
    (r"e^{i\pi}", "-1", True),
    (r"x_1+x_2", "x_2+x_1", True),
    (r"x_1", "x_2", False),
    (r"-x^2", "x^2", False),
    (r"2\frac13", "7/3", True),
    (r"2\cdot\frac13", "7/3", False),
    (r"x \in (-\infty,3]\cup[4,\infty)", r"(-\infty, 3] \cup [4, \infty)", True),
    (r"(-\infty,3]", r"(\infty,3]", False),
    (r"\{1,2,2\}", r"\{2,1,2\}", True),
    (r"\{1,2\}", r"\{1,3\}", False),
    ("(1,2)", "(2,1)", False),
    ("(1,2)", "(1,2]", False),
    ("(1,2)", "1,2", False),
    ("0.5,2", "1/2,2", True),
    ("18 dollars", r"\$18", True),
    ("5 hours per day", "5", True),
    ("5x", "5", False),
    (r"\text{(A)}", "A", True),
    (r"\text{yes}", "Yes", True),
    ("Evelyn", "nylevE", False),
    ("2x=4y", "x-2y=0", True),
    ("x=5", "5", True),
    ("", "", False),
    ("1/0", "1/0+1", False),
]


@pytest.mark.parametrize(("a", "b", "right"), HENDRYCKS + OURS)
def test_answers_are_equal_or_not(a, b, right):
    assert equal(a, b) is right
    assert equal(b, a) is right


@pytest.mark.parametrize(("answer", "text", "right"), MATH_VERIFY)
def test_texts_end_with_the_answer_or_not(answer, text, right):
    assert grade(text, answer) is right


@pytest.mark.parametrize(("answer", "text"), DIFFERENT)
def test_what_is_decided_otherwise_than_by_math_verify(answer, text):
    assert not grade(text, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, then $\boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
        (r"$\boxed 5$ is it", "5"),
        (r"\fbox{7}", "7"),
        (r"\boxed{1} and then it breaks off \boxed{\frac{1}{2", None),
        ("48/2 = <<48/2=24>>24 clips in May.\n#### 72", "72"),
        ("<think>2 or 3?</think><answer> 3 </answer>", "3"),
        (r"<answer>so \boxed{4}</answer>", "4"),
        ("The answer is **12**.", "12"),
        ("Final Answer: The final answer is $x^2$. I hope it is correct.", "x^2"),
        ("5-3 is 2. So it is about 1,234.50 in all.", "1,234.50"),
        ("it falls to -3", "-3"),
        ("nothing here", None),
        ("", None),
    ],
)
def test_the_final_answer(text, answer):
    assert final_answer(text) == answer


# Completion, answer, whether it is right: the last number counts only where it stands alone.
WHOLE = [
    (r"Answer: \frac{1}{2}", "1/2", True),
    (r"Answer: \frac{1}{2}", "2", False),
    (r"so it is \frac{3}{4} of the cake.", "3/4", True),
    (r"so it is \frac{3}{4} of the cake.", "4", False),
    (r"the side is $2\sqrt{3}$", r"2\sqrt{3}", True),
    (r"the side is $2\sqrt{3}$", "3", False),
    (r"the area is 9\pi", r"9\pi", True),
    (r"the area is 9\pi", "9", False),
    (r"so $x^2$", "2", False),
    (r"so $x_2$", "2", False),
    (r"which gives 2^{10}", "1024", True),
    (r"which gives 2^{10}", "10", False),
    ("the sum is sqrt(2)", r"\sqrt{2}", True),
    ("the sum is sqrt(2)", "2", False),
    ("it ends in 3x", "3", False),
    ("it ends in 3x + 1", "1", False),
    ("it ends in 3x + 1", "1 + 3x", True),
    ("the pair is (3, 4)", "4", False),
    ("the pair is (3, 4)", "(3,4)", True),
    ("the ratio is 3:4", "4", False),
    ("the ratio is 3:4", "3:4", True),
    ("it is 2 1/3", "1/3", False),
    ("it is 2 1/3", "7/3", True),
    (r"it is 1.5 \times 10^3", "1500", True),
    (r"it is 1.5 \times 10^3", "3", False),
    # Arithmetic that is not carried out is no number, nor is what breaks off.
    ("we need 2 + 3", "5", False),
    ("we need 2 + 3", "3", False),
    ("2 + 3 =", "5", False),
    ("= 4 * (2^2 + 1) = 4 *", "4", False),
    (r"that is \frac{1", "1", False),
    ("3 * apples", "3", False),
    # Prose around a number.
    ("4 * 5 = 20 apples", "20", True),
    ("She makes 9 * 2 = $18 every day.", "18", True),
    ("**Total: 42**", "42", True),
    ("Total: **42**.", "42", True),
    ("* 42", "42", True),
    ("- 42 apples", "42", True),
    ("it costs 5/hour", "5", True),
    ("5 (or five)", "5", True),
    ("there are 12!", "12", True),
    ("a 5km run", "5", True),
    ("about 20 - a guess", "20", True),
    ("It is a 7", "7", True),
    ("So x = -3.", "-3", True),
    ("10 apples (see step 2)", "2", True),
    ("28 %", "28", True),
]


@pytest.mark.parametrize(("text", "answer", "right"), WHOLE)
def test_the_last_number_is_never_cut_out_of_an_expression(text, answer, right):
    assert grade(text, answer) is right


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        (r"<think>\boxed{5}</think> #### 6", "6", True),
        (r"<think>\boxed{5}</think> #### 6", "5", False),
        (r"<think>it is 5", "5", False),
        (r"<think>so \boxed{5}", "5", False),
        (r"so \boxed{5}</think> It is 6.", "6", True),
        (r"so \boxed{5}</think> It is 6.", "5", False),
        ("<think>5</think>", "5", False),
        (r"[THINK]\boxed{5}[/THINK]6", "6", True),
        (r"<thinking>\boxed{5}</thinking> 6", "6", True),
        (r"◁think▷\boxed{5}◁/think▷ 6", "6", True),
        (r"<seed:think>\boxed{5}</seed:think> 6", "6", True),
    ],
)
def test_thoughts_are_not_graded(text, answer, right):
    assert grade(text, answer) is right


def test_a_thought_that_the_prompt_opens_must_be_closed():
    assert not grade(r"so \boxed{5}", "5", thinking=True)
    assert grade(r"so 4</think>\boxed{5}", "5", thinking=True)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("so 4 apples, and then", False),
        ("4 * (2^2 + 1) = 4", False),
        ("the answer is 4", False),
        ("#### 4", False),
        ("The answer is 4. I", True),
        ("#### 4\nThe", True),
        (r"\boxed{4} apples, and", True),
        ("<answer>4</answer> and", True),
        (r"The answer is $4$ and", True),
    ],
)
def test_what_was_cut_has_only_an_answer_that_it_finished(text, right):
    assert grade(text, "4", cut=True) is right


@pytest.mark.parametrize(
    ("text", "right"),
    [(r"so \boxed{4}", True), ("#### 4", True), ("the answer is 4", False), ("<answer>4</answer>", False), ("4", False)],
)
def test_strict_takes_a_box_or_four_hashes(text, right):
    assert grade(text, "4", strict=True) is right


def test_the_column_may_hold_a_number_an_answer_or_a_solution():
    assert grade("#### 72", 72)
    assert grade("#### 72.0", 72.0)
    assert reference_answer("Natalia sold 48/2 = 24 clips in May.\n#### 72") == "72"
    assert reference_answer(r"so $\boxed{\frac12}$ by 3.") == r"\frac12"
    assert reference_answer("x + 2") == "x + 2"


HOSTILE = ["9^{9^{9^{9}}}", "(" * 5000, "2^{10^{10}}", "100000000!", "1" * 20000, "-" * 3000, r"\frac" * 999, "{" * 3000 + "}" * 3000]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_cheap(text):
    start = time.process_time()
    assert not equal(text, "1")
    assert not grade(rf"\boxed{{{text}}}", "1")
    assert time.process_time() - start < 1


def test_what_is_no_expression():
    for text in ("", "Evelyn", "1 2", "(1", "1/0", "3 4/5 6"):
        with pytest.raises(NoExpression):
            values(text)
    assert equivalent("x+x", "2x")
